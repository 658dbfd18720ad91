"""EAGLE heads that draft by small integers; what is drafted never changes the text."""

import dataclasses

from eagle_jax.heads.head import HeadParams
from eagle_jax.models.quantized import LAYER_MATRICES, quantize_layers
from eagle_jax.models.transformer import output_head

_MATRICES = (*LAYER_MATRICES, "fc", "output_head")


def quantize_head(params: HeadParams) -> HeadParams:
    """Returns the weights of a head of which every matrix has 8 bits.

    Embedding, norms and biases stay as they are. The output head is a copy: the target
    keeps its own.

    Args:
        params: The drafter's weights, from `join`.
    """
    if getattr(params.head, "output_head", None) is None:
        params = dataclasses.replace(params, output_head=output_head(params))
    return quantize_layers(params, 8, _MATRICES)
