"""The loss of an EAGLE-1/2 head (EAGLE-1, section 3.2; HASS, section 3)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from eagle_jax.config import require_counts
from eagle_jax.heads.chains import draft_chains
from eagle_jax.heads.feature import FeatureHead
from eagle_jax.heads.loss import (
    Batch,
    Metrics,
    metrics_of,
    most_likely,
    pair_weights,
    token_loss,
)
from eagle_jax.heads.settings import ChainLoss
from eagle_jax.models.transformer import output_head
from eagle_jax.prng import own_keys


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleLoss(ChainLoss):
    """The settings of the loss of an EAGLE-1/2 head; see also `ChainLoss`.

    Attributes:
        feature_weight: The weight of the Smooth L1 loss between features.
        token_weight: The weight of the cross-entropy between token distributions,
            `w_cls`.
        noise: The half width of the uniform noise on input features.
        top_k_loss: The number of the target's most likely tokens in HASS's top-K loss;
            0 for none, 10 as published.
        top_k_weight: The weight of the top-K loss.
        loss_vocab_size: The number of tokens, those most frequent in the data, whose
            probabilities steps compare; `None` for all. Evaluations compare all.
    """

    feature_weight: float = 1.0
    token_weight: float = 0.1
    noise: float = 0.1
    top_k_loss: int = 0
    top_k_weight: float = 1.0
    loss_vocab_size: int | None = None

    def __post_init__(self) -> None:
        """Refuses settings that lie outside their range."""
        super().__post_init__()
        if self.loss_vocab_size is not None:
            require_counts(self, loss_vocab_size=1)


def add_noise(key: jax.Array, features: jax.Array, noise: float) -> jax.Array:
    """Adds the uniform noise that makes a head bear its own errors.

    Args:
        key: The PRNG key of this step's noise.
        features: `[B, T, E]`, the target's features.
        noise: The half width of the noise.
    """
    shape = features.shape
    drawn = jax.random.uniform(own_keys(key), shape, jnp.float32, -noise, noise)
    return features + drawn.astype(features.dtype)


def eagle_loss(
    head: FeatureHead, /, params: Any, batch: Batch, settings: EagleLoss
) -> tuple[jax.Array, Metrics]:
    """Computes the loss of a batch.

    `L = Smooth L1(f[i+1], g[i]) + w_cls * CE(p, q) + w * top-K(p, q)`, where `g[i]` is
    the head's output for (token `i + 1`, noisy feature `i`), `p = softmax(f[i+1] U)`,
    `q = softmax(g[i] U)`, and `U` the target's frozen output head. With an alignment
    above 1 it is the sum over that many levels of chains drafted from every position.
    For the arguments see `Head.loss`.
    """
    features, rows = batch.features.astype(params.fc.dtype), batch.rows
    inputs = features
    if batch.key is not None:
        inputs = add_noise(batch.key, features, settings.noise)
    outputs = draft_chains(
        head,
        params,
        jax.lax.stop_gradient(batch.tables.embedding),
        inputs,
        rows,
        steps=settings.alignment or 1,
    )
    frozen = jax.lax.stop_gradient(output_head(batch.tables))
    theirs = batch.unembed(frozen, features)
    levels = []
    for step, predicted in enumerate(outputs):
        weights = pair_weights(rows, settings.mask, step)
        count = jnp.maximum(jnp.sum(weights), 1.0)
        distance = optax.huber_loss(
            predicted.astype(jnp.float32),
            jnp.roll(features, -step - 1, axis=1).astype(jnp.float32),
        )
        wanted = jnp.roll(theirs, -step - 1, axis=1)
        truth = jax.nn.softmax(wanted)
        logits = batch.unembed(frozen, predicted)
        measures = [
            jnp.mean(distance, axis=-1),
            token_loss(logits, truth, settings.token_loss),
            top_k_loss(logits, truth, settings.top_k_loss),
            most_likely(logits) == most_likely(wanted),
        ]
        levels.append([jnp.sum(weights * one) / count for one in measures])
    of_features, of_tokens, of_top_k, agreements = jnp.array(levels).T
    loss = settings.feature_weight * jnp.sum(of_features)
    loss += settings.token_weight * jnp.sum(of_tokens)
    if settings.top_k_loss:
        loss += settings.top_k_weight * jnp.sum(of_top_k)
    counted, feature_loss = pair_weights(rows, settings.mask), jnp.sum(of_features)
    return loss, metrics_of(loss, jnp.sum(of_tokens), agreements, counted, feature_loss)


def top_k_loss(logits: jax.Array, truth: jax.Array, k: int) -> jax.Array:
    """Returns the cross-entropy over the target's `k` most likely tokens, `[...]`.

    `-sum(p(x) log q(x))` over these tokens alone, with `p` as it is (HASS, section
    3.1); 0 for `k = 0`. Equally likely tokens count as one of the `k`.

    Args:
        logits: `[..., V]` float32, the head's.
        truth: `[..., V]` float32, the target's distributions; no gradient reaches them.
        k: The number of tokens; all if it is `V` or more. Static.
    """
    if not k:
        return jnp.zeros(truth.shape[:-1], jnp.float32)
    truth = jax.lax.stop_gradient(truth)

    def lower(_: jax.Array, bound: jax.Array) -> jax.Array:
        below = jnp.where(truth < bound, truth, -jnp.inf)
        return jnp.max(below, axis=-1, keepdims=True)

    # A vocabulary that is split over devices stays where it is; `top_k` would move it.
    bound = jnp.full((*truth.shape[:-1], 1), jnp.inf, jnp.float32)
    bound = jax.lax.fori_loop(0, min(k, truth.shape[-1]), lower, bound)
    likely = jnp.where(truth >= bound, truth, 0)
    return -jnp.sum(likely * jax.nn.log_softmax(logits), axis=-1)
