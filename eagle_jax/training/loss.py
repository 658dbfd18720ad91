"""The loss of an EAGLE-1/2 head (EAGLE-1, section 3.2; HASS, section 3)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

from eagle_jax.models import eagle_head
from eagle_jax.models.eagle_head import EagleHeadConfig, EagleHeadParams
from eagle_jax.models.transformer import Tables, output_head
from eagle_jax.training.chains import draft_chains, segment_mask
from eagle_jax.training.config import LossConfig
from eagle_jax.training.packing import PackedRows

Unembed = Callable[[jax.Array, jax.Array], jax.Array]
"""A function from an output head `[E, V]` and states `[..., E]` to float32 logits."""

_OFFICIAL_NOISE_LENGTH = 512


@struct.dataclass(kw_only=True)
class Metrics:
    """The means over the pairs that count, float32 scalars.

    Attributes:
        loss: The weighted sum of all losses.
        feature_loss: The Smooth L1 loss, a mean over the features' width; the sum of
            an EAGLE-1/2 head's levels, and 0 for other kinds.
        token_loss: The cross-entropy in nats, or the loss that takes its place: the sum
            of an EAGLE-1/2 head's levels, and of other kinds the first level's.
        agreement: The share of pairs where head and target have the same most likely
            token, at the chain's first level.
        chain_length: The drafts of a chain that agree before one does not, see
            `chain_length`; the agreement itself where there is one level.
        pairs: The number of pairs that count.
    """

    loss: jax.Array
    feature_loss: jax.Array
    token_loss: jax.Array
    agreement: jax.Array
    chain_length: jax.Array
    pairs: jax.Array


def target_features(
    target: Any, params: Any, rows: PackedRows, *, with_hidden: bool = False
) -> jax.Array:
    """Returns the target's features `[B, T, F]` of packed rows, without gradient.

    Args:
        target: The `Target`. Static.
        params: The target's parameters.
        rows: The rows, of which tokens, segments and positions are read, `[B, T]`.
        with_hidden: Whether the last hidden states follow the features, `[B, T, F +
            E]`: an EAGLE-3 head learns from them what its features do not say. Static.
    """
    cache = target.init_cache(rows.tokens.shape[0], 0)
    output = target.forward(
        params, rows.tokens, rows.positions, segment_mask(rows.segments), cache
    )
    found = output.features
    if with_hidden:
        found = jnp.concatenate([found, output.hidden], axis=-1)
    return jax.lax.stop_gradient(found)


def pair_weights(rows: PackedRows, mask: str, step: int = 0) -> jax.Array:
    """Returns the weights of pairs, `[B, T]` float32: 1 for every pair that counts.

    Pair `i` joins feature `i` with token `i + 1` and predicts feature `i + 1`, so a
    segment of `n` tokens has `n - 1` pairs.

    Args:
        rows: The rows, of which segments and loss mask are read, `[B, T]`.
        mask: The rule by which pairs count, see `LossConfig.mask`.
        step: The level of the chain, from 0: at place `i` stands the weight of pair `i
            + step`, 0 where that is beyond the segment of `i`. Static.
    """
    length = rows.segments.shape[1]
    if step + 1 >= length:
        return jnp.zeros(rows.segments.shape, jnp.float32)
    ahead = step + 1
    follows = rows.segments[:, ahead:] == rows.segments[:, :-ahead]
    exists = follows & (rows.segments[:, :-ahead] > 0)
    first = ahead if mask == "next" else step
    wanted = rows.loss_mask[:, first : first + length - ahead]
    return jnp.pad((exists & wanted).astype(jnp.float32), ((0, 0), (0, ahead)))


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
    """Computes the loss of a batch (EAGLE-1, section 3.2; HASS, section 3).

    `L = Smooth L1(f[i+1], g[i]) + w_cls * CE(p, q) + w * top-K(p, q)`, where `g[i]` is
    the head's output for (token `i + 1`, noisy feature `i`), `p = softmax(f[i+1] U)`,
    `q = softmax(g[i] U)`, and `U` the target's frozen output head. With an alignment
    above 1 it is the sum over that many levels of chains drafted from every position.

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
    features = features.astype(params.fc.dtype)
    inputs = features if key is None else add_noise(key, features, rows, config)
    outputs = draft_chains(
        eagle_head.layer_inputs,
        params,
        head,
        jax.lax.stop_gradient(tables.embedding),
        inputs,
        rows,
        steps=config.alignment or 1,
        recycle=jax.lax.stop_gradient,
    )
    frozen = jax.lax.stop_gradient(output_head(tables))
    theirs = unembed(frozen, features)
    levels = []
    for step, predicted in enumerate(outputs):
        weights = pair_weights(rows, config.mask, step)
        distance = optax.huber_loss(
            predicted.astype(jnp.float32),
            jnp.roll(features, -step - 1, axis=1).astype(jnp.float32),
        )
        wanted = jnp.roll(theirs, -step - 1, axis=1)
        levels.append(
            _level(unembed(frozen, predicted), wanted, distance, weights, config)
        )
    of_features, of_tokens, of_top_k, agreements = jnp.array(levels).T
    loss = config.feature_weight * jnp.sum(of_features)
    loss += config.token_weight * jnp.sum(of_tokens)
    if config.top_k_loss:
        loss += config.top_k_weight * jnp.sum(of_top_k)
    return loss, Metrics(
        loss=loss,
        feature_loss=jnp.sum(of_features),
        token_loss=jnp.sum(of_tokens),
        agreement=agreements[0],
        chain_length=chain_length(agreements),
        pairs=jnp.sum(pair_weights(rows, config.mask)),
    )


