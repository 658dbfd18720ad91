"""The shardings of the weights of a pair that is to be loaded."""

from collections.abc import Callable
from typing import Any

import jax

from eagle_jax.checkpoints.load import shapes_of, target_shapes
from eagle_jax.drafting import (
    DraftModel,
    HydraHeads,
    MedusaHeads,
    SmallModel,
    find_tree_drafter,
)
from eagle_jax.drafting.eagle import FeatureHead
from eagle_jax.errors import InputError
from eagle_jax.interface import Drafter
from eagle_jax.models.quantized import GROUP_SIZE
from eagle_jax.models.transformer import Transformer, TransformerConfig
from eagle_jax.parallel import PairSharding


def target_shardings(
    sharding: PairSharding | None, config: TransformerConfig, bits: int | None = None
) -> Any:
    """Returns the shardings of a target's weights, `None` for the default device.

    Args:
        sharding: The sharding that `shard_pair` returned; `None` for the default
            device.
        config: The target's sizes.
        bits: The bits that `checkpoints.target_bits` returned.

    Raises:
        InputError: If the scales of quantized matrices cannot be split as they are.
    """
    if sharding is None:
        return None
    shapes = target_shapes(config, bits)
    shardings = sharding.target_shardings(shapes)

    def check(shape: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding) -> None:
        try:
            sharding.shard_shape(shape.shape)
        except ValueError as error:
            raise InputError(
                f"int{bits} weights: {shape.shape[0]} groups of {GROUP_SIZE} inputs "
                "cannot be split over the tensor axis of the mesh; give it fewer "
                "devices, or `quantization` int8"
            ) from error

    jax.tree.map(check, shapes, shardings)
    return shardings


def draft_shardings(
    sharding: PairSharding | None, init_params: Callable[..., Any], config: Any
) -> Any:
    """Returns the shardings of a draft model's weights, `None` for the default device.

    Args:
        sharding: The sharding that `shard_pair` returned; `None` for the default
            device.
        init_params: The function that makes the draft model's weights.
        config: The draft model's sizes, with those of a `layer` if it has one.
    """
    if sharding is None:
        return None
    shapes = shapes_of(init_params, config)
    return _with_drafter(sharding, config, shapes).drafter_shardings(shapes)


def with_drafter(
    sharding: PairSharding | None, drafter: Drafter | None, params: Any
) -> PairSharding | None:
    """Returns the sharding of a target with its drafter, `None` for the default device.

    Args:
        sharding: The target's sharding; `None` for the default device.
        drafter: The drafter; `None` for plain decoding.
        params: The drafter's weights.
    """
    grower = find_tree_drafter(drafter)
    if sharding is None or grower is None:
        return sharding
    return model_sharding(sharding, grower.model, params)


def model_sharding(
    sharding: PairSharding, model: DraftModel, params: Any
) -> PairSharding:
    """Returns the sharding of a target with a draft model.

    Args:
        sharding: The target's sharding.
        model: The draft model.
        params: The draft model's weights.
    """
    if isinstance(model, SmallModel):
        assert isinstance(model.target, Transformer)
        return _with_drafter(sharding, model.target.config, params)
    assert isinstance(model, FeatureHead | MedusaHeads | HydraHeads)
    return _with_drafter(sharding, model.config, params)


def _with_drafter(sharding: PairSharding, config: Any, params: Any) -> PairSharding:
    return sharding.with_drafter(getattr(config, "layer", None), params)
