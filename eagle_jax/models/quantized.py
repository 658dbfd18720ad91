"""Matrices of small integers with a scale for each column, or each group of rows in it.

Only weights are quantized: activations stay as they are, and the text is that of the
model whose weights these integers stand for. The largest weight is 127.5 steps, or 7.5,
not 127 or 7: it is off by half a step, as others may be, and steps are smaller.
"""

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

GROUP_SIZE = 64
"""The rows that share a scale in matrices of 4 bits.

Groups come in pairs: of an odd number, or of one, each is cut into two.
"""

LAYER_MATRICES = ("query", "key", "value", "output", "gate", "up", "down")
"""The names of the matrices of a decoder layer."""


@struct.dataclass(kw_only=True)
class QuantizedMatrix:
    """A matrix `[in, out]` of integers with scales, or a stack of them.

    Two rows of 4 bits share a byte: row `i` of an even group, in its lower bits, and
    row `i` of the group after it. So unpacking moves no rows: even and odd groups are
    multiplied with their own inputs.

    Attributes:
        values: `[in, out]` int8, the integers; of 4 bits `[in / 2, out]` int8, two in
            each.
        scales: `[groups, out]` float32, the scales; a group is `in / groups` rows.
        bits: The bits of an integer, 8 or 4. Static.
    """

    values: jax.Array
    scales: jax.Array
    bits: int = struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix that it stands for, `(in, out)`."""
        *stack, rows, columns = self.values.shape
        return *stack, rows * 8 // self.bits, columns

    @property
    def dtype(self) -> jnp.dtype:
        """The type of the matrix that it stands for, which is that of the scales."""
        return self.scales.dtype


Matrix = jax.Array | QuantizedMatrix
"""A matrix that `linear` multiplies with."""


def quantize(weight: jax.Array, bits: int) -> QuantizedMatrix:
    """Rounds a matrix to the nearest multiples of its scales.

    Args:
        weight: `[..., in, out]`, the matrix or a stack of them, finite.
        bits: The bits of an integer: 8 with a scale per column; 4 with one per column
            and group of `GROUP_SIZE` rows, for which see `has_groups`. Static.
    """
    *stack, rows, columns = weight.shape
    count = max(rows // GROUP_SIZE, 1)
    groups = 1 if bits == 8 else count * (1 + count % 2)
    grouped = weight.astype(jnp.float32).reshape(*stack, groups, -1, columns)
    limit = 2 ** (bits - 1)
    scales = jnp.abs(grouped).max(axis=-2, keepdims=True) / (limit - 0.5)
    # A column of zeros, or of numbers whose scale float32 cannot hold, is zero.
    is_scale = scales >= jnp.finfo(jnp.float32).tiny
    steps = jnp.round(grouped / jnp.where(is_scale, scales, jnp.inf))
    values = jnp.clip(steps, -limit, limit - 1).astype(jnp.int8)
    if bits == 4:
        values = (values[..., ::2, :, :] & 15) | (values[..., 1::2, :, :] << 4)
    return QuantizedMatrix(
        values=values.reshape(*stack, -1, columns),
        scales=scales[..., 0, :],
        bits=bits,
    )


_quantize = jax.jit(quantize, static_argnums=1)


def unpack(weight: QuantizedMatrix) -> list[tuple[jax.Array, jax.Array]]:
    """Returns the integers, int8 `[groups, rows, out]`, with scales `[groups, out]`.

    A matrix of 4 bits has two such pairs: the even groups and the odd ones.
    """
    values, scales = weight.values, weight.scales
    count = 8 // weight.bits
    values = values.reshape(len(scales) // count, -1, values.shape[1])
    if count == 1:
        return [(values, scales)]
    return [((values << 4) >> 4, scales[::2]), (values >> 4, scales[1::2])]


def has_groups(rows: int, bits: int) -> bool:
    """Returns whether a number of rows can be cut into an even number of groups."""
    is_whole = rows < 2 * GROUP_SIZE or rows % GROUP_SIZE == 0
    return bits == 8 or (rows % 2 == 0 and is_whole)


def quantize_layers(
    params: Any, bits: int, names: Collection[str] = LAYER_MATRICES
) -> Any:
    """Returns a model whose decoder layers' matrices are quantized.

    Embedding, output head, norms, biases and routers stay as they are.

    Args:
        params: A pytree of weights.
        bits: The bits of an integer, 8 or 4.
        names: The fields whose matrices are quantized.
    """

    def change(path: tuple[Any, ...], leaf: Any) -> Any:
        is_named = getattr(path[-1], "name", None) in names
        return _quantize(leaf, bits) if is_named else leaf

    return jax.tree_util.tree_map_with_path(change, params)


def num_bytes(params: Any) -> int:
    """Returns the bytes of a model's weights, or of weights with the given shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
