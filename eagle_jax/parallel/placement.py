"""Which device holds which part of a pair's weights."""

from collections.abc import Callable
from typing import Any

import jax

from eagle_jax.checkpoints.load import shapes_of, target_shapes
from eagle_jax.errors import InputError
from eagle_jax.models.quantized import GROUP_SIZE
from eagle_jax.models.transformer import TransformerConfig
from eagle_jax.parallel import PairSharding


def target_shardings(
    sharding: PairSharding | None, config: TransformerConfig, bits: int | None = None
) -> Any:
    """Returns the shardings of a target's weights, `None` for the default device.

    Args:
        sharding: The sharding that `shard_pair` returned; `None` for the default
            device.
        config: The target's sizes.
        bits: The bits of its quantized matrices, whose scales may be of groups that
            the mesh cannot split; `None` for none.
    """
    if sharding is None:
        return None
    shapes = target_shapes(config, bits)
    shardings = sharding.target_shardings(shapes)
    try:
        jax.tree.map(lambda x, split: split.shard_shape(x.shape), shapes, shardings)
    except ValueError as error:
        raise InputError(
            f"int{bits} weights: the groups of {GROUP_SIZE} inputs cannot be split "
            "over the tensor axis of the mesh; give it fewer devices, or "
            "`quantization` int8"
        ) from error
    return shardings


def draft_shardings(
    sharding: PairSharding | None, init: Callable[[jax.Array], Any], config: Any
) -> Any:
    """Returns the shardings of a draft model's weights, `None` for the default device.

    Args:
        sharding: The sharding that `shard_pair` returned; `None` for the default
            device.
        init: The function from a key to the draft model's weights.
        config: The draft model's sizes, with those of a `layer` if it has one.
    """
    if sharding is None:
        return None
    shapes = shapes_of(init)
    layer = getattr(config, "layer", None)
    return sharding.with_drafter(layer, shapes).drafter_shardings(shapes)
