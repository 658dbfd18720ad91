"""Attention over a cache and the new tokens, whose scores never stand in memory whole.

A segment's softmax is kept in three parts, which join with those of another segment:
the highest score, the sum of the weights relative to it, and the values mixed by them
(online softmax, Milakov and Gimelshein 2018; FlashAttention, section 3.1). A long cache
is read in blocks, as far as the longest row has filled it; GPUs, which would wait for
the host before each block, read all of them. On CPUs blocks are small: what stays in
their own memory is multiplied several times as fast.
"""

import functools
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp

from eagle_jax.models.cache import KeyValues
from eagle_jax.models.linear import precision_of
from eagle_jax.sampling import num_parts

BLOCK = 2048
"""The slots of a cache that are read at once; shorter caches are read whole."""

CPU_BLOCK = 256
"""The same on CPUs."""

_CPU_BYTES, _LEAST_BLOCK = 7 * 2**20, 32
"""The bytes that CPUs keep at hand, so read at once, and the least slots to read."""

_FEW_TOKENS = 16
"""The most new tokens of a row for which they do so; of more, products are the time."""

_MOST_TOKENS = 128
"""The most new tokens that GPUs mix by a kernel; prompts are read in larger chunks."""

_FEW_QUERIES, _MANY_KEYS = range(2, 8), 64
"""The queries and the least keys that CPUs multiply sooner one query at a time."""

_LOWEST = jnp.finfo(jnp.float32).min

_Mixed = tuple[jax.Array, jax.Array, jax.Array]
"""Highest scores and sums `[B, G, R, T, 1]`, and mixed values `[B, G, R, T, A]`."""

_Segment = tuple[KeyValues, jax.Array]
"""Keys and values `[B, G, S, A]`, visible or not by `[B, 1, 1, T or 1, S]` bool."""


