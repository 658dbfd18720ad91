"""The key/value cache: confirmed text only, one length per row."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import struct

from eagle_jax.interface.ordering import after


@struct.dataclass(kw_only=True)
class KeyValues:
    """The keys and values of one layer: of a cache, or of one call's new tokens.

    Attributes:
        keys: `[B, G, S, A]`, the keys, rotated.
        values: `[B, G, S, A]`, the values.
    """

    keys: jax.Array
    values: jax.Array


@struct.dataclass(kw_only=True)
class KVCache:
    """A cache with arrays for each layer: a stacked `[L, ...]` is copied when sliced.

    Attributes:
        layers: The keys and values of `L` layers, pairs of `[B, G, S, A]`.
        length: `[B]` int32, the slots in use; those after them are never read.
    """

    layers: tuple[KeyValues, ...]
    length: jax.Array


def init_cache(
    *,
    num_layers: int,
    batch: int,
    num_kv_heads: int,
    capacity: int,
    head_dim: int,
    dtype: jnp.dtype,
) -> KVCache:
    """Returns an empty cache.

    Args:
        num_layers: The number of layers, `L`.
        batch: The number of rows, `B`.
        num_kv_heads: The number of key/value heads, `G`.
        capacity: The number of slots per row, `S`.
        head_dim: The width of a head, `A`.
        dtype: The type of keys and values.

    Returns:
        A cache of zeros, with length 0 in every row.
    """
    shape = (batch, num_kv_heads, capacity, head_dim)
    return KVCache(
        layers=tuple(
            KeyValues(keys=jnp.zeros(shape, dtype), values=jnp.zeros(shape, dtype))
            for _ in range(num_layers)
        ),
        length=jnp.zeros(batch, jnp.int32),
    )


def commit(
    cache: KVCache, entries: tuple[KeyValues, ...], path: jax.Array, count: jax.Array
) -> KVCache:
    """Writes the accepted rows of a call after each row's length.

    A window of `P` slots is written whatever `count` is; the slots after the new
    length hold garbage that no mask shows and the next commit overwrites.

    Args:
        cache: The cache, with `length + P <= S` in every row: a window that does not
            fit would silently move onto older slots.
        entries: The keys and values of the call, `L` pairs of `[B, G, T, A]`.
        path: `[B, P]` int32, the accepted rows, indices into the `T` tokens.
        count: `[B]` int32, how many of `path` to keep, 0 .. `P`.

    Returns:
        The cache with `length + count`.
    """
    # `count` may come from a read of this cache: the writes must wait for that read.
    starts = after(cache.length, count)

    def write(slots: jax.Array, new: jax.Array) -> jax.Array:
        accepted = jnp.take_along_axis(new, path[:, None, :, None], axis=2)
        return append_rows(slots, accepted, starts, axis=2)

    layers = jax.tree.map(write, cache.layers, entries)
    return dataclasses.replace(cache, layers=layers, length=cache.length + count)


def append_rows(
    slots: jax.Array, rows: jax.Array, lengths: jax.Array, *, axis: int = 1
) -> jax.Array:
    """Writes `P` rows into each text's slots, from its length on, in place under jit.

    One update for all texts, so that a program does not grow with its rows.

    >>> append_rows(jnp.zeros((2, 4)), jnp.ones((2, 2)), jnp.array([0, 2]))
    Array([[1., 1., 0., 0.],
           [0., 0., 1., 1.]], dtype=float32)

    Args:
        slots: `[B, ..., S, ...]`, the array to be written, such as the keys of a cache.
        rows: `[B, ..., P, ...]`, what is written, of any type.
        lengths: `[B]` int32, where each text's window of `P` slots begins, at most
            `S - P`: a window that does not fit silently moves onto older slots.
        axis: The axis of the slots, at least 1. Static.
    """
    write = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=axis - 1)
    return jax.vmap(write)(slots, rows.astype(slots.dtype), lengths)
