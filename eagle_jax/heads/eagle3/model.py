"""The EAGLE-3 head: features of several layers, fused, and mostly its own output head.

Input pair `i` is the embedding of token `i + 1` beside feature `i`, at position `i`, as
in EAGLE-1 and EAGLE-2. The target's feature is the residual stream before some of its
layers, three as published, brought to the head's width by `fuse`; where a draft is
continued, the head's own output for the parent takes its place as it is (EAGLE-3,
section 3.1), or normalised where a head was trained so (EAGLE-3.1), see `recycle`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from eagle_jax.models.layers import (
    LayerConfig,
    LayerParams,
    init_layer,
    rms_norm,
)
from eagle_jax.models.linear import init_matrix, linear
from eagle_jax.prng import own_keys


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3HeadConfig:
    """The sizes of an EAGLE-3 head; nothing here is derived from the target.

    Attributes:
        layer: The sizes of its layers; `E` is the head's width, which need not be the
            target's.
        vocab_size: The number of tokens the target knows, `V`.
        draft_vocab_size: The number of these tokens that the head can draft, `W`.
        max_positions: The number of positions that the head was trained for.
        feature_size: The width of the features, `F`, the target's width times their
            number.
        feature_layers: The indices of the target's layers whose inputs are the
            features; `None` for the three published ones, see `feature_layers`.
        has_feature_norms: Whether each feature is normalised before they are fused
            (EAGLE-3.1).
        norm_before_fc: Whether they are normalised together before they are fused.
        norm_before_residual: Whether the layer's residual stream begins with the
            normalised feature.
        recycles_normed: Whether a draft is continued from the output as the output head
            reads it, after `norm` (EAGLE-3.1).
        has_output_head: Whether it has an output head of its own; one that borrows the
            target's knows all of the target's tokens.
        sliding_window: The number of pairs that a pair sees, itself included; `None`
            for all before it.
        num_layers: The number of its layers.
    """

    layer: LayerConfig
    vocab_size: int
    draft_vocab_size: int
    max_positions: int
    feature_size: int
    feature_layers: tuple[int, ...] | None = None
    has_feature_norms: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    recycles_normed: bool = False
    has_output_head: bool = True
    sliding_window: int | None = None
    num_layers: int = 1

    @property
    def num_features(self) -> int:
        """The number of layers of the target that it reads."""
        return 3 if self.feature_layers is None else len(self.feature_layers)


@struct.dataclass(kw_only=True)
class Eagle3HeadParams:
    """The weights of an EAGLE-3 head.

    Attributes:
        fc: `[F, E]`, the matrix that fuses the target's features.
        embedding_norm: `[E]`, the norm of the token's embedding.
        feature_norm: `[E]`, the norm of the feature.
        layer: The first layer, without input norm, whose q, k and v read both.
        norm: `[E]`, the norm before the output head.
        output_head: `[E, W]`, the head's own output head; `None` where it is the
            target's.
        offsets: `[W]` int32, how much higher each token is in the target's
            vocabulary, never less than for the one before it; `None` where both
            vocabularies are the same.
        embedding: `[V, E]`, the head's own embedding table; `None` where it is the
            target's.
        fc_norm: A norm `[F / n]` for each of the target's `n` features; `None` for
            none.
        input_norm: `[F]`, the norm of all of them together; `None` for none.
        later_layers: Those after the first, which read the residual stream alone.
    """

    fc: jax.Array
    embedding_norm: jax.Array
    feature_norm: jax.Array
    layer: LayerParams
    norm: jax.Array
    output_head: jax.Array | None = None
    offsets: jax.Array | None = None
    embedding: jax.Array | None = None
    fc_norm: tuple[jax.Array, ...] | None = None
    input_norm: jax.Array | None = None
    later_layers: tuple[LayerParams, ...] = ()


def feature_layers(num_layers: int) -> tuple[int, int, int]:
    """Returns the indices of the layers whose inputs the head reads, as published.

    >>> feature_layers(32)
    (2, 16, 29)

    Args:
        num_layers: The number of the target's layers, `L`; from 7 on the three indices
            differ.
    """
    return 2, num_layers // 2, num_layers - 3


def fuse(
    params: Eagle3HeadParams, config: Eagle3HeadConfig, features: jax.Array
) -> jax.Array:
    """Returns features `[..., F]` of the target at the head's width, `[..., E]`.

    Their norms have the epsilon of the layer's.

    Args:
        params: The head's weights.
        config: The head's sizes. Static.
        features: `[..., F]`, hidden states of the target side by side.
    """
    features, epsilon = features.astype(params.fc.dtype), config.layer.rms_norm_eps
    if params.input_norm is not None:
        features = rms_norm(features, params.input_norm, epsilon)
    if params.fc_norm is not None:
        parts = jnp.split(features, len(params.fc_norm), axis=-1)
        pairs = zip(parts, params.fc_norm, strict=True)
        normed = [rms_norm(part, weight, epsilon) for part, weight in pairs]
        features = jnp.concatenate(normed, axis=-1)
    return linear(features, params.fc)


def recycle(
    params: Eagle3HeadParams, config: Eagle3HeadConfig, outputs: jax.Array
) -> jax.Array:
    """Returns the features that continue a draft, where the target's are not known.

    Args:
        params: The head's weights.
        config: The head's sizes. Static.
        outputs: `[..., E]`, the outputs of the layer for the parents.

    Returns:
        `[..., E]`, the outputs themselves, or normalised if `recycles_normed`.
    """
    if not config.recycles_normed:
        return outputs
    return rms_norm(outputs, params.norm, config.layer.rms_norm_eps)


def layer_inputs(
    params: Eagle3HeadParams,
    config: Eagle3HeadConfig,
    embeddings: jax.Array,
    features: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Returns the residual stream before the layer, and what q, k and v read.

    Args:
        params: The head's weights.
        config: The head's sizes. Static.
        embeddings: `[B, T, E]`, the embeddings of the pairs' tokens.
        features: `[B, T, E]`, the pairs' features, from `fuse` or drafted.

    Returns:
        The features `[B, T, E]`, normalised if `norm_before_residual`, and both inputs
        normalised, `[B, T, 2 * E]`.
    """
    epsilon = config.layer.rms_norm_eps
    features = features.astype(embeddings.dtype)
    embedded = rms_norm(embeddings, params.embedding_norm, epsilon)
    normed = rms_norm(features, params.feature_norm, epsilon)
    stream = normed if config.norm_before_residual else features
    return stream, jnp.concatenate([embedded, normed], axis=-1)


