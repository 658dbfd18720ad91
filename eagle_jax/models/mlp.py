"""The feed-forward part of a layer: gated, or a sparse mixture of gated ones."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec
from jax.tree_util import GetAttrKey

from eagle_jax.mesh_axes import split_axes
from eagle_jax.models.linear import init_matrix, linear
from eagle_jax.models.quantized import Matrix


@struct.dataclass(kw_only=True)
class MlpParams:
    """The weights of a gated feed-forward layer; every matrix is `[in, out]`.

    Attributes:
        gate: `[E, intermediate]`, the matrix of the gate; of joined layers `[E, 2 *
            intermediate]`, that of the gate and then `up`.
        up: `[E, intermediate]`, the matrix of the gated values; `None` where `gate`
            holds it.
        down: `[intermediate, E]`, the matrix back to the model's width.
    """

    gate: Matrix
    up: Matrix | None
    down: Matrix


@struct.dataclass(kw_only=True)
class MixtureParams:
    """The weights of a sparse mixture of experts (Mixtral).

    Attributes:
        router: `[E, X]`, the matrix that gives one score per expert.
        experts: The `X` experts, each a feed-forward layer.
    """

    router: jax.Array
    experts: tuple[MlpParams, ...]


def feed_forward(
    params: MlpParams | MixtureParams, x: jax.Array, *, experts_per_token: int = 0
) -> jax.Array:
    """Runs a feed-forward layer, or a mixture of several.

    Args:
        params: The layer's weights.
        x: `[..., E]`, the normalised residual stream.
        experts_per_token: How many experts of a mixture read each token. Static.

    Returns:
        The outputs `[..., E]`, to be added to the residual stream.
    """
    if isinstance(params, MlpParams):
        return _gated(params, x)
    shares = _shares(params.router, x, experts_per_token)
    experts, axes = params.experts, split_axes()
    specs = _specs(experts, axes)
    if specs is None:
        return _mixed(experts, x, shares)

    def parts(
        experts: tuple[MlpParams, ...], x: jax.Array, shares: jax.Array
    ) -> jax.Array:
        return jax.lax.psum(_mixed(experts, x, shares), tuple(axes))

    # Left to the compiler, each expert's output would be summed over the devices.
    whole = PartitionSpec()
    return jax.shard_map(
        parts,
        in_specs=(specs, whole, whole),
        out_specs=whole,
        axis_names=set(axes),
        check_vma=False,
    )(experts, x, shares)


def _mixed(
    experts: tuple[MlpParams, ...], x: jax.Array, shares: jax.Array
) -> jax.Array:
    """Returns the sum `[..., E]` of the experts' outputs by their shares `[..., X]`."""
    total = jnp.zeros_like(x)
    for number, expert in enumerate(experts):
        share = shares[..., number, None]

        def add(
            total: jax.Array,
            expert: MlpParams = expert,
            share: jax.Array = share,
        ) -> jax.Array:
            # Chosen, not multiplied: an expert may overflow on tokens of others.
            return total + jnp.where(share > 0, _gated(expert, x) * share, 0)

        # Few tokens read few experts: the weights of the others are not touched. Which
        # neighbours a token has changes nothing, as it adds 0 for them.
        total = jax.lax.cond((share > 0).any(), add, lambda total: total, total)
    return total


def _specs(experts: tuple[MlpParams, ...], axes: Mapping[str, int]) -> Any:
    """Returns how experts are split over mesh axes; `None` if they are not, or cannot.

    Inner features are split, as `parallel.rules` splits them: the rows of `down`, and
    the columns of the others. A scale of all rows is whole; of 4 bits, whose groups
    share their bytes in pairs, each device needs whole pairs.
    """
    num_devices = math.prod(axes.values())
    is_divided = num_devices > 1

    def spec(path: tuple[Any, ...], leaf: jax.Array) -> PartitionSpec:
        nonlocal is_divided
        is_scales = path[-1] == GetAttrKey("scales")
        if GetAttrKey("down") not in path:
            size, split = leaf.shape[1], PartitionSpec(None, tuple(axes))
        elif is_scales and leaf.shape[0] == 1:
            return PartitionSpec()
        else:
            size = leaf.shape[0] // 2 if is_scales else leaf.shape[0]
            split = PartitionSpec(tuple(axes))
        is_divided &= size % num_devices == 0
        return split

    specs = jax.tree_util.tree_map_with_path(spec, experts)
    return specs if is_divided else None


def _gated(params: MlpParams, x: jax.Array) -> jax.Array:
    gate = linear(x, params.gate)
    if params.up is None:
        gate, up = jnp.split(gate, 2, axis=-1)
    else:
        up = linear(x, params.up)
    return linear(jax.nn.silu(gate) * up, params.down)


def _shares(router: jax.Array, x: jax.Array, experts_per_token: int) -> jax.Array:
    """Returns each expert's weight `[..., X]`: those of the chosen ones add up to 1.

    No expert is ever full: with a capacity, a token's output would depend on its
    neighbours in the tree.
    """
    scores = linear(x, router).astype(jnp.float32)
    best, chosen = jax.lax.top_k(scores, experts_per_token)
    # The distribution over all experts, cut to the chosen ones and scaled to 1, is that
    # over the chosen ones.
    share = jax.nn.softmax(best, axis=-1)
    is_chosen = jax.nn.one_hot(chosen, router.shape[-1], dtype=jnp.float32)
    return (share[..., None] * is_chosen).sum(-2).astype(x.dtype)


def init_mlp(
    key: jax.Array,
    width: int,
    intermediate: int,
    dtype: jnp.dtype,
    *,
    num_experts: int = 0,
) -> MlpParams | MixtureParams:
    """Returns random weights of a layer, a mixture if it has experts.

    Args:
        key: The typed PRNG key of the draws.
        width: The width of the model, `E`.
        intermediate: The width of the feed-forward layer.
        dtype: The type of the weights.
        num_experts: The number of experts, `X`; 0 for a dense layer.
    """
    if num_experts:
        router_key, *keys = jax.random.split(key, 1 + num_experts)
        return MixtureParams(
            router=init_matrix(router_key, (width, num_experts), dtype),
            experts=tuple(_init_gated(k, width, intermediate, dtype) for k in keys),
        )
    return _init_gated(key, width, intermediate, dtype)


def _init_gated(
    key: jax.Array, width: int, intermediate: int, dtype: jnp.dtype
) -> MlpParams:
    gate, up, down = jax.random.split(key, 3)
    return MlpParams(
        gate=init_matrix(gate, (width, intermediate), dtype),
        up=init_matrix(up, (width, intermediate), dtype),
        down=init_matrix(down, (intermediate, width), dtype),
    )
