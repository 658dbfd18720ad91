"""Products with weight matrices, at the precision that their dtype asks for."""

import functools

import jax
import jax.numpy as jnp

from eagle_jax.models.quantized import Matrix, QuantizedMatrix, unpack

_BLOCK, _ROWS = 2**15, 16
"""The most weights that a CPU widens at once, to fit its cache, and the least rows."""


def precision_of(x: jax.Array) -> jax.lax.Precision:
    """Returns full precision for float32: TPUs and GPUs round it by default.

    Token equality between one row and sixty is claimed in float32 only.
    """
    is_float32 = x.dtype == jnp.float32
    return jax.lax.Precision.HIGHEST if is_float32 else jax.lax.Precision.DEFAULT


def linear(x: jax.Array, weight: Matrix, bias: jax.Array | None = None) -> jax.Array:
    """Returns `x @ weight + bias`.

    Args:
        x: `[..., in]`, the rows.
        weight: `[in, out]`, the matrix.
        bias: `[out]`, the bias; `None` for none.

    Returns:
        The product `[..., out]`, in the dtype of `x`.
    """
    if isinstance(weight, QuantizedMatrix):
        y = narrow_product(x, weight).astype(x.dtype)
    else:
        y = jnp.matmul(x, weight, precision=precision_of(x))
    return y if bias is None else y + bias


def narrow_product(x: jax.Array, weight: QuantizedMatrix) -> jax.Array:
    """Returns the float32 product `[..., out]` of `x` with a quantized matrix.

    Args:
        x: `[..., in]`, the rows.
        weight: `[in, out]`, the matrix.
    """
    # The whole matrix is never in memory in a wider type. Where the compiler widens
    # operands inside the product, that is left to it. XLA:CPU does not: it widens
    # all weights once, outside of the loop that decodes.
    return jax.lax.platform_dependent(x, weight, cpu=by_blocks, default=at_once)


def at_once(x: jax.Array, weight: QuantizedMatrix) -> jax.Array:
    """Returns what `narrow_product` does, of the whole matrix at once."""
    parts = unpack(weight)
    # [..., groups, parts, rows]: even groups and odd ones, where there are both.
    inputs = x.reshape(*x.shape[:-1], -1, len(parts), parts[0][0].shape[1])
    products = []
    for number, (values, scales) in enumerate(parts):
        matrix = values.astype(x.dtype)
        if len(scales) > 1:
            matrix = matrix * scales[:, None].astype(x.dtype)
        product = jnp.matmul(
            inputs[..., number, :].reshape(*x.shape[:-1], -1),
            matrix.reshape(-1, matrix.shape[-1]),
            precision=precision_of(x),
            preferred_element_type=jnp.float32,
        )
        # A single scale per column can wait for the sum.
        products.append(product if len(scales) > 1 else product * scales[0])
    return sum(products[1:], start=products[0])


def by_blocks(x: jax.Array, weight: QuantizedMatrix) -> jax.Array:
    """Returns what `narrow_product` does, from one block of rows at a time."""
    rows, columns = weight.shape
    # A divisor of all rows, in whole pairs of groups, and half of them at most, or the
    # loop over blocks would run only once.
    unit = 2 * rows // len(weight.scales) if weight.bits == 4 else 1
    most = min(max(_BLOCK // columns, _ROWS), rows // 2) // unit
    counts = [n for n in range(1, most + 1) if rows // unit % n == 0]
    block = unit * max(counts, default=1)
    if block == rows:
        return at_once(x, weight)

    def add(number: jax.Array, total: jax.Array) -> jax.Array:
        start = number * block
        inputs = jax.lax.dynamic_slice_in_dim(x, start, block, axis=-1)
        return total + at_once(inputs, _rows(weight, start, block))

    total = jnp.zeros((*x.shape[:-1], columns), jnp.float32)
    return jax.lax.fori_loop(0, rows // block, add, total)


def _rows(weight: QuantizedMatrix, start: jax.Array, count: int) -> QuantizedMatrix:
    """Returns a few rows of a matrix; where it has several groups, whole groups."""
    per_byte = 8 // weight.bits
    values = jax.lax.dynamic_slice_in_dim(
        weight.values, start // per_byte, count // per_byte
    )
    groups, scales = len(weight.scales), weight.scales
    if groups > 1:
        size = weight.shape[0] // groups
        scales = jax.lax.dynamic_slice_in_dim(scales, start // size, count // size)
    return QuantizedMatrix(values=values, scales=scales, bits=weight.bits)


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def init_matrix(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """Returns a matrix of normal draws with deviation 0.02.

    A program of its own: the matrices of a model have few shapes, and one program that
    draws them all compiles for longer than they take to draw.
    """
    return (jax.random.normal(key, shape, jnp.float32) * 0.02).astype(dtype)
