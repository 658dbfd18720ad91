"""The EAGLE-1/2 head: one decoder layer that predicts the target's next feature.

Input pair `i` is the embedding of token `i + 1` beside the target's feature `i`, at
position `i`; the output predicts feature `i + 1`, which the target's own output head
turns into a distribution for token `i + 2` (EAGLE-1, section 3.1).
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct

from eagle_jax.models.cache import KeyValues, KVCache
from eagle_jax.models.layers import (
    LayerConfig,
    LayerParams,
    decoder_layer,
    init_layer,
)
from eagle_jax.models.linear import init_matrix, linear
from eagle_jax.models.rope import rotary_tables


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleHeadConfig:
    """Sizes of an EAGLE-1/2 head; nothing here is derived from the target.

    Attributes:
        layer: Sizes of its one layer.
        vocab_size: `V`, the target's.
        max_positions: Positions the head was trained for.
        fc_bias: Whether the fusing layer has a bias.
    """

    layer: LayerConfig
    vocab_size: int
    max_positions: int
    fc_bias: bool = True


@struct.dataclass(kw_only=True)
class EagleHeadParams:
    """Weights of an EAGLE-1/2 head.

    Attributes:
        fc: `[2 * E, E]` over embedding and feature, in this order.
        layer: One decoder layer without input norm.
        fc_bias: `[E]` or `None`.
        embedding: `[V, E]` where the head has a table of its own, `None` where it
            is the target's.
    """

    fc: jax.Array
    layer: LayerParams
    fc_bias: jax.Array | None = None
    embedding: jax.Array | None = None


def forward(
    params: EagleHeadParams,
    config: EagleHeadConfig,
    embeddings: jax.Array,
    features: jax.Array,
    positions: jax.Array,
    mask: jax.Array,
    cache: KVCache,
    earlier: KeyValues | None = None,
) -> tuple[jax.Array, KeyValues]:
    """Runs the head over new pairs.

    Args:
        params: Weights.
        config: Sizes. Static.
        embeddings: `[B, T, E]`, of each pair's token.
        features: `[B, T, E]`, the target's, or the head's own output for the
            parent.
        positions: `[B, T]` int32, of the features.
        mask: `[B, T, U]` bool over `earlier` and then the `T` pairs.
        cache: One layer, of confirmed pairs; read only.
        earlier: `[B, G, U - T, A]`, pairs drafted earlier in this round.

    Returns:
        `[B, T, E]` predicted features: there is no final norm, so they are at once
        the next step's input and the output head's. And the keys and values of all
        `U` unconfirmed pairs.
    """
    fused = jnp.concatenate([embeddings, features.astype(embeddings.dtype)], axis=-1)
    x = linear(fused, params.fc, params.fc_bias)
    rotary = rotary_tables(positions, config.layer.rope, config.layer.head_dim)
    (cached,) = cache.layers
    return decoder_layer(
        params.layer, config.layer, x, rotary, cached, cache.length, mask, earlier
    )


def init_params(
    key: jax.Array, config: EagleHeadConfig, dtype: str = "float32"
) -> EagleHeadParams:
    """Returns random weights without an embedding table of their own."""
    fc_key, layer_key = jax.random.split(key)
    width, kind = config.layer.hidden_size, jnp.dtype(dtype)
    return EagleHeadParams(
        fc=init_matrix(fc_key, (2 * width, width), kind),
        fc_bias=jnp.zeros(width, kind) if config.fc_bias else None,
        layer=init_layer(layer_key, config.layer, kind, input_norm=False),
    )
