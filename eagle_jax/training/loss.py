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
"""From an output head `[E, V]` and hidden states `[..., E]` to float32 logits."""

_OFFICIAL_NOISE_LENGTH = 512


@struct.dataclass(kw_only=True)
class Metrics:
    """Means over the pairs that count, float32 scalars.

    Attributes:
        loss: The weighted sum of the next two.
        feature_loss: Smooth L1, mean over the features' width.
        token_loss: Cross-entropy in nats.
        agreement: Share of pairs where head and target have the same most likely
            token.
        pairs: How many pairs count.
    """

    loss: jax.Array
    feature_loss: jax.Array
    token_loss: jax.Array
    agreement: jax.Array
    pairs: jax.Array


def segment_mask(segments: jax.Array) -> jax.Array:
    """Returns `[B, T, T]` bool: causal inside each segment; all see themselves."""
    length = segments.shape[1]
    same = segments[:, :, None] == segments[:, None, :]
    return same & jnp.tri(length, dtype=bool)


def target_features(target: Any, params: Any, rows: PackedRows) -> jax.Array:
    """Returns the target's features `[B, T, E]` of packed rows, without gradient.

    Args:
        target: A `Target`. Static.
        params: Its weights.
        rows: `[B, T]` tokens, segments and positions.
    """
    cache = target.init_cache(rows.tokens.shape[0], 0)
    output = target.forward(
        params, rows.tokens, rows.positions, segment_mask(rows.segments), cache
    )
    return jax.lax.stop_gradient(output.features)


def pair_weights(rows: PackedRows, mask: str) -> jax.Array:
    """Returns `[B, T]` float32: 1 for every pair that counts.

    Pair `i` joins feature `i` with token `i + 1` and predicts feature `i + 1`, so a
    segment of `n` tokens has `n - 1` of them.

    Args:
        rows: `[B, T]` segments and loss mask.
        mask: See `LossConfig.mask`.
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
        key: Of this step.
        features: `[B, T, E]`.
        rows: `[B, T]` segments, whose lengths the official scale needs.
        config: Half width and scale.
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
        tables: Of the target, frozen.
        features: `[B, T, E]`, the target's.
        rows: `[B, T]` tokens, segments, positions and loss mask.
        key: Of the noise; `None` for none.
        head: Sizes. Static.
        config: Weights, noise and masks. Static.
        unembed: The target's `(output_head, hidden) -> float32 logits`. Static.

    Returns:
        The loss, and its parts.
    """
    dtype = params.fc.dtype
    features = features.astype(dtype)
    inputs = features if key is None else add_noise(key, features, rows, config)
    tokens = jnp.roll(rows.tokens, -1, axis=1)
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
    agrees = _likeliest(logits) == _likeliest(target_logits)

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


def _likeliest(logits: jax.Array) -> jax.Array:
    """Returns the argmax `[...]` of `[..., V]`, the lowest index among equals.

    Two plain reductions: a split vocabulary's argmax is one of pairs, for which TPUs
    gather, beside everything else of the step where they can.
    """
    logits = jax.lax.stop_gradient(logits)
    size = logits.shape[-1]
    is_best = logits == jnp.max(logits, axis=-1, keepdims=True)
    return jnp.min(jnp.where(is_best, jnp.arange(size), size), axis=-1)