def init_params(
    key: jax.Array, config: Eagle3HeadConfig, dtype: str = "float32"
) -> Eagle3HeadParams:
    """Returns random weights without an embedding table of their own.

    The tokens of a smaller vocabulary are taken evenly from the target's.
    """
    fc_key, layer_key, head_key = jax.random.split(own_keys(key), 3)
    keys = jax.random.split(layer_key, config.num_layers)
    width, kind = config.layer.hidden_size, jnp.dtype(dtype)
    offsets, known = None, config.draft_vocab_size
    if known < config.vocab_size:
        places = np.arange(known, dtype=np.int64)
        offsets = jnp.asarray(places * config.vocab_size // known - places, jnp.int32)
    norms, count = None, config.num_features
    if config.has_feature_norms:  # Not one array three times: it could be donated.
        size = config.feature_size // count
        norms = tuple(jnp.ones(size, kind) for _ in range(count))
    output_head = None
    if config.has_output_head:
        output_head = init_matrix(head_key, (width, known), kind)
    return Eagle3HeadParams(
        fc=init_matrix(fc_key, (config.feature_size, width), kind),
        embedding_norm=jnp.ones(width, kind),
        feature_norm=jnp.ones(width, kind),
        layer=init_layer(
            keys[0], config.layer, kind, input_norm=False, input_size=2 * width
        ),
        norm=jnp.ones(width, kind),
        output_head=output_head,
        offsets=offsets,
        fc_norm=norms,
        input_norm=jnp.ones(config.feature_size, kind)
        if config.norm_before_fc
        else None,
        later_layers=tuple(
            init_layer(one, config.layer, kind, input_norm=True) for one in keys[1:]
        ),
    )
