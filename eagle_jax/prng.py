"""Random keys whose draws depend on nothing that a process sets.

A stack may choose another implementation for its whole process, as MaxText and AXLearn
do. Under `vmap` the draws of `rbg` and `unsafe_rbg` depend on the other rows, and texts
would: keys of this package are always of threefry.
"""

import jax
import jax.numpy as jnp

_IMPLEMENTATION = "threefry2x32"
_DEPENDENT = ("rbg", "unsafe_rbg")


def make_key(seed: jax.typing.ArrayLike) -> jax.Array:
    """Returns the typed key of a seed, `[]`, the same one in every process."""
    return jax.random.key(seed, impl=_IMPLEMENTATION)


def own_keys(keys: jax.Array) -> jax.Array:
    """Returns keys whose draws are independent under `vmap`.

    What `rbg`, `unsafe_rbg` and keys without a type hold becomes keys of threefry: two
    words are such a key's data, each one more is folded into it. Keys of threefry stay
    as they are, and so do those of an implementation that a stack defines itself.

    Args:
        keys: `[...]` typed PRNG keys, or uint32 `[..., W]`, such as `PRNGKey` returns.

    Returns:
        `[...]` typed PRNG keys.
    """
    if jnp.issubdtype(keys.dtype, jax.dtypes.prng_key):
        if jax.random.key_impl(keys) not in _DEPENDENT:
            return keys
        keys = jax.random.key_data(keys)

    def own(data: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(data[:2], impl=_IMPLEMENTATION)
        for word in data[2:]:
            key = jax.random.fold_in(key, word)
        return key

    return jnp.vectorize(own, signature="(w)->()")(keys)


def gumbel(key: jax.Array, size: int) -> jax.Array:
    """Returns standard Gumbel noise `[size]`, float32, whatever JAX's own types are."""
    return jax.random.gumbel(key, (size,), jnp.float32, mode="low")
