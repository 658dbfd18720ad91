"""Heads of every kind: the draft model that runs them, and new weights."""

from typing import Any, Protocol

import jax

from eagle_jax.drafting.eagle import Eagle3Head, EagleHead
from eagle_jax.drafting.hydra import HydraHeads, PrefixHydraHeads
from eagle_jax.drafting.medusa import MedusaHeads
from eagle_jax.drafting.model import DraftModel
from eagle_jax.models import eagle3_head, eagle_head, hydra_heads, medusa_heads
from eagle_jax.models.eagle3_head import Eagle3HeadConfig
from eagle_jax.models.eagle_head import EagleHeadConfig
from eagle_jax.models.hydra_heads import HydraConfig
from eagle_jax.models.medusa_heads import MedusaConfig
from eagle_jax.models.transformer import Tables

HeadSizes = EagleHeadConfig | Eagle3HeadConfig | MedusaConfig | HydraConfig
"""The sizes of heads of any kind."""


class HeadModel(DraftModel, Protocol):
    """Heads of any kind as a draft model."""

    @property
    def config(self) -> Any:
        """The heads' sizes."""
        ...

    def join(self, heads: Any, target: Tables, /) -> Any:
        """Returns the drafter's parameters: heads, and the tables that they borrow."""
        ...


def head_model(config: HeadSizes, dtype: str) -> HeadModel:
    """Returns the draft model that runs heads of these sizes.

    Args:
        config: The heads' sizes.
        dtype: The type of their caches and features.
    """
    if isinstance(config, MedusaConfig):
        return MedusaHeads(config=config, dtype=dtype)
    if isinstance(config, HydraConfig):
        is_plain = config.layer is None
        return (HydraHeads if is_plain else PrefixHydraHeads)(
            config=config, dtype=dtype
        )
    if isinstance(config, Eagle3HeadConfig):
        return Eagle3Head(config=config, dtype=dtype)
    return EagleHead(config=config, dtype=dtype)


def most_levels(model: DraftModel) -> int | None:
    """Returns how many levels a model can draft, one per head; `None` for any."""
    if isinstance(model, MedusaHeads | HydraHeads | PrefixHydraHeads):
        return model.config.num_heads
    return None


def init_heads(key: jax.Array, config: HeadSizes, dtype: str = "float32") -> Any:
    """Returns new weights of heads, without tables that they borrow.

    Args:
        key: The typed PRNG key of the draws.
        config: The heads' sizes.
        dtype: The type of the weights.
    """
    if isinstance(config, MedusaConfig):
        return medusa_heads.init_params(key, config, dtype)
    if isinstance(config, HydraConfig):
        return hydra_heads.init_params(key, config, dtype)
    if isinstance(config, Eagle3HeadConfig):
        return eagle3_head.init_params(key, config, dtype)
    return eagle_head.init_params(key, config, dtype)
