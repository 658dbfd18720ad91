"""Windows of rows: some places of each, from one on that differs from row to row."""

import jax
import jax.numpy as jnp


def read_window(rows: jax.Array, begin: jax.Array, size: int) -> jax.Array:
    """Returns `[B, size, ...]` of `[B, S, ...]`, from `begin`, `[B]` int32, on.

    Past the end stands 0.
    """

    def read(row: jax.Array, start: jax.Array) -> jax.Array:
        return row.at[start + jnp.arange(size)].get(mode="fill", fill_value=0)

    return jax.vmap(read)(rows, begin)


def write_window(
    rows: jax.Array, values: jax.Array, begin: jax.Array, count: jax.Array
) -> jax.Array:
    """Writes values `[B, W, ...]` into `[B, S, ...]`, from `begin`, `[B]` int32, on.

    Of each row's values the first `count`, `[B]` int32, are written.
    """
    offsets = jnp.arange(values.shape[1])
    end = rows.shape[1]  # Out of range: dropped.
    places = jnp.where(offsets < count[:, None], begin[:, None] + offsets, end)
    return rows.at[jnp.arange(len(rows))[:, None], places].set(values, mode="drop")
