"""Products of the same rows, joined: one of q, k and v, and one of gate and up.

XLA:CPU gives a product of few rows to one core unless its matrix is wide: joined, the
products of seven rows of a small model take four fifths of the time on two free cores.
Elsewhere fewer operations are started. Training, quantization, meshes and files know
the matrices of the checkpoint alone, so only what decodes on one device is joined.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from eagle_jax.models.layers import LayerParams
from eagle_jax.models.mlp import MlpParams


def join_products(params: Any, *, donate: bool = False) -> Any:
    """Returns the weights of a model with the products of each layer joined.

    The outputs are the same, up to the order of sums. Quantized matrices stay apart.

    Args:
        params: Any pytree of weights, such as `TransformerParams` or a head's.
        donate: Whether each matrix is deleted as soon as it is joined, so that the
            layers are never in memory twice.
    """

    def join_matrices(*matrices: Any) -> Any:
        """Returns matrices side by side, or `None` where there is one to leave."""
        if not all(isinstance(matrix, jax.Array) for matrix in matrices):
            return None
        joined = jnp.concatenate(matrices, axis=-1)
        if donate:
            for matrix in matrices:
                matrix.delete()
        return joined

    def join_mlp(node: Any) -> Any:
        if not isinstance(node, MlpParams):
            return node
        gate = join_matrices(node.gate, node.up)
        if gate is None:
            return node
        bias = join_matrices(node.gate_bias, node.up_bias)
        return dataclasses.replace(
            node, gate=gate, up=None, gate_bias=bias, up_bias=None
        )

    def join_layer(node: Any) -> Any:
        if not isinstance(node, LayerParams):
            return node
        mlp = jax.tree.map(join_mlp, node.mlp, is_leaf=_is(MlpParams))
        query = join_matrices(node.query, node.key, node.value)
        if query is None:
            return dataclasses.replace(node, mlp=mlp)
        bias = join_matrices(node.query_bias, node.key_bias, node.value_bias)
        none = dict.fromkeys(("key", "value", "key_bias", "value_bias"))
        return dataclasses.replace(node, mlp=mlp, query=query, query_bias=bias, **none)

    return jax.tree.map(join_layer, params, is_leaf=_is(LayerParams))


def _is(kind: type) -> Callable[[Any], bool]:
    return lambda node: isinstance(node, kind)