def _level(
    logits: jax.Array,
    wanted: jax.Array,
    distance: jax.Array,
    weights: jax.Array,
    config: LossConfig,
) -> tuple[jax.Array, ...]:
    """Returns the means over the pairs of one level: of losses and of agreement.

    Args:
        logits: `[B, T, V]`, the head's.
        wanted: `[B, T, V]`, the target's.
        distance: `[B, T, E]`, the Smooth L1 loss of each feature.
        weights: `[B, T]`, 1 for pairs that count.
        config: The settings of the loss.
    """
    count = jnp.maximum(jnp.sum(weights), 1.0)
    divisor = count if config.normalize == "tokens" else float(weights.size)
    truth = jax.nn.softmax(wanted)
    losses = [
        jnp.mean(distance, axis=-1),
        token_loss(logits, truth, config),
        top_k_loss(logits, truth, config.top_k_loss),
    ]
    means = [jnp.sum(weights * loss) / divisor for loss in losses]
    agrees = most_likely(logits) == most_likely(wanted)
    return *means, jnp.sum(weights * agrees) / count


def token_loss(logits: jax.Array, truth: jax.Array, config: LossConfig) -> jax.Array:
    """Returns how far a head's distributions are from the target's, `[...]` float32.

    "cross-entropy" is the published loss; "alpha" is `-log(alpha)` of the rate at which
    drafts are accepted, `alpha = sum(min(p, q))`.

    Args:
        logits: `[..., V]` float32, the head's.
        truth: `[..., V]` float32, the target's distributions.
        config: The settings, of which that of the token loss is read.
    """
    if config.token_loss == "cross-entropy":
        return optax.safe_softmax_cross_entropy(logits, truth)
    rate = jnp.sum(jnp.minimum(truth, jax.nn.softmax(logits)), axis=-1)
    return -jnp.log(jnp.maximum(rate, jnp.finfo(jnp.float32).tiny))


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
        return jnp.zeros(truth.shape[:-1])
    truth = jax.lax.stop_gradient(truth)

    def lower(_: jax.Array, bound: jax.Array) -> jax.Array:
        below = jnp.where(truth < bound, truth, -jnp.inf)
        return jnp.max(below, axis=-1, keepdims=True)

    # A vocabulary that is split over devices stays where it is; `top_k` would move it.
    bound = jnp.full((*truth.shape[:-1], 1), jnp.inf)
    bound = jax.lax.fori_loop(0, min(k, truth.shape[-1]), lower, bound)
    likely = jnp.where(truth >= bound, truth, 0)
    return -jnp.sum(likely * jax.nn.log_softmax(logits), axis=-1)


def chain_length(agreements: jax.Array) -> jax.Array:
    """Returns the drafts of a chain that agree before one does not, as expected.

    Args:
        agreements: `[levels]` float32, the share of agreeing pairs of each level.
    """
    return jnp.sum(jnp.cumprod(agreements))


def most_likely(logits: jax.Array) -> jax.Array:
    """Returns the argmax `[...]` of `[..., V]`, the lowest index among equals.

    These are two plain reductions: the argmax over a sharded vocabulary is a reduction
    of pairs, for which TPUs gather, beside everything else of the step where they can.
    """
    logits = jax.lax.stop_gradient(logits)
    size = logits.shape[-1]
    is_best = logits == jnp.max(logits, axis=-1, keepdims=True)
    return jnp.min(jnp.where(is_best, jnp.arange(size), size), axis=-1)
