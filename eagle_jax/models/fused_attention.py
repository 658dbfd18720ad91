"""Attention over a cache and a few new tokens, as one kernel of NVIDIA GPUs.

Each program takes a tile of queries and every `P`th block of the cache (flash-decoding,
Dao et al. 2023), the last of `P` the new tokens as well. XLA joins what they find.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from eagle_jax.models.attention import capped
from eagle_jax.models.cache import KeyValues

_BLOCK, _LEAST = 64, 16  # The most rows and columns of a product, and the least.
_PROGRAMS, _SLOTS = 128, 256  # What fills a GPU, and what is worth a program.
_LOWEST = jnp.finfo(jnp.float32).min


def mix_at_once(
    rows: jax.Array,
    cached: KeyValues,
    length: jax.Array,
    new: KeyValues,
    mask: jax.Array,
    first: jax.Array | None = None,
    *,
    cap: float | None = None,
    is_interpreted: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the softmax over the cache and the new tokens in its three parts.

    Args:
        rows: `[B, G, R, T, A]`, the queries, scaled; `A` is a power of 2, at least 16.
        cached: `[B, G, S, A]`, the keys and values of the cache; `S` is a multiple of
            16.
        length: `[B]` int32, the number of visible slots of the cache.
        new: `[B, G, U, A]`, the keys and values of the new tokens.
        mask: `[B, T, U]` bool, true where a query sees a new token.
        first: `[B, T]` int32, the first visible slot of the cache; `None` for 0.
        cap: The bound that scores bend towards; `None` for none. Static.
        is_interpreted: Whether it runs without a GPU, for tests. Static.

    Returns:
        The highest scores and the sums of weights, `[B, G, R, T, 1]`, and the values
        mixed by these, `[B, G, R, T, A]`; float32.
    """
    batch, groups, repeats, num_tokens, head_dim = rows.shape
    num_rows, num_slots = repeats * num_tokens, cached.keys.shape[2]
    tile, width = (
        min(_BLOCK, max(_LEAST, pl.next_power_of_2(size)))
        for size in (num_rows, mask.shape[2])
    )
    tiles = pl.cdiv(num_rows, tile)
    parts = max(_PROGRAMS // (batch * groups * tiles), 1)
    parts = min(parts, pl.cdiv(num_slots, _SLOTS))
    if first is None:
        first = jnp.zeros((batch, num_tokens), jnp.int32)
    # Joined, queries, keys and values are made by one kernel.
    own = [x.reshape(batch, -1, head_dim) for x in (rows, new.keys, new.values)]
    sizes = {"tile": tile, "width": width, "num_rows": num_rows, "parts": parts}
    found = pl.pallas_call(
        functools.partial(_kernel, **sizes, cap=cap),
        grid=(batch, groups, tiles * parts),
        out_shape=[
            jax.ShapeDtypeStruct((batch, groups, parts, num_rows, *last), jnp.float32)
            for last in ((), (), (head_dim,))
        ],
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=is_interpreted,
        name="attention",
    )(length, first, jnp.concatenate(own, axis=1), cached.keys, cached.values, mask)
    tops, totals, mixtures = (
        [x[:, :, part].reshape(*rows.shape[:4], -1) for part in range(parts)]
        for x in found
    )
    highest = functools.reduce(jnp.maximum, tops)
    scales = [jnp.exp(one - highest) for one in tops]
    total = sum(one * scale for one, scale in zip(totals, scales, strict=True))
    mixed = sum(one * scale for one, scale in zip(mixtures, scales, strict=True))
    return highest, jnp.asarray(total), jnp.asarray(mixed)


def _kernel(
    length: Any,
    first: Any,
    own: Any,
    keys: Any,
    values: Any,
    sees: Any,
    *found: Any,
    tile: int,
    width: int,
    num_rows: int,
    parts: int,
    cap: float | None,
) -> None:
    (num_tokens, num_new), (num_slots, head_dim) = sees.shape[1:], keys.shape[2:]
    block = min(_BLOCK, num_slots & -num_slots)
    row, group, groups = pl.program_id(0), pl.program_id(1), pl.num_programs(1)
    number, part = pl.program_id(2) // parts, pl.program_id(2) % parts
    indices = number * tile + jnp.arange(tile)
    is_row, tokens = indices < num_rows, indices % num_tokens
    start, end = triton.load(first.at[row, tokens]), length[row]
    dot = functools.partial(jnp.dot, preferred_element_type=jnp.float32)

    def read(start: Any, is_there: jax.Array) -> jax.Array:
        there = own.at[row, pl.ds(start, len(is_there)), :]
        return triton.load(there, mask=is_there[:, None], other=0)

    queries = read(group * num_rows + number * tile, is_row)

    def add(before: Any, kept: jax.Array, mixed: jax.Array, is_seen: jax.Array) -> Any:
        scores = jnp.where(is_seen, capped(dot(queries, kept.T), cap), _LOWEST)
        top = jnp.maximum(before[0], scores.max(axis=1))
        weights, scale = jnp.exp(scores - top[:, None]), jnp.exp(before[0] - top)
        total = before[1] * scale + weights.sum(axis=1)
        mixed = dot(weights.astype(mixed.dtype), mixed)
        return top, total, before[2] * scale[:, None] + mixed

    def add_cached(step: jax.Array, before: Any) -> Any:
        begin = (step * parts + part) * block
        slots, there = begin + jnp.arange(block), (row, group, pl.ds(begin, block))
        is_seen = (slots < end)[None] & (slots[None] >= start[:, None])
        return add(before, keys[there], values[there], is_seen)

    def add_new(step: jax.Array, before: Any) -> Any:
        places = step * width + jnp.arange(width)
        is_new, last = places < num_new, num_new - 1
        pair = row, tokens[:, None], jnp.minimum(places, last)[None]
        is_seen = triton.load(sees.at[pair]) & is_new[None]
        begin = groups * num_rows + group * num_new + step * width
        kept, mixed = read(begin, is_new), read(begin + groups * num_new, is_new)
        return add(before, kept, mixed, is_seen)

    result: Any = (
        jnp.full(tile, _LOWEST, jnp.float32),
        jnp.zeros(tile, jnp.float32),
        jnp.zeros((tile, head_dim), jnp.float32),
    )
    steps = pl.cdiv(pl.cdiv(end, block) - part, parts)
    result = jax.lax.fori_loop(0, steps, add_cached, result)
    steps = pl.cdiv(num_new, width) * (part == parts - 1).astype(jnp.int32)
    result = jax.lax.fori_loop(0, steps, add_new, result)
    here = row, group, part, pl.ds(number * tile, tile)
    for ref, value in zip(found, result, strict=True):
        mask = is_row if value.ndim == 1 else is_row[:, None]
        triton.store(ref.at[here], value, mask=mask)
