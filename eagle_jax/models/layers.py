"""The decoder layer of the Llama family, shared by targets and EAGLE heads.

Matrices are `[in, out]`, the transpose of what checkpoints hold. On CPUs one row takes
the same time either way, but the four to sixteen rows of a small tree take about two
thirds of what they take with `[out, in]`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import struct

from eagle_jax.models.cache import KeyValues
from eagle_jax.models.rope import RopeConfig, rotate


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """Sizes of one decoder layer.

    Attributes:
        hidden_size: `E`.
        intermediate_size: Width of the feed-forward layer.
        num_heads: `H`.
        num_kv_heads: `G`, a divisor of `H`.
        head_dim: `A`; `H * A` need not be `E`.
        rms_norm_eps: Epsilon of the norms.
        rope: Rotary embedding.
        qkv_bias: Whether q, k and v have biases.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    qkv_bias: bool = False


@struct.dataclass(kw_only=True)
class LayerParams:
    """Weights of one decoder layer; every matrix is `[in, out]`.

    Attributes:
        input_norm: `[E]`, or `None` for a layer without it (EAGLE heads).
        query: `[E, H * A]`.
        key: `[E, G * A]`.
        value: `[E, G * A]`.
        output: `[H * A, E]`.
        mlp_norm: `[E]`.
        gate: `[E, intermediate]`.
        up: `[E, intermediate]`.
        down: `[intermediate, E]`.
        query_bias: `[H * A]` or `None`.
        key_bias: `[G * A]` or `None`.
        value_bias: `[G * A]` or `None`.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    output: jax.Array
    mlp_norm: jax.Array
    gate: jax.Array
    up: jax.Array
    down: jax.Array
    input_norm: jax.Array | None = None
    query_bias: jax.Array | None = None
    key_bias: jax.Array | None = None
    value_bias: jax.Array | None = None


def precision_of(x: jax.Array) -> jax.lax.Precision:
    """Returns full precision for float32: TPUs and GPUs round it by default.

    Token equality between one row and sixty is claimed in float32 only.
    """
    is_float32 = x.dtype == jnp.float32
    return jax.lax.Precision.HIGHEST if is_float32 else jax.lax.Precision.DEFAULT


def linear(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """Returns `x @ weight + bias`.

    Args:
        x: `[..., in]`.
        weight: `[in, out]`.
        bias: `[out]` or `None`.

    Returns:
        `[..., out]`, in the dtype of `x`.
    """
    y = jnp.matmul(x, weight, precision=precision_of(x))
    return y if bias is None else y + bias


def rms_norm(x: jax.Array, weight: jax.Array, epsilon: float) -> jax.Array:
    """Normalises by the root mean square, in float32, then scales in `x`'s dtype."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    return (wide * scale).astype(x.dtype) * weight


def attend(
    query: jax.Array,
    cached: KeyValues,
    length: jax.Array,
    new: KeyValues,
    mask: jax.Array,
) -> jax.Array:
    """Attends over two segments, the cache and the new tokens, in one softmax.

    Args:
        query: `[B, T, H, A]`, rotated.
        cached: `[B, G, S, A]`; `S` may be 0.
        length: `[B]` int32, visible slots of the cache.
        new: `[B, G, U, A]`.
        mask: `[B, T, U]` bool; every row of it sees something.

    Returns:
        `[B, T, H * A]`.
    """
    batch, num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = new.keys.shape[1]
    num_slots = cached.keys.shape[2]
    # Query heads that share keys become rows of one product: [B, G, R * T, A].
    rows = query.reshape(batch, num_tokens, num_kv_heads, -1, head_dim)
    rows = rows.transpose(0, 2, 3, 1, 4) * head_dim**-0.5
    shape = rows.shape
    rows = rows.reshape(batch, num_kv_heads, -1, head_dim)

    def scores(keys: jax.Array, is_visible: jax.Array) -> jax.Array:
        logits = _batched_dot(rows, keys, contract=3).reshape(*shape[:4], -1)
        return jnp.where(is_visible, logits, jnp.finfo(jnp.float32).min)

    in_cache = jnp.arange(num_slots) < length[:, None]
    joined = jnp.concatenate(
        [
            scores(cached.keys, in_cache[:, None, None, None, :]),
            scores(new.keys, mask[:, None, None, :, :]),
        ],
        axis=-1,
    )
    weights = jax.nn.softmax(joined, axis=-1).astype(new.values.dtype)
    weights = weights.reshape(*rows.shape[:3], -1)
    mixed = _batched_dot(weights[..., :num_slots], cached.values, contract=2)
    mixed = mixed + _batched_dot(weights[..., num_slots:], new.values, contract=2)
    mixed = mixed.astype(query.dtype).reshape(shape).transpose(0, 3, 1, 2, 4)
    return mixed.reshape(batch, num_tokens, num_heads * head_dim)


