"""The loss of an EAGLE-3 head: its training-time test (EAGLE-3, section 3.2)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

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

USUAL_LEVELS = 7
"""The levels that published heads are trained with."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3Loss(ChainLoss):
    """The settings of the loss of an EAGLE-3 head; see also `ChainLoss`.

    Attributes:
        decay: The weight of each level relative to the one before.
    """

    reads_hidden = True
    decay: float = 0.8


def eagle3_loss(
    head: FeatureHead, /, params: Any, batch: Batch, settings: Eagle3Loss
) -> tuple[jax.Array, Metrics]:
    """Computes the loss of an EAGLE-3 head on a batch.

    Level `n` weighs `decay ** n`; it is the cross-entropy of the head's distributions
    with the target's, both over the tokens that the head knows, a mean over the pairs
    whose most likely token the head knows. (The official code divides by all positions,
    so that its learning rate depends on the padding.) There is no noise; for the
    arguments see `Head.loss`.
    """
    rows, frozen = batch.rows, jax.lax.stop_gradient(batch.tables)
    inputs, hidden = jnp.split(batch.features, [head.feature_size], axis=-1)
    steps, fused = settings.alignment or USUAL_LEVELS, head.fuse(params, inputs)
    outputs = draft_chains(head, params, frozen.embedding, fused, rows, steps=steps)
    table = output_head(frozen)
    theirs = batch.unembed(table, hidden.astype(table.dtype))
    is_known = jnp.ones(rows.tokens.shape, bool)
    if params.offsets is not None:
        most = jnp.max(theirs, axis=-1)
        theirs = theirs[..., params.offsets + jnp.arange(params.offsets.size)]
        is_known = jnp.max(theirs, axis=-1) == most
    truth = jax.nn.softmax(theirs)
    likely = most_likely(theirs)

    joined = head.join(params, frozen)
    loss, losses, agreements = jnp.float32(0), [], []
    for step, states in enumerate(outputs):
        wanted, label, known = (
            jnp.roll(x, -step - 1, axis=1) for x in (truth, likely, is_known)
        )
        logits = head.logits(joined, states, level=step + 1)
        pairs = pair_weights(rows, settings.mask, step)
        weights = pairs * known
        count = jnp.maximum(jnp.sum(weights), 1.0)
        entropy = token_loss(logits, wanted, settings.token_loss)
        losses.append(jnp.sum(weights * entropy) / count)
        loss += settings.decay**step * losses[-1]
        # What the head does not know it cannot draft: such pairs never agree.
        agrees = weights * (most_likely(logits) == label)
        agreements.append(jnp.sum(agrees) / jnp.maximum(jnp.sum(pairs), 1.0))
    counted = pair_weights(rows, settings.mask)
    return loss, metrics_of(loss, losses[0], agreements, counted)
