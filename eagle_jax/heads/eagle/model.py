"""The EAGLE-1/2 head: one decoder layer that predicts the target's next feature.

Input pair `i` is the embedding of token `i + 1` beside the target's feature `i`, at
position `i`; the output predicts feature `i + 1`, which the target's own output head
turns into a distribution for token `i + 2` (EAGLE-1, section 3.1).
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct

from eagle_jax.models.layers import LayerConfig, LayerParams, init_layer
from eagle_jax.models.linear import init_matrix, linear
from eagle_jax.prng import own_keys


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleHeadConfig:
    """The sizes of an EAGLE-1/2 head; nothing here is derived from the target.

    Attributes:
        layer: The sizes of its one layer.
        vocab_size: The number of tokens the target knows, `V`.
        max_positions: The number of positions that the head was trained for.
        fc_bias: Whether the fusing layer has a bias.
    """

    layer: LayerConfig
    vocab_size: int
    max_positions: int
    fc_bias: bool = True


@struct.dataclass(kw_only=True)
class EagleHeadParams:
    """The weights of an EAGLE-1/2 head.

    Attributes:
        fc: `[2 * E, E]`, the matrix that fuses embedding and feature, in this order.
        layer: The decoder layer, without input norm.
        fc_bias: `[E]`, the bias of the fusing layer; `None` for none.
        embedding: `[V, E]`, the head's own embedding table; `None` where it is the
            target's.
    """

    fc: jax.Array
    layer: LayerParams
    fc_bias: jax.Array | None = None
    embedding: jax.Array | None = None


def layer_inputs(
    params: EagleHeadParams,
    config: EagleHeadConfig,
    embeddings: jax.Array,
    features: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Returns the residual stream before the layer, and what q, k and v read: the same.

    Args:
        params: The head's weights.
        config: The head's sizes. Static.
        embeddings: `[B, T, E]`, the embeddings of the pairs' tokens.
        features: `[B, T, E]`, the target's features, or the head's own output for the
            parent.
    """
    features = features.astype(embeddings.dtype)
    fused = jnp.concatenate([embeddings, features], axis=-1)
    x = linear(fused, params.fc, params.fc_bias)
    return x, x


def init_params(
    key: jax.Array, config: EagleHeadConfig, dtype: str = "float32"
) -> EagleHeadParams:
    """Returns random weights without an embedding table of their own."""
    fc_key, layer_key = jax.random.split(own_keys(key))
    width, kind = config.layer.hidden_size, jnp.dtype(dtype)
    return EagleHeadParams(
        fc=init_matrix(fc_key, (2 * width, width), kind),
        fc_bias=jnp.zeros(width, kind) if config.fc_bias else None,
        layer=init_layer(layer_key, config.layer, kind, input_norm=False),
    )
