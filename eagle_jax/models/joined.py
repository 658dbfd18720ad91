"""Products of the same rows, joined: one of q, k and v, and one of gate and up.

XLA:CPU gives a product of few rows to one core unless its matrix is wide: joined, the
products of seven rows of a small model take four fifths of the time on two free cores.
Elsewhere fewer operations are started. Training, quantization, meshes and files know
the matrices of the checkpoint alone, so only what decodes on one device is joined.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from eagle_jax.models.layers import LayerParams
from eagle_jax.models.mlp import MlpParams

# Of joined matrices and of their biases the first holds all, the others are `None`.
_JOINED: dict[type, tuple[str, ...]] = {
    LayerParams: ("query", "key", "value"),
    MlpParams: ("gate", "up"),
}


def join_products(params: Any, *, donate: bool = False) -> Any:
    """Returns the weights of a model with the products of each layer joined.

    The outputs are the same, up to the order of sums. Quantized matrices stay apart.

    Args:
        params: Any pytree of weights, such as `TransformerParams` or a head's.
        donate: Whether each matrix is deleted as soon as it is joined, so that the
            layers are never in memory twice.
    """

    def join(node: Any) -> Any:
        if type(node) not in _JOINED:
            return node
        if isinstance(node, LayerParams):
            mlp = jax.tree.map(join, node.mlp, is_leaf=_is_joined)
            node = dataclasses.replace(node, mlp=mlp)
        for kind in ("", "_bias"):
            names = [f"{name}{kind}" for name in _JOINED[type(node)]]
            matrices = [getattr(node, name) for name in names]
            if not all(isinstance(matrix, jax.Array) for matrix in matrices):
                break  # They are quantized, or there are no biases.
            joined = jnp.concatenate(matrices, axis=-1)
            changed = dict.fromkeys(names) | {names[0]: joined}
            node = dataclasses.replace(node, **changed)
            if donate:
                for matrix in matrices:
                    matrix.delete()
        return node

    return jax.tree.map(join, params, is_leaf=_is_joined)


def _is_joined(node: Any) -> bool:
    return type(node) in _JOINED
