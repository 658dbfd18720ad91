"""The losses of Medusa's and Hydra's heads, each of which predicts one position."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from eagle_jax.models import cache as kv
from eagle_jax.models import hydra_heads, medusa_heads
from eagle_jax.models.hydra_heads import HydraConfig, HydraParams
from eagle_jax.models.medusa_heads import MedusaConfig, MedusaHeadParams
from eagle_jax.models.transformer import Tables, output_head
from eagle_jax.training.chains import segment_mask
from eagle_jax.training.config import LossConfig
from eagle_jax.training.loss import Metrics, Unembed, most_likely
from eagle_jax.training.packing import PackedRows


def medusa_loss(
    params: tuple[MedusaHeadParams, ...],
    tables: Tables,
    features: jax.Array,
    rows: PackedRows,
    key: jax.Array | None,
    *,
    head: MedusaConfig,
    config: LossConfig,
    unembed: Unembed,
) -> tuple[jax.Array, Metrics]:
    """Computes the loss of Medusa's heads on a batch (Medusa, section 3.2).

    Head `i` learns token `t + 2 + i` from the target's feature `t`; its cross-entropy
    weighs `decay ** i`. The arguments are those of `loss.head_loss`; without noise.
    """
    del key, head
    hidden = features.astype(params[0].blocks[0].linear.dtype)
    frozen = jax.lax.stop_gradient(output_head(tables))

    def logits_of(number: int) -> jax.Array:
        own = params[number].output_head
        table = frozen if own is None else own
        return unembed(table, medusa_heads.forward(params[number], hidden))

    logits = map(logits_of, range(len(params)))
    return _loss(logits, features, rows, frozen, config, unembed, labels="tokens")


def hydra_loss(
    params: HydraParams,
    tables: Tables,
    features: jax.Array,
    rows: PackedRows,
    key: jax.Array | None,
    *,
    head: HydraConfig,
    config: LossConfig,
    unembed: Unembed,
) -> tuple[jax.Array, Metrics]:
    """Computes the loss of Hydra's heads on a batch (Hydra, section 4).

    Head `i` learns the target's distribution of token `t + 2 + i` from what it reads:
    feature `t`, or the prefix layer's output there, and the true tokens `t + 1` to
    `t + 1 + i`. The arguments are those of `loss.head_loss`; without noise.
    """
    del key
    table = jax.lax.stop_gradient(tables.embedding)
    dtype = params.heads[0].first.linear.dtype
    frozen = jax.lax.stop_gradient(output_head(tables))
    start = features.astype(dtype)
    if head.layer is not None:
        cache = kv.init_cache(
            num_layers=1,
            batch=features.shape[0],
            num_kv_heads=head.layer.num_kv_heads,
            capacity=0,
            head_dim=head.layer.head_dim,
            dtype=dtype,
        )
        mask = segment_mask(rows.segments)
        start, _ = hydra_heads.prefix(params, head, start, rows.positions, mask, cache)

    def logits_of(number: int) -> jax.Array:
        tokens = [jnp.roll(rows.tokens, -1 - i, axis=1) for i in range(number + 1)]
        embedded = [table[ids].astype(dtype) for ids in tokens]
        inputs = jnp.concatenate([start, *embedded], axis=-1)
        return hydra_heads.logits(params.heads[number], inputs)

    logits = map(logits_of, range(head.num_heads))
    return _loss(logits, features, rows, frozen, config, unembed, labels="target")


def _loss(
    logits: Any,
    features: jax.Array,
    rows: PackedRows,
    table: jax.Array,
    config: LossConfig,
    unembed: Unembed,
    *,
    labels: str,
) -> tuple[jax.Array, Metrics]:
    """Returns the weighted cross-entropies of all heads, and the first one's figures.

    Args:
        logits: The logits `[B, T, V]` of each head, the first one's first.
        features: `[B, T, E]`, the target's features.
        rows: The rows, `[B, T]` fields.
        table: `[E, V]`, the target's output head.
        config: The settings of the loss.
        unembed: The target's `(output_head, hidden) -> float32 logits`.
        labels: What heads learn unless `config` says: "tokens" or "target".
    """
    learns_target = (config.labels or labels) == "target"
    total, total_weight, first = jnp.zeros(()), 0.0, None
    for number, found in enumerate(logits):
        weights = _weights(rows, ahead=2 + number)
        count = jnp.maximum(jnp.sum(weights), 1.0)
        wanted = jnp.roll(features, -1 - number, axis=1).astype(table.dtype)
        theirs = unembed(table, wanted) if learns_target or number == 0 else None
        if learns_target:
            assert theirs is not None
            entropy = optax.softmax_cross_entropy(found, jax.nn.softmax(theirs))
        else:
            tokens = jnp.roll(rows.tokens, -2 - number, axis=1)
            entropy = optax.softmax_cross_entropy_with_integer_labels(found, tokens)
        loss = jnp.sum(weights * entropy) / count
        weight = config.decay**number
        total, total_weight = total + weight * loss, total_weight + weight
        if first is None:
            assert theirs is not None
            agrees = most_likely(found) == most_likely(theirs)
            first = loss, jnp.sum(weights * agrees) / count, jnp.sum(weights)
    assert first is not None, "there is at least one head"
    token_loss, agreement, pairs = first
    loss = total / total_weight
    return loss, Metrics(
        loss=loss,
        feature_loss=jnp.zeros(()),
        token_loss=token_loss,
        agreement=agreement,
        chain_length=agreement,
        pairs=pairs,
    )


def _weights(rows: PackedRows, *, ahead: int) -> jax.Array:
    """Returns `[B, T]` float32: 1 where the token `ahead` is there and to be learnt."""
    length = rows.tokens.shape[1]
    if ahead >= length:
        return jnp.zeros(rows.tokens.shape, jnp.float32)
    same = rows.segments[:, ahead:] == rows.segments[:, :-ahead]
    is_wanted = same & (rows.segments[:, :-ahead] > 0) & rows.loss_mask[:, ahead:]
    return jnp.pad(is_wanted.astype(jnp.float32), ((0, 0), (0, ahead)))
