"""The loss of an EAGLE-1/2 head (EAGLE-1, section 3.2)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

from eagle_jax.models import cache as kv
from eagle_jax.models import eagle_head
from eagle_jax.models.eagle_head import EagleHeadConfig, EagleHeadParams
from eagle_jax.models.transformer import Tables, output_head
from eagle_jax.training.config import LossConfig
from eagle_jax.training.packing import PackedRows

Unembed = Callable[[jax.Array, jax.Array], jax.Array]
"""A function from an output head `[E, V]` and states `[..., E]` to float32 logits."""

_OFFICIAL_NOISE_LENGTH = 512


@struct.dataclass(kw_only=True)
class Metrics:
    """The means over the pairs that count, float32 scalars.

    Attributes:
        loss: The weighted sum of `feature_loss` and `token_loss`.
        feature_loss: The Smooth L1 loss, a mean over the features' width.
        token_loss: The cross-entropy in nats.
        agreement: The share of pairs where head and target have the same most likely
            token.
        pairs: The number of pairs that count.
    """

    loss: jax.Array
    feature_loss: jax.Array
    token_loss: jax.Array
    agreement: jax.Array
    pairs: jax.Array


def segment_mask(segments: jax.Array) -> jax.Array:
    """Returns the attention mask, `[B, T, T]` bool: causal inside each segment."""
    length = segments.shape[1]
    same = segments[:, :, None] == segments[:, None, :]
    return same & jnp.tri(length, dtype=bool)


def target_features(target: Any, params: Any, rows: PackedRows) -> jax.Array:
    """Returns the target's features `[B, T, E]` of packed rows, without gradient.

    Args:
        target: The `Target`. Static.
        params: The target's parameters.
        rows: The rows, of which tokens, segments and positions are read, `[B, T]`.
    """
    cache = target.init_cache(rows.tokens.shape[0], 0)
    output = target.forward(
        params, rows.tokens, rows.positions, segment_mask(rows.segments), cache
    )
    return jax.lax.stop_gradient(output.features)


def pair_weights(rows: PackedRows, mask: str) -> jax.Array:
    """Returns the weights of pairs, `[B, T]` float32: 1 for every pair that counts.

    Pair `i` joins feature `i` with token `i + 1` and predicts feature `i + 1`, so a
    segment of `n` tokens has `n - 1` pairs.

    Args:
        rows: The rows, of which segments and loss mask are read, `[B, T]`.
        mask: The rule by which pairs count, see `LossConfig.mask`.
    """
    follows = rows.segments[:, 1:] == rows.segments[:, :-1]
    exists = follows & (rows.segments[:, :-1] > 0)
    wanted = rows.loss_mask[:, 1:] if mask == "next" else rows.loss_mask[:, :-1]
    return jnp.pad((exists & wanted).astype(jnp.float32), ((0, 0), (0, 1)))


def add_noise(
    key: jax.Array, features: jax.Array, rows: PackedRows, config: LossConfig
) -> jax.Array:
    """Adds the uniform noise that makes a head bear its own errors.

    Args:
        key: The PRNG key of this step's noise.
        features: `[B, T, E]`, the target's features.
        rows: The rows, `[B, T]`; the official scale needs their segments' lengths.
        config: The settings of the loss, of which half width and scale are read.
    """
    shape = features.shape
    noise = jax.random.uniform(key, shape, minval=-config.noise, maxval=config.noise)
    if config.noise_scale == "official":
        same = rows.segments[:, :, None] == rows.segments[:, None, :]
        lengths = jnp.sum(same, axis=-1, dtype=jnp.float32)
        noise = noise * (_OFFICIAL_NOISE_LENGTH / lengths)[..., None]
    return features + noise.astype(features.dtype)


def head_loss(
    params: EagleHeadParams,
    tables: Tables,
    features: jax.Array,
    rows: PackedRows,
    key: jax.Array | None,
    *,
    head: EagleHeadConfig,
    config: LossConfig,
    unembed: Unembed,
) -> tuple[jax.Array, Metrics]:
    """Computes the loss of a batch.

    `L = Smooth L1(f[i+1], g[i]) + w_cls * CE(softmax(f[i+1] U), softmax(g[i] U))`,
    where `g[i]` is the head's output for (token `i + 1`, noisy feature `i`) and `U`
    the target's frozen output head.

    Args:
        params: The head's weights, in the dtype to compute in.
        tables: The target's embedding and output head, frozen.
        features: `[B, T, E]`, the target's features.
        rows: The rows, `[B, T]` fields.
        key: The PRNG key of the noise; `None` for no noise.
        head: The head's sizes. Static.
        config: The settings of the loss. Static.
        unembed: The target's `(output_head, hidden) -> float32 logits`. Static.

    Returns:
        The loss, and its parts.
    """
    dtype = params.fc.dtype
    features = features.astype(dtype)
    inputs = features if key is None else add_noise(key, features, rows, config)
    tokens = rows.tokens
    if head.inputs != "feature+token":
        tokens = jnp.roll(tokens, -1, axis=1)
    batch = rows.tokens.shape[0]
    cache = kv.init_cache(
        num_layers=1,
        batch=batch,
        num_kv_heads=head.layer.num_kv_heads,
        capacity=0,
        head_dim=head.layer.head_dim,
        dtype=dtype,
    )
    table = jax.lax.stop_gradient(tables.embedding)
    predicted, _ = eagle_head.forward(
        params,
        head,
        table[tokens].astype(dtype),
        inputs,
        rows.positions,
        segment_mask(rows.segments),
        cache,
    )
    wanted = jnp.roll(features, -1, axis=1)
    weights = pair_weights(rows, config.mask)

    frozen = jax.lax.stop_gradient(output_head(tables))
    distance = optax.huber_loss(
        predicted.astype(jnp.float32), wanted.astype(jnp.float32)
    )
    logits = unembed(frozen, predicted)
    target_logits = unembed(frozen, wanted)
    entropy = optax.softmax_cross_entropy(logits, jax.nn.softmax(target_logits))
    agrees = most_likely(logits) == most_likely(target_logits)

    pairs = jnp.sum(weights)
    count = jnp.maximum(pairs, 1.0)
    divisor = count if config.normalize == "tokens" else float(weights.size)
    feature_loss = jnp.sum(weights * jnp.mean(distance, axis=-1)) / divisor
    token_loss = jnp.sum(weights * entropy) / divisor
    loss = config.feature_weight * feature_loss + config.token_weight * token_loss
    return loss, Metrics(
        loss=loss,
        feature_loss=feature_loss,
        token_loss=token_loss,
        agreement=jnp.sum(weights * agrees) / count,
        pairs=pairs,
    )


def most_likely(logits: jax.Array) -> jax.Array:
    """Returns the argmax `[...]` of `[..., V]`, the lowest index among equals.

    These are two plain reductions: the argmax over a sharded vocabulary is a reduction
    of pairs, for which TPUs gather, beside everything else of the step where they can.
    """
    logits = jax.lax.stop_gradient(logits)
    size = logits.shape[-1]
    is_best = logits == jnp.max(logits, axis=-1, keepdims=True)
    return jnp.min(jnp.where(is_best, jnp.arange(size), size), axis=-1)
