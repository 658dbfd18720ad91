"""The feed-forward part of a layer: gated, or a sparse mixture of gated ones.

The experts of a mixture are stacked, and run in one of three ways. Which one depends on
shapes alone, so that a row's outputs do not depend on its neighbours:

    few rows     one after the other, those that a row chose; no other weight is read
    more         all experts on all rows, in one product; most are read anyhow
    many         rows sorted by expert and cut into tiles, of one expert each

`jax.lax.ragged_dot` would do for many on TPUs. On CPUs and GPUs it multiplies every row
with every expert, and keeps a copy of the rows for each.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec
from jax.tree_util import GetAttrKey

from eagle_jax.models.linear import init_matrix, linear
from eagle_jax.models.quantized import Matrix
from eagle_jax.sampling import split_axes

ACTIVATIONS = {"silu": jax.nn.silu, "gelu_pytorch_tanh": jax.nn.gelu}
"""The functions of gates by their names in `config.json`."""

CLAMPED = "clamped_swiglu"
"""The activation of gpt-oss, in which the gate and what it multiplies are bounded."""

_BOUND, _SLOPE = 7.0, 1.702

_MANY = 256
"""The rows from which products take longer than reading all experts does."""

_TILES = (8, 128)
"""The least and the most rows of a tile."""

_LANES = 128
"""The inner features that a device's part must hold in whole groups."""


@struct.dataclass(kw_only=True)
class MlpParams:
    """The weights of a gated feed-forward layer; every matrix is `[in, out]`.

    Those of a mixture's experts are stacked along a first axis `X`.

    Attributes:
        gate: `[E, intermediate]`, the matrix of the gate; of joined layers `[E, 2 *
            intermediate]`, that of the gate and then `up`.
        up: `[E, intermediate]`, the matrix of the gated values; `None` where `gate`
            holds it.
        down: `[intermediate, E]`, the matrix back to the model's width.
        gate_bias: `[intermediate]`, the bias of the gate; `None` for none. Of joined
            layers that of the gate and then of `up`.
        up_bias: `[intermediate]`, the bias of the gated values; `None` for none.
        down_bias: `[E]`, the bias of the outputs; `None` for none.
    """

    gate: Matrix
    up: Matrix | None
    down: Matrix
    gate_bias: jax.Array | None = None
    up_bias: jax.Array | None = None
    down_bias: jax.Array | None = None


@struct.dataclass(kw_only=True)
class MixtureParams:
    """The weights of a sparse mixture of experts (Mixtral, Qwen3-MoE, gpt-oss).

    Attributes:
        router: `[E, X]`, the matrix that gives one score per expert.
        experts: The `X` experts, a feed-forward layer of stacked matrices.
        router_bias: `[X]`, the bias of the scores; `None` for none.
    """

    router: jax.Array
    experts: MlpParams
    router_bias: jax.Array | None = None


_Run = Callable[[MlpParams, jax.Array], jax.Array]


def feed_forward(
    params: MlpParams | MixtureParams,
    x: jax.Array,
    *,
    experts_per_token: int = 0,
    shares_of_all: bool = False,
    activation: str = "silu",
) -> jax.Array:
    """Runs a feed-forward layer, or a mixture of several.

    Args:
        params: The layer's weights.
        x: `[..., E]`, the normalised residual stream.
        experts_per_token: How many experts of a mixture read each token. Static.
        shares_of_all: Whether the chosen experts have their shares among all, which
            add up to less than 1. Static.
        activation: The name of the gate's function in `ACTIVATIONS`, or `CLAMPED`.
            Static.

    Returns:
        The outputs `[..., E]`, to be added to the residual stream.
    """
    if isinstance(params, MlpParams):
        return _gated(params, x, activation)
    rows = x.reshape(-1, x.shape[-1])
    chosen, shares = _route(params, rows, experts_per_token, shares_of_all)
    experts, axes = params.experts, split_axes()
    run = functools.partial(_gated, activation=activation)
    specs = _specs(experts, axes)
    if specs is None:
        return _mixed(run, experts, rows, chosen, shares).reshape(x.shape)

    def parts(
        experts: MlpParams, rows: jax.Array, chosen: jax.Array, shares: jax.Array
    ) -> jax.Array:
        held = jax.tree.leaves(experts)[0].shape[0]
        if held < params.router.shape[-1]:
            chosen = chosen - jax.lax.axis_index(tuple(axes)) * held
        elif experts.down_bias is not None:  # Every device has parts of all experts.
            is_first = jax.lax.axis_index(tuple(axes)) == 0
            once = jnp.where(is_first, experts.down_bias, 0)
            experts = dataclasses.replace(experts, down_bias=once)
        return jax.lax.psum(_mixed(run, experts, rows, chosen, shares), tuple(axes))

    # Left to the compiler, each expert's output would be summed over the devices.
    whole = PartitionSpec()
    return jax.shard_map(
        parts,
        in_specs=(specs, whole, whole, whole),
        out_specs=whole,
        axis_names=set(axes),
        check_vma=False,
    )(experts, rows, chosen, shares).reshape(x.shape)