def _batched_dot(rows: jax.Array, segment: jax.Array, *, contract: int) -> jax.Array:
    """Multiplies `[B, G, M, X]` with `[B, G, S, A]` over `X` and axis `contract`.

    Spelled out because `jnp.einsum` swaps the operands, for which XLA:CPU transposes
    the whole segment: twice the time of attention.
    """
    return jax.lax.dot_general(
        rows,
        segment,
        (((3,), (contract,)), ((0, 1), (0, 1))),
        precision=precision_of(rows),
        preferred_element_type=jnp.float32,
    )


@functools.partial(jax.jit, static_argnames=("config",))
def decoder_layer(
    params: LayerParams,
    config: LayerConfig,
    x: jax.Array,
    rotary: tuple[jax.Array, jax.Array],
    cached: KeyValues,
    length: jax.Array,
    mask: jax.Array,
    earlier: KeyValues | None = None,
) -> tuple[jax.Array, KeyValues]:
    """Runs one layer over new tokens beside the cache.

    Jitted so that layers of equal shapes are traced and lowered once, not one by one;
    the compiler puts them back into the program that calls it.

    Args:
        params: Weights.
        config: Sizes. Static.
        x: `[B, T, E]`.
        rotary: Tables of the `T` positions, from `rotary_tables`.
        cached: `[B, G, S, A]`, read only.
        length: `[B]` int32.
        mask: `[B, T, U]` bool over `earlier` and then the `T` tokens themselves.
        earlier: `[B, G, U - T, A]`, unconfirmed tokens of earlier calls.

    Returns:
        `[B, T, E]`, and the keys and values of all `U` unconfirmed tokens.
    """
    batch, num_tokens, _ = x.shape
    heads = (batch, num_tokens, -1, config.head_dim)
    normed = x
    if params.input_norm is not None:
        normed = rms_norm(x, params.input_norm, config.rms_norm_eps)
    query = linear(normed, params.query, params.query_bias).reshape(heads)
    key = linear(normed, params.key, params.key_bias).reshape(heads)
    value = linear(normed, params.value, params.value_bias).reshape(heads)
    new = KeyValues(
        keys=rotate(key, rotary).swapaxes(1, 2), values=value.swapaxes(1, 2)
    )
    if earlier is not None:
        new = jax.tree.map(lambda *kv: jnp.concatenate(kv, axis=2), earlier, new)
    mixed = attend(rotate(query, rotary), cached, length, new, mask)
    x = x + linear(mixed, params.output)

    normed = rms_norm(x, params.mlp_norm, config.rms_norm_eps)
    gated = jax.nn.silu(linear(normed, params.gate)) * linear(normed, params.up)
    return x + linear(gated, params.down), new


def init_layer(
    key: jax.Array, config: LayerConfig, dtype: jnp.dtype, *, input_norm: bool
) -> LayerParams:
    """Returns random weights: normal with deviation 0.02, norms one, biases zero."""
    width, inner = config.hidden_size, config.intermediate_size
    query_width = config.num_heads * config.head_dim
    kv_width = config.num_kv_heads * config.head_dim
    shapes = {
        "query": (width, query_width),
        "key": (width, kv_width),
        "value": (width, kv_width),
        "output": (query_width, width),
        "gate": (width, inner),
        "up": (width, inner),
        "down": (inner, width),
    }
    keys = jax.random.split(key, len(shapes))
    weights = {
        name: init_matrix(k, shape, dtype)
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    has_bias = config.qkv_bias
    return LayerParams(
        **weights,
        mlp_norm=jnp.ones(width, dtype),
        input_norm=jnp.ones(width, dtype) if input_norm else None,
        query_bias=jnp.zeros(query_width, dtype) if has_bias else None,
        key_bias=jnp.zeros(kv_width, dtype) if has_bias else None,
        value_bias=jnp.zeros(kv_width, dtype) if has_bias else None,
    )


def init_matrix(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """Returns a normal matrix with deviation 0.02."""
    return (jax.random.normal(key, shape, jnp.float32) * 0.02).astype(dtype)
