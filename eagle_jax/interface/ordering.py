"""An order of reads and writes that XLA keeps."""

import jax
import jax.numpy as jnp


def after(value: jax.Array, read: jax.Array) -> jax.Array:
    """Returns `value`, which no program computes before `read`.

    A cache is read by a model's call and written by the commit after it. Where the
    slots to be written do not depend on what the call returned, XLA:CPU may write
    first, and keeps a copy of the whole cache to be read. It drops
    `jax.lax.optimization_barrier` before it decides. What it cannot drop is a sum: here
    with a number that is zero whatever is read, NaN included, which XLA does not know.

    Args:
        value: `[B]` int32, such as how many slots each row takes.
        read: `[B]` numbers of any type, computed from all that must be read before.
    """
    return value + jnp.minimum((read != 0).astype(jnp.int32), 0)