def _route(
    params: MixtureParams, rows: jax.Array, count: int, shares_of_all: bool
) -> tuple[jax.Array, jax.Array]:
    """Returns each row's experts, int32 `[R, count]`, and their shares.

    No expert is ever full: with a capacity, a token's output would depend on its
    neighbours in the tree.
    """
    scores = linear(rows, params.router, params.router_bias).astype(jnp.float32)
    best, chosen = jax.lax.top_k(scores, count)
    # The distribution over all experts, cut to the chosen ones and scaled to 1, is that
    # over the chosen ones.
    whole = scores if shares_of_all else best
    total = jax.nn.logsumexp(whole, axis=-1, keepdims=True)
    return chosen, jnp.exp(best - total).astype(rows.dtype)


def _mixed(
    run: _Run, experts: MlpParams, rows: jax.Array, chosen: jax.Array, shares: jax.Array
) -> jax.Array:
    """Returns the sums `[R, E]` of the chosen experts' outputs by their shares.

    Args:
        run: The function that runs one expert.
        experts: Experts, `X` of them.
        rows: `[R, E]`, what they read.
        chosen: `[R, K]` int32, the experts of each row; one that is not from 0 to
            `X - 1` is another device's.
        shares: `[R, K]`, their shares.
    """
    num_experts = jax.tree.leaves(experts)[0].shape[0]
    is_held = (chosen >= 0) & (chosen < num_experts)
    num_rows, count = chosen.shape
    if 2 * num_rows * count <= num_experts:
        owners = jnp.clip(chosen, 0, num_experts - 1).reshape(-1)
        repeated = jnp.repeat(rows, count, axis=0)[:, None]
        outputs = _in_turn(run, experts, owners, repeated)
        outputs = outputs.reshape(num_rows, count, -1)
    elif num_rows < _MANY:
        every = jnp.broadcast_to(rows, (num_experts, *rows.shape))
        outputs = jax.vmap(run)(experts, every).swapaxes(0, 1)
        is_chosen = chosen[..., None] == jnp.arange(num_experts)  # [R, K, X]
        shares = jnp.where(is_chosen, shares[..., None], 0).sum(1)
        is_held = is_chosen.any(1)
    else:
        outputs = _by_tiles(run, experts, rows, chosen)
    # Chosen, not multiplied: an expert may overflow on tokens of others.
    return jnp.where(is_held[..., None], outputs * shares[..., None], 0).sum(1)


def _in_turn(
    run: _Run, experts: MlpParams, owners: jax.Array, tiles: jax.Array
) -> jax.Array:
    """Returns the outputs of tiles `[tiles, rows, E]`, each of its expert `owners`."""

    def run_tile(tile: tuple[jax.Array, jax.Array]) -> jax.Array:
        owner, rows = tile
        pick = functools.partial(
            jax.lax.dynamic_index_in_dim, index=owner, keepdims=False
        )
        return run(jax.tree.map(pick, experts), rows)

    return jax.lax.map(run_tile, (owners, tiles))


