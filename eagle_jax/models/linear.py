"""Products with weight matrices, at the precision that their dtype asks for."""

import jax
import jax.numpy as jnp


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


def init_matrix(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """Returns a normal matrix with deviation 0.02."""
    return (jax.random.normal(key, shape, jnp.float32) * 0.02).astype(dtype)
