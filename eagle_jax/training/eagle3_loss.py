"""The loss of an EAGLE-3 head: its training-time test (EAGLE-3, section 3.2)."""

import functools

import jax
import jax.numpy as jnp

from eagle_jax.models import eagle3_head
from eagle_jax.models.eagle3_head import Eagle3HeadConfig, Eagle3HeadParams
from eagle_jax.models.layers import rms_norm
from eagle_jax.models.transformer import Tables, output_head
from eagle_jax.models.transformer import unembed as unembed_states
from eagle_jax.training.chains import draft_chains
from eagle_jax.training.config import LossConfig
from eagle_jax.training.loss import (
    Metrics,
    Unembed,
    chain_length,
    most_likely,
    pair_weights,
    token_loss,
)
from eagle_jax.training.packing import PackedRows

USUAL_LEVELS = 7
"""The levels that published heads are trained with."""


def eagle3_loss(
    params: Eagle3HeadParams,
    tables: Tables,
    features: jax.Array,
    rows: PackedRows,
    key: jax.Array | None,
    *,
    head: Eagle3HeadConfig,
    config: LossConfig,
    unembed: Unembed,
) -> tuple[jax.Array, Metrics]:
    """Computes the loss of an EAGLE-3 head on a batch.

    Level `n` weighs `decay ** n`; it is the cross-entropy of the head's distributions
    with the target's, both over the tokens that the head knows, a mean over the pairs
    whose most likely token the head knows. (The official code divides by all positions,
    so that its learning rate depends on the padding.)

    Args:
        params: The head's weights, in the dtype to compute in, with their `offsets`.
        tables: The target's embedding and output head, frozen.
        features: `[B, T, F + E]`, the target's features and its last hidden states.
        rows: The rows, `[B, T]` fields.
        key: Not read: these heads are trained without noise.
        head: The head's sizes. Static.
        config: The settings of the loss. Static.
        unembed: The target's `(output_head, hidden) -> float32 logits`. Static.

    Returns:
        The loss, and its parts.
    """
    del key
    inputs, hidden = jnp.split(features, [head.feature_size], axis=-1)
    outputs = draft_chains(
        eagle3_head.layer_inputs,
        params,
        head,
        jax.lax.stop_gradient(tables.embedding),
        eagle3_head.fuse(params, head, inputs),
        rows,
        steps=config.alignment or USUAL_LEVELS,
        recycle=functools.partial(eagle3_head.recycle, params, head),
    )
    frozen = jax.lax.stop_gradient(output_head(tables))
    theirs = unembed(frozen, hidden.astype(frozen.dtype))
    is_known = jnp.ones(rows.tokens.shape, bool)
    if params.offsets is not None:
        most = jnp.max(theirs, axis=-1)
        theirs = theirs[..., params.offsets + jnp.arange(head.draft_vocab_size)]
        is_known = jnp.max(theirs, axis=-1) == most
    truth = jax.nn.softmax(theirs)
    likely = most_likely(theirs)

    loss, losses, agreements = jnp.zeros(()), [], []
    for step, states in enumerate(outputs):
        wanted, label, known = (
            jnp.roll(x, -step - 1, axis=1) for x in (truth, likely, is_known)
        )
        normed = rms_norm(states, params.norm, head.layer.rms_norm_eps)
        logits = unembed_states(params.output_head, normed)
        pairs = pair_weights(rows, config.mask, step)
        weights = pairs * known
        count = jnp.maximum(jnp.sum(weights), 1.0)
        divisor = count if config.normalize == "tokens" else float(weights.size)
        entropy = token_loss(logits, wanted, config)
        losses.append(jnp.sum(weights * entropy) / divisor)
        loss += config.decay**step * losses[-1]
        # What the head does not know it cannot draft: such pairs never agree.
        agrees = weights * (most_likely(logits) == label)
        agreements.append(jnp.sum(agrees) / jnp.maximum(jnp.sum(pairs), 1.0))
    return loss, Metrics(
        loss=loss,
        feature_loss=jnp.zeros(()),
        token_loss=losses[0],
        agreement=agreements[0],
        chain_length=chain_length(jnp.stack(agreements)),
        pairs=jnp.sum(pair_weights(rows, config.mask)),
    )
