"""Heads of every kind, opened from the folder that holds them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from eagle_jax import checkpoints
from eagle_jax.config import Method
from eagle_jax.drafting import (
    Eagle3Head,
    HydraHeads,
    MedusaHeads,
    PrefixHydraHeads,
)
from eagle_jax.drafting.eagle import eagle_model
from eagle_jax.errors import InputError
from eagle_jax.generation.methods import DRAFTS, draft_kind
from eagle_jax.models import eagle3_head, eagle_head, hydra_heads, medusa_heads
from eagle_jax.models.transformer import TransformerConfig


def check_kind(folder: Path, method: Method) -> None:
    """Refuses weights of another method.

    Args:
        folder: The folder of the weights, from `resolve`.
        method: The method, one that drafts with a model.

    Raises:
        InputError: If a folder of Medusa's or Hydra's heads is given to another method,
            or another folder to one of these two.
    """
    kind, wanted = checkpoints.heads_of(folder), draft_kind(method)
    if kind == wanted or (kind is None and wanted not in ("medusa", "hydra")):
        return
    if kind is not None:
        found = f"{DRAFTS[kind]}, for method {kind}"
    elif "fc.weight" in checkpoints.open_weights(folder).names():
        found = "an EAGLE head, for methods eagle2, eagle1 and chain"
    else:
        found = "a whole model, for method small-model"
    raise InputError(f"{folder} holds {found}; method {method} needs {DRAFTS[method]}")


def open_heads(
    folder: Path, target: TransformerConfig, dtype: str, method: Method
) -> tuple[Any, Callable[..., Any], Callable[..., tuple[Any, Any]]]:
    """Opens the heads that a method drafts with, without reading their weights.

    Args:
        folder: The folder of the heads, from `resolve`.
        target: The target's sizes.
        dtype: The type of the weights; not "auto".
        method: The method, one that drafts with heads.

    Returns:
        The heads as a draft model that can be joined with its target, the function that
        makes their weights, and the one that reads them.

    Raises:
        InputError: If the heads cannot be used, or do not fit the target.
    """
    config: Any
    if method == "medusa":
        config = checkpoints.medusa_config(folder, target.vocab_size)
        checkpoints.check_medusa_pair(target, config)
        model = MedusaHeads(config=config, dtype=dtype)
        return model, medusa_heads.init_params, checkpoints.load_medusa
    if method == "hydra":
        config = checkpoints.hydra_config(folder, target.layer)
        checkpoints.check_hydra_pair(target, config)
        kind = HydraHeads if config.layer is None else PrefixHydraHeads
        model = kind(config=config, dtype=dtype)
        return model, hydra_heads.init_params, checkpoints.load_hydra
    if checkpoints.is_eagle3(folder):
        config = checkpoints.eagle3_config(folder)
        checkpoints.check_eagle3_pair(target, config)
        model = Eagle3Head(config=config, dtype=dtype)
        opened = model, eagle3_head.init_params, checkpoints.load_eagle3_head
    else:
        config = checkpoints.head_config(folder)
        checkpoints.check_pair(target, config)
        model = eagle_model(config, dtype)
        opened = model, eagle_head.init_params, checkpoints.load_head
    checkpoints.open_weights(folder)
    return opened