def _by_tiles(
    run: _Run, experts: MlpParams, rows: jax.Array, chosen: jax.Array
) -> jax.Array:
    """Returns the outputs `[R, K, E]` of the chosen experts, see `_mixed`.

    Each expert's rows fill whole tiles, the last of them in part, so that the number of
    tiles has a bound that does not depend on what was chosen.
    """
    num_experts = jax.tree.leaves(experts)[0].shape[0]
    num_pairs, width = chosen.size, rows.shape[-1]
    least, most = _TILES
    size = min(max(2 ** ((num_pairs // num_experts).bit_length() - 1), least), most)
    num_tiles = (num_pairs + num_experts * (size - 1)) // size
    is_of = chosen.reshape(-1, 1) == jnp.arange(num_experts)  # [R * K, X]
    place = jnp.cumsum(is_of, axis=0, dtype=jnp.int32)  # From 1, among the expert's.
    ends = jnp.cumsum(-(-place[-1] // size))
    starts = size * (ends + place[-1] // -size)
    slots = jnp.where(is_of, starts + place - 1, 0).sum(-1)
    slots = jnp.where(is_of.any(-1), slots, num_tiles * size)  # Dropped.
    tiles = jnp.zeros((num_tiles * size, width), rows.dtype)
    tiles = tiles.at[slots].set(jnp.repeat(rows, chosen.shape[1], axis=0), mode="drop")
    owners = (jnp.arange(num_tiles)[:, None] >= ends).sum(-1)
    owners = jnp.minimum(owners, num_experts - 1)
    outputs = _in_turn(run, experts, owners, tiles.reshape(num_tiles, size, width))
    found = outputs.reshape(-1, width).at[slots].get(mode="clip")
    return found.reshape(*chosen.shape, width)


def splits_experts(num_experts: int, width: int, num_parts: int) -> bool:
    """Returns whether devices hold whole experts of a layer, not parts of each.

    Parts are read evenly, also for a single row. But devices pad narrow ones in memory,
    and matrices of 4 bits cannot be cut into them.

    Args:
        num_experts: The number of experts, `X`; 0 for a dense layer.
        width: The inner features of an expert.
        num_parts: The number of devices.
    """
    is_even = num_experts > 0 and num_experts % num_parts == 0
    return is_even and width % (_LANES * num_parts) != 0


def _specs(experts: MlpParams, axes: Mapping[str, int]) -> Any:
    """Returns how experts are split over mesh axes; `None` if they are not, or cannot.

    Whole experts are, or inner features, as `parallel.rules` splits them: the rows of
    `down`, and the columns and biases of the others. A scale of all rows is whole; of 4
    bits, whose groups share their bytes in pairs, each device needs whole pairs.
    """
    num_devices = math.prod(axes.values())
    is_divided = num_devices > 1
    num_experts, width = experts.down.shape[:2]
    has_whole = splits_experts(num_experts, width, num_devices)

    def spec(path: tuple[Any, ...], leaf: jax.Array) -> PartitionSpec:
        nonlocal is_divided
        is_scales = path[-1] == GetAttrKey("scales")
        if has_whole:
            return PartitionSpec(tuple(axes))
        if GetAttrKey("down_bias") in path:
            return PartitionSpec()
        if GetAttrKey("down") not in path:
            size = leaf.shape[-1]
            split = PartitionSpec(*[None] * (leaf.ndim - 1), tuple(axes))
        elif is_scales and leaf.shape[1] == 1:
            return PartitionSpec()
        else:
            size = leaf.shape[1] // 2 if is_scales else leaf.shape[1]
            split = PartitionSpec(None, tuple(axes))
        is_divided &= size % num_devices == 0
        return split

    specs = jax.tree_util.tree_map_with_path(spec, experts)
    return specs if is_divided else None


def _gated(params: MlpParams, x: jax.Array, activation: str = "silu") -> jax.Array:
    gate = linear(x, params.gate, params.gate_bias)
    if params.up is None:
        gate, up = jnp.split(gate, 2, axis=-1)
    else:
        up = linear(x, params.up, params.up_bias)
    if activation == CLAMPED:
        gate, up = jnp.minimum(gate, _BOUND), jnp.clip(up, -_BOUND, _BOUND)
        gated = gate * jax.nn.sigmoid(_SLOPE * gate) * (up + 1)
    else:
        gated = ACTIVATIONS[activation](gate) * up
    return linear(gated, params.down, params.down_bias)


def init_mlp(
    key: jax.Array,
    width: int,
    intermediate: int,
    dtype: jnp.dtype,
    *,
    num_experts: int = 0,
    has_bias: bool = False,
) -> MlpParams | MixtureParams:
    """Returns random weights of a layer, a mixture if it has experts.

    Args:
        key: The typed PRNG key of the draws.
        width: The width of the model, `E`.
        intermediate: The width of the feed-forward layer, or of each expert.
        dtype: The type of the weights.
        num_experts: The number of experts, `X`; 0 for a dense layer.
        has_bias: Whether every matrix has a bias, the router's too; they are zero.
    """

    def init(key: jax.Array) -> MlpParams:
        gate, up, down = jax.random.split(key, 3)
        return MlpParams(
            gate=init_matrix(gate, (width, intermediate), dtype),
            up=init_matrix(up, (width, intermediate), dtype),
            down=init_matrix(down, (intermediate, width), dtype),
            gate_bias=jnp.zeros(intermediate, dtype) if has_bias else None,
            up_bias=jnp.zeros(intermediate, dtype) if has_bias else None,
            down_bias=jnp.zeros(width, dtype) if has_bias else None,
        )

    if num_experts:
        router_key, *keys = jax.random.split(key, 1 + num_experts)
        return MixtureParams(
            router=init_matrix(router_key, (width, num_experts), dtype),
            experts=jax.vmap(init)(jnp.stack(keys)),
            router_bias=jnp.zeros(num_experts, dtype) if has_bias else None,
        )
    return init(key)
