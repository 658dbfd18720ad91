"""What the losses of all kinds of heads share: their batch, figures and measures."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.typing import ArrayLike

from eagle_jax.heads.rows import PackedRows, segment_mask
from eagle_jax.models.transformer import Tables, unembed

Unembed = Callable[[jax.Array, jax.Array], jax.Array]
"""A function from an output head `[E, V]` and states `[..., E]` to float32 logits."""


@struct.dataclass(kw_only=True)
class Batch:
    """The texts that a head learns from, and what the target says of them.

    Attributes:
        rows: The texts, `[B, T]` fields.
        features: `[B, T, F]`, the target's features, or `[B, T, F + E]` with its last
            hidden states behind them, see `LossSettings.reads_hidden`.
        tables: The target's embedding and output head, frozen.
        key: The PRNG key of the noise; `None` for no noise.
        unembed: The target's `(output_head, hidden) -> float32 logits`. Static.
    """

    rows: PackedRows
    features: jax.Array
    tables: Tables
    key: jax.Array | None = None
    unembed: Unembed = struct.field(pytree_node=False, default=unembed)


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
        chain_length: The drafts of a chain that agree before one does not, as
            expected; the agreement itself where there is one level.
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
        mask: The rule by which pairs count, see `ChainLoss.mask`; "drafted" for those
            whose *draft* (token `i + 2`) is there and to be predicted.
        step: The level of the chain, from 0: at place `i` stands the weight of pair `i
            + step`, 0 where that is beyond the segment of `i`. Static.
    """
    ahead = step + (2 if mask == "drafted" else 1)
    length = rows.segments.shape[1]
    if ahead >= length:
        return jnp.zeros(rows.segments.shape, jnp.float32)
    follows = rows.segments[:, ahead:] == rows.segments[:, :-ahead]
    exists = follows & (rows.segments[:, :-ahead] > 0)
    first = step if mask == "official" else ahead
    wanted = rows.loss_mask[:, first : first + length - ahead]
    return jnp.pad((exists & wanted).astype(jnp.float32), ((0, 0), (0, ahead)))


def token_loss(logits: jax.Array, truth: jax.Array, kind: str) -> jax.Array:
    """Returns how far a head's distributions are from the target's, `[...]` float32.

    "cross-entropy" is the published loss; "alpha" is `-log(alpha)` of the rate at which
    drafts are accepted, `alpha = sum(min(p, q))`.

    Args:
        logits: `[..., V]` float32, the head's.
        truth: `[..., V]` float32, the target's distributions.
        kind: The loss, see `ChainLoss.token_loss`.
    """
    if kind == "cross-entropy":
        return optax.safe_softmax_cross_entropy(logits, truth)
    rate = jnp.sum(jnp.minimum(truth, jax.nn.softmax(logits)), axis=-1)
    return -jnp.log(jnp.maximum(rate, jnp.finfo(jnp.float32).tiny))


def metrics_of(
    loss: jax.Array,
    token_loss: jax.Array,
    agreements: Sequence[jax.Array],
    counted: jax.Array,
    feature_loss: ArrayLike = 0.0,
) -> Metrics:
    """Returns the metrics of a loss; for the losses, float32 scalars, see there.

    Of each level `agreements` hold the share of agreeing pairs, a float32 scalar, and
    `counted` are the weights `[...]` of the pairs of the first.
    """
    shares = jnp.stack(agreements)
    return Metrics(
        loss=loss,
        feature_loss=jnp.asarray(feature_loss, jnp.float32),
        token_loss=token_loss,
        agreement=shares[0],
        chain_length=jnp.sum(jnp.cumprod(shares)),
        pairs=jnp.sum(counted).astype(jnp.float32),
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
