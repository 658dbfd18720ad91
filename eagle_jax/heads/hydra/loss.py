"""The loss of Hydra's heads (Hydra, section 4)."""

import jax
import jax.numpy as jnp

from eagle_jax.heads.chains import segment_mask
from eagle_jax.heads.hydra.model import HydraConfig, HydraParams, head_logits, prefix
from eagle_jax.heads.loss import Batch, Metrics, level_loss
from eagle_jax.heads.settings import LevelLoss
from eagle_jax.models.cache import KeyValues
from eagle_jax.models.layers import AttentionContext


def hydra_loss(
    params: HydraParams, batch: Batch, config: HydraConfig, settings: LevelLoss
) -> tuple[jax.Array, Metrics]:
    """Computes the loss of Hydra's heads on a batch.

    Head `i` learns the target's distribution of token `t + 2 + i` from what it reads:
    feature `t`, or the prefix layer's output there, and the true tokens `t + 1` to
    `t + 1 + i`. For the arguments see `Head.loss`.
    """
    rows = batch.rows
    table = jax.lax.stop_gradient(batch.tables.embedding)
    dtype = params.heads[0].first.linear.dtype
    start = batch.features.astype(dtype)
    if config.layer is not None:
        shape = (start.shape[0], config.layer.num_kv_heads, 0, config.layer.head_dim)
        nothing = jnp.zeros(shape, dtype)
        context = AttentionContext(
            cached=KeyValues(keys=nothing, values=nothing),
            length=jnp.zeros(start.shape[0], jnp.int32),
            mask=segment_mask(rows.segments),
        )
        start, _ = prefix(params, config, start, rows.positions, context)
    logits, inputs = [], [start]
    for level, head in enumerate(params.heads):
        following = jnp.roll(rows.tokens, -1 - level, axis=1)
        inputs.append(table[following].astype(dtype))
        logits.append(head_logits(head, jnp.concatenate(inputs, axis=-1)))
    return level_loss(
        logits, batch, decay=settings.decay, learns_target=settings.labels != "tokens"
    )