def attend(
    query: jax.Array,
    cached: KeyValues,
    length: jax.Array,
    new: KeyValues,
    mask: jax.Array,
    first: jax.Array | None = None,
    *,
    scale: float | None = None,
    cap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attends over two segments, the cache and the new tokens, in one softmax.

    Args:
        query: `[B, T, H, A]`, the queries, rotated.
        cached: `[B, G, S, A]`, the keys and values of the cache; `S` may be 0.
        length: `[B]` int32, the number of visible slots of the cache.
        new: `[B, G, U, A]`, the keys and values of the new tokens.
        mask: `[B, T, U]` bool, true where a query sees a new token; each sees one at
            least. Of more than `CPU_BLOCK` queries none sees a token that comes after
            its own, among the last `T` of the `U`.
        first: `[B, T]` int32, the first visible slot of the cache; `None` for 0.
        scale: The factor of scores; `None` for `A ** -0.5`. Static.
        cap: The bound that scores bend towards (Gemma 2); `None` for none. Static.
        sinks: `[H]`, the score of each head that takes weight and has no value
            (gpt-oss); `None` for none.

    Returns:
        The heads' mixed values side by side, `[B, T, H * A]`.
    """
    batch, num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = new.keys.shape[1]
    num_slots, is_long = cached.keys.shape[2], cached.keys.shape[2] > BLOCK
    # Query heads that share keys become rows of one product: [B, G, R, T, A].
    rows = query.reshape(batch, num_tokens, num_kv_heads, -1, head_dim)
    rows = rows.transpose(0, 2, 3, 1, 4)
    rows = rows * (head_dim**-0.5 if scale is None else scale)
    mix = functools.partial(_mix, rows, cap)

    def in_cache(slots: jax.Array) -> jax.Array:
        is_visible = (slots < length[:, None])[:, None, None, None, :]
        if first is not None:
            is_visible &= (slots >= first[..., None])[:, None, None]
        return is_visible

    own: _Segment = (new, mask[:, None, None])

    def read(block: int, *, is_host_free: bool = False) -> _Mixed:
        begin, end = 0, -(-num_slots // block)
        if not is_host_free:  # What some row sees.
            begin = 0 if first is None else jnp.maximum(jnp.min(first), 0) // block
            end = -(-jnp.max(length) // block)
        found = _mix_new(rows, cap, own, block)
        return _add_blocks(mix, cached, in_cache, (begin, end), found, block)

    def read_whole() -> _Mixed:
        seen = [(cached, in_cache(jnp.arange(num_slots)))] if num_slots else []
        return mix([own, *seen])

    def read_on_gpu() -> _Mixed:
        if _is_for_kernel(rows, cached):
            return _mix_by_kernel(rows, cached, length, new, mask, first, cap=cap)
        return read(BLOCK, is_host_free=True) if is_long else read_whole()

    if num_slots <= CPU_BLOCK:
        found = read_whole()
    else:
        found = jax.lax.platform_dependent(
            cuda=read_on_gpu,
            cpu=lambda: read(_cpu_block(cached, rows)),
            default=lambda: read(BLOCK) if is_long else read_whole(),
        )
    if sinks is not None:
        top = sinks.astype(jnp.float32).reshape(1, num_kv_heads, -1, 1, 1)
        found = _join(found, (top, jnp.ones_like(top), jnp.zeros_like(top)))
    _, total, mixed = found
    mixed = (mixed / total).astype(query.dtype).transpose(0, 3, 1, 2, 4)
    return mixed.reshape(batch, num_tokens, num_heads * head_dim)


@jax.checkpoint  # Scores are made again in the backward pass: they are the memory.
def attend_beside(
    query: jax.Array,
    text: KeyValues,
    sees: jax.Array,
    own: Sequence[KeyValues],
    among: jax.Array,
) -> jax.Array:
    """Attends over a text that all blocks read, and over each block's own, at once.

    Args:
        query: `[B, N * R, H, A]`, the queries of `N` blocks of `R` rows, rotated.
        text: `[B, G, S, A]`, the keys and values of the text.
        sees: `[B, N, R, S]` bool, true where a row sees the text.
        own: Keys and values of the blocks, any number of `[B, G, N * K, A]`.
        among: `[R, K]` bool, true where a row sees those of its own block.

    Returns:
        The heads' mixed values side by side, `[B, N * R, H * A]`.
    """
    batch, num_rows, _, head_dim = query.shape
    (num_blocks, size, length), width = sees.shape[1:], among.shape[1]
    groups = text.keys.shape[1]

    dot = functools.partial(
        jnp.einsum, precision=precision_of(query), preferred_element_type=jnp.float32
    )
    rows = query.reshape(batch, num_rows, groups, -1, head_dim) * head_dim**-0.5
    blocks = rows.reshape(batch, num_blocks, size, *rows.shape[2:])
    shape = batch, groups, num_blocks, width, head_dim
    parts = [jax.tree.map(lambda x: x.reshape(shape), one) for one in own]
    far = dot("btgra,bgsa->bgrts", rows, text.keys)
    scores = [jnp.where(sees.reshape(batch, 1, 1, num_rows, length), far, _LOWEST)]
    for part in parts:
        near = jnp.where(among, dot("bnqgra,bgnka->bgrnqk", blocks, part.keys), _LOWEST)
        scores.append(near.reshape(*far.shape[:-1], width))
    weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1)
    ends = [length + number * width for number in range(len(parts))]
    shares = jnp.split(weights.astype(query.dtype), ends, axis=-1)
    mixed = dot("bgrts,bgsa->btgra", shares[0], text.values)
    for share, part in zip(shares[1:], parts, strict=True):
        share = share.reshape(*share.shape[:3], num_blocks, size, width)
        mixed += dot("bgrnqk,bgnka->bnqgra", share, part.values).reshape(mixed.shape)
    return mixed.astype(query.dtype).reshape(batch, num_rows, -1)


def _mix_by_kernel(*arguments: Any, cap: float | None) -> _Mixed:
    # To import it takes half a second, for which only those wait who have a GPU.
    from eagle_jax.models.fused_attention import mix_at_once

    return mix_at_once(*arguments, cap=cap)


def _is_for_kernel(rows: jax.Array, cached: KeyValues) -> bool:
    """Returns whether GPUs mix these queries and this cache by a kernel.

    It is for types of 16 bits, as GPUs multiply no others quickly, and not for meshes
    that split a row's arrays, over which XLA would not split it. Triton, which it is
    written in, knows no GPU before Ampere.
    """
    num_tokens, head_dim = rows.shape[3:]
    is_narrow = rows.dtype == cached.keys.dtype and rows.dtype.itemsize == 2
    is_shape = head_dim in (16, 32, 64, 128, 256) and num_tokens <= _MOST_TOKENS
    if not (is_narrow and is_shape) or cached.keys.shape[2] % 16 or num_parts() > 1:
        return False
    gpus = [device for device in jax.local_devices() if device.platform == "gpu"]
    versions = [gpu.compute_capability for gpu in gpus]
    if versions:  # AMD's begin with letters.
        is_new = all(one[0].isdigit() and float(one) >= 8 for one in versions)
    else:  # A program for a machine that is not there.
        device = jax.sharding.get_abstract_mesh().abstract_device
        is_new = device is not None and device.platform in ("cuda", "gpu")
    # JAX has announced that it will go.
    return is_new and find_spec("jax.experimental.pallas.triton") is not None


def _cpu_block(cached: KeyValues, rows: jax.Array) -> int:
    num_slots, num_tokens, half = cached.keys.shape[2], rows.shape[3], CPU_BLOCK // 2
    # Of a short cache, half a block more is much to read for a few tokens.
    block = half if num_slots <= 4 * half and num_tokens <= half else CPU_BLOCK
    if num_tokens > _FEW_TOKENS:
        return block
    scores = 4 * rows.size // rows.shape[-1]
    most = _CPU_BYTES // (2 * cached.keys.nbytes // num_slots + scores)
    return min(block, max(_LEAST_BLOCK, 1 << most.bit_length() >> 1))


def _add_blocks(
    mix: Callable[[Sequence[_Segment]], _Mixed],
    cached: KeyValues,
    in_cache: Callable[[jax.Array], jax.Array],
    ends: tuple[jax.Array | int, jax.Array | int],
    found: _Mixed,
    block: int,
) -> _Mixed:
    """Mixes slots of a long cache into what was found, block by block.

    `ends` are the first block and the one after the last.
    """
    num_slots = cached.keys.shape[2]

    def add(number: jax.Array, found: _Mixed) -> _Mixed:
        # The last block may reach back into the one before, whose slots are hidden.
        start = jnp.minimum(number * block, num_slots - block)
        slots = start + jnp.arange(block)
        slots = jnp.where(slots < number * block, num_slots, slots)
        kept = jax.tree.map(
            lambda x: jax.lax.dynamic_slice_in_dim(x, start, block, axis=2), cached
        )
        return _join(found, mix([(kept, in_cache(slots))]))

    return jax.lax.fori_loop(*ends, add, found)


def _mix(rows: jax.Array, cap: float | None, segments: Sequence[_Segment]) -> _Mixed:
    """Mixes the values of segments in one softmax.

    Args:
        rows: `[B, G, R, T, A]`, the queries, scaled.
        cap: The bound of scores, see `capped`. Static.
        segments: The keys and values, and where they are visible.
    """
    flat = rows.reshape(*rows.shape[:2], -1, rows.shape[-1])

    def score(kept: KeyValues, is_visible: jax.Array) -> jax.Array:
        scores = _score(flat, kept.keys).reshape(*rows.shape[:4], -1)
        return jnp.where(is_visible, capped(scores, cap), _LOWEST)

    def mix(weights: jax.Array, values: jax.Array) -> jax.Array:
        weights = weights.astype(values.dtype).reshape(*flat.shape[:3], -1)
        if weights.shape[2] > 1:
            return _batched_dot(weights, values, contract=2)
        # XLA:GPU turns a product of one row into a sum, for which it transposes the
        # whole cache; two rows stay a product.
        return jax.lax.platform_dependent(
            weights,
            values,
            cuda=lambda x, y: _batched_dot(x.repeat(2, 2), y, contract=2)[:, :, :1],
            default=functools.partial(_batched_dot, contract=2),
        )

    scores = [score(*segment) for segment in segments]
    top = functools.reduce(
        jnp.maximum, [jnp.max(one, axis=-1, keepdims=True) for one in scores]
    )
    # A row that sees nothing here has weights of 1, which `_join` scales by 0.
    weights = [jnp.exp(one - top) for one in scores]
    total = sum(jnp.sum(one, axis=-1, keepdims=True) for one in weights)
    mixed = sum(
        mix(one, kept.values) for one, (kept, _) in zip(weights, segments, strict=True)
    )
    return top, jnp.asarray(total), jnp.asarray(mixed).reshape(rows.shape)


def _mix_new(rows: jax.Array, cap: float | None, new: _Segment, block: int) -> _Mixed:
    """Mixes new tokens, a block of queries at a time: none sees those after it."""
    (kept, mask), size = new, rows.shape[3]
    parts, before = [], mask.shape[-1] - size
    for start in range(0, size, block):
        end = start + block
        seen = jax.tree.map(lambda leaf, end=end: leaf[:, :, : before + end], kept)
        segment = seen, mask[..., start:end, : before + end]
        parts.append(_mix(rows[:, :, :, start:end], cap, [segment]))
    return jax.tree.map(lambda *part: jnp.concatenate(part, axis=3), *parts)


def capped(scores: jax.Array, cap: float | None) -> jax.Array:
    """Returns scores or logits bent towards a bound; `None` leaves them alone."""
    return scores if cap is None else jnp.tanh(scores / cap) * cap


def _join(one: _Mixed, other: _Mixed) -> _Mixed:
    """Returns the softmax over both of two segments."""
    top = jnp.maximum(one[0], other[0])
    scales = jnp.exp(one[0] - top), jnp.exp(other[0] - top)
    return (
        top,
        one[1] * scales[0] + other[1] * scales[1],
        one[2] * scales[0] + other[2] * scales[1],
    )


def _score(rows: jax.Array, keys: jax.Array) -> jax.Array:
    """Returns the scores `[B, G, M, S]` of queries `[B, G, M, A]`, not yet capped."""
    product = functools.partial(_batched_dot, contract=3)
    is_sooner = rows.shape[2] in _FEW_QUERIES and keys.shape[2] >= _MANY_KEYS
    if not is_sooner or num_parts() > 1:  # XLA would move queries between devices.
        return product(rows, keys)

    def one_by_one(rows: jax.Array, keys: jax.Array) -> jax.Array:
        ones = jnp.split(rows, rows.shape[2], axis=2)
        return jnp.concatenate([product(one, keys) for one in ones], axis=2)

    return jax.lax.platform_dependent(rows, keys, cpu=one_by_one, default=product)


def _batched_dot(rows: jax.Array, segment: jax.Array, *, contract: int) -> jax.Array:
    """Multiplies `[B, G, M, X]` with `[B, G, S, A]` over `X` and axis `contract`.

    It is spelled out because `jnp.einsum` swaps the operands, for which XLA:CPU
    transposes the whole segment: twice the time of attention.
    """
    return jax.lax.dot_general(
        rows,
        segment,
        (((3,), (contract,)), ((0, 1), (0, 1))),
        precision=precision_of(rows),
        preferred_element_type=jnp.float32,
    )
