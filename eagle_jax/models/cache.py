"""The key/value cache: confirmed text only, one length per row."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct

from eagle_jax.ordering import after


@struct.dataclass(kw_only=True)
class KeyValues:
    """Keys and values of one layer: of a cache, or of one call's new tokens.

    Attributes:
        keys: `[B, G, S, A]`, rotated.
        values: `[B, G, S, A]`.
    """

    keys: jax.Array
    values: jax.Array


@struct.dataclass(kw_only=True)
class KVCache:
    """One array per layer: a stacked `[L, ...]` array is copied when sliced.

    Attributes:
        layers: `L` pairs of `[B, G, S, A]`.
        length: `[B]` int32, slots in use; what lies after is never read.
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
        num_layers: `L`.
        batch: `B`.
        num_kv_heads: `G`.
        capacity: `S`, slots per row.
        head_dim: `A`.
        dtype: Of keys and values.

    Returns:
        Zeros, with length 0 in every row.
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

    A window of `P` slots is written whatever `count` is; what lies after the new
    length is garbage that no mask shows and the next commit overwrites. Rows are
    written one after the other: a `vmap` of the update lowers to a scatter, which
    copies the whole cache.

    Args:
        cache: With `length + P <= S` in every row: a window that does not fit would
            silently move onto older slots.
        entries: `L` pairs of `[B, G, T, A]`.
        path: `[B, P]` int32, indices into the `T` tokens.
        count: `[B]` int32, 0 .. `P`.

    Returns:
        The cache with `length + count`.
    """
    # Where `count` comes from what was read of this cache, so do the slots.
    starts = after(cache.length, count)

    def write(slots: jax.Array, new: jax.Array) -> jax.Array:
        for row in range(path.shape[0]):
            window = jnp.take(new[row : row + 1], path[row], axis=2)
            start = (row, 0, starts[row], 0)
            slots = jax.lax.dynamic_update_slice(
                slots, window.astype(slots.dtype), start
            )
        return slots

    layers = jax.tree.map(write, cache.layers, entries)
    return dataclasses.replace(cache, layers=layers, length=cache.length + count)
