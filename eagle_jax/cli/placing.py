"""Where the weights of a pair lie that is to be loaded."""

from typing import Any

from eagle_jax.checkpoints.pair import shapes_of
from eagle_jax.drafting import SmallModel, TreeDrafter
from eagle_jax.drafting.feature_head import FeatureHead
from eagle_jax.interface import Drafter
from eagle_jax.models import transformer
from eagle_jax.models.layers import LayerConfig
from eagle_jax.models.transformer import TransformerConfig
from eagle_jax.parallel import Placement


def target_shardings(placement: Placement | None, config: TransformerConfig) -> Any:
    """Returns where each weight of a target lies, `None` without a placement."""
    if placement is None:
        return None
    return placement.target_shardings(shapes_of(transformer.init_params, config))


def draft_shardings(
    placement: Placement | None, layer: LayerConfig, shapes: Any
) -> Any:
    """Returns where each weight of a draft model lies, `None` without a placement."""
    if placement is None:
        return None
    return placement.with_drafter(layer, shapes).drafter_shardings(shapes)


def with_drafter(
    placement: Placement | None, drafter: Drafter | None, params: Any
) -> Placement | None:
    """Returns the placement of a target with its drafter."""
    if placement is None or not isinstance(drafter, TreeDrafter):
        return placement
    model = drafter.model
    if isinstance(model, SmallModel):
        return placement.with_drafter(model.decoder.config.layer, params)
    assert isinstance(model, FeatureHead)
    return placement.with_drafter(model.layer, params)
