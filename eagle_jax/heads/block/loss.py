"""The losses of block heads, from anchors all over a text (DFlash, DSpark).

An anchor is a token that a block begins with. Its rows see the text before it, as
keys and values of the target's features there, and each other; what the head says of
the tokens after the anchor is compared with the text, or with the target.
"""

import dataclasses
from typing import TYPE_CHECKING, Literal

import jax
import jax.numpy as jnp
import optax

from eagle_jax.config import require
from eagle_jax.heads.loss import (
    Batch,
    Metrics,
    metrics_of,
    most_likely,
    token_loss,
)
from eagle_jax.heads.rows import PackedRows
from eagle_jax.heads.settings import LossSettings
from eagle_jax.models.attention import attend_beside
from eagle_jax.models.layers import LayerParams, project
from eagle_jax.models.linear import linear
from eagle_jax.models.rope import rotary_tables
from eagle_jax.models.transformer import output_head
from eagle_jax.prng import make_key, own_keys

if TYPE_CHECKING:
    from eagle_jax.heads.block import BlockHead, BlockHeadParams

_TEXT_SHARE = 0.1  # Of the loss "variation", as DSpark has it.


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockLoss(LossSettings):
    """The settings of the loss of a block head.

    Attributes:
        anchors: The number of blocks of each row of text, at most.
        gamma: Token `k` after the anchor weighs `exp(-(k - 1) / gamma)`.
        block_loss: What is learnt: "tokens" for the text's (DFlash); "variation" for
            the target's distributions, by their total variation, and a tenth of
            "tokens" (DSpark); "alpha" for them by `-log(alpha)` of the rate at which
            drafts are accepted.
    """

    reads_hidden = True
    anchors: int = 512
    gamma: float = 4.0
    block_loss: Literal["tokens", "variation", "alpha"] = "tokens"

    def __post_init__(self) -> None:
        """Refuses settings that lie outside their range."""
        super().__post_init__()
        require(self.anchors >= 1, "anchors", self.anchors, "at least 1")
        require(self.gamma > 0, "gamma", self.gamma, "above 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DSparkLoss(BlockLoss):
    """The settings of the loss of a head of DSpark, see `BlockLoss`."""

    block_loss: Literal["tokens", "variation", "alpha"] = "variation"


def block_loss(
    head: "BlockHead", /, params: "BlockHeadParams", batch: Batch, settings: BlockLoss
) -> tuple[jax.Array, Metrics]:
    """Computes the loss of a block head on a batch.

    For the arguments see `Head.loss`. Of a block those tokens count that stand before
    the first which is not to be predicted.
    """
    config, rows = head.config, batch.rows
    features, hidden = jnp.split(batch.features, [config.feature_size], axis=-1)
    anchors, exists = choose_anchors(rows, settings.anchors, batch.key)
    states = _states(head, params, batch, features, anchors)
    table = jax.lax.stop_gradient(output_head(batch.tables))
    counts = exists

    @jax.checkpoint  # The logits of all levels together would be the memory.
    def measure(
        state: jax.Array, before: jax.Array, label: jax.Array, truth: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        logits = batch.unembed(table, state)
        chance = jnp.zeros(label.shape, jnp.float32)
        theirs = batch.unembed(table, truth.astype(table.dtype))
        inputs = [state]
        if params.markov is not None:
            inputs.append(params.markov.before[before])
            logits = logits + params.markov.logits(inputs[-1])
        law = jax.nn.softmax(theirs)
        if params.confidence is not None:
            read = jnp.concatenate(inputs, axis=-1)
            confidence = params.confidence
            found = linear(read, confidence.linear, confidence.linear_bias)
            overlap = jnp.sum(jnp.minimum(law, jax.nn.softmax(logits)), axis=-1)
            chance = optax.sigmoid_binary_cross_entropy(
                found[..., 0].astype(jnp.float32), jax.lax.stop_gradient(overlap)
            )
        learnt = _distance(logits, law, label, settings.block_loss)
        agrees = most_likely(logits) == most_likely(theirs)
        return learnt, chance, agrees

    losses, weights, agreements, first = [], [], [], jnp.float32(0)
    for level in range(1, config.num_levels + 1):
        token, shift = anchors + level, level - 1
        counts &= _is_wanted(rows, anchors, level)
        learnt, chance, agrees = measure(
            states[:, :, config.first_row + shift],
            _take(rows.tokens, token - 1),
            _take(rows.tokens, token),
            _take(hidden, token - 1),
        )
        weight = counts * jnp.exp(jnp.float32(-shift / settings.gamma))
        losses.append(jnp.sum(weight * (learnt + chance)))
        weights.append(jnp.sum(weight))
        number = jnp.maximum(jnp.sum(counts, dtype=jnp.float32), 1)
        agreements.append(jnp.sum(counts * agrees) / number)
        first = jnp.sum(counts * learnt) / number if level == 1 else first
    loss = sum(losses) / jnp.maximum(sum(weights), 1.0)
    return loss, metrics_of(loss, first, agreements, exists)


def choose_anchors(
    rows: PackedRows, count: int, key: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Chooses the tokens of each row that blocks begin with, evenly at random.

    A token may be one if it and the next of its text are to be predicted.

    Args:
        rows: The rows, `[B, T]` fields.
        count: The most anchors of a row, `A`. Static.
        key: The PRNG key of the choice; `None` for one that is always the same.

    Returns:
        Their places `[B, A]` int32, ascending, and which of them exist, `[B, A]` bool.
    """
    may = _is_wanted(rows, jnp.arange(rows.tokens.shape[1])[None], 1)
    may &= rows.loss_mask & (rows.segments > 0)
    key = make_key(0) if key is None else own_keys(key)
    order = jnp.where(may, jax.random.uniform(key, may.shape, jnp.float32), -1.0)
    chosen, places = jax.lax.top_k(order, min(count, may.shape[1]))
    places = jnp.where(chosen >= 0, places, may.shape[1])
    places = jnp.sort(places, axis=-1)
    exists = places < may.shape[1]
    return jnp.where(exists, places, 0), exists


def _distance(
    logits: jax.Array, law: jax.Array, label: jax.Array, kind: str
) -> jax.Array:
    """Returns how far distributions are from a text, or from the target's, `[...]`."""
    if kind == "alpha":
        return token_loss(logits, law, "alpha")
    tokens = optax.softmax_cross_entropy_with_integer_labels(logits, label)
    if kind == "tokens":
        return tokens
    variation = jnp.sum(jnp.abs(jax.nn.softmax(logits) - law), axis=-1)
    return _TEXT_SHARE * tokens + (1 - _TEXT_SHARE) * variation


def _take(values: jax.Array, places: jax.Array) -> jax.Array:
    """Returns `[B, A, ...]`, what stands at places of `[B, T, ...]`, or at the last."""
    places = jnp.minimum(places, values.shape[1] - 1)
    places = places.reshape(*places.shape, *(1,) * (values.ndim - 2))
    return jnp.take_along_axis(values, places, axis=1)


def _is_wanted(rows: PackedRows, anchors: jax.Array, level: int) -> jax.Array:
    """Returns whether the token this far behind each anchor is to be predicted."""
    length = rows.tokens.shape[1]
    anchors = jnp.broadcast_to(anchors, (rows.tokens.shape[0], anchors.shape[1]))
    same = _take(rows.segments, anchors + level) == _take(rows.segments, anchors)
    return (anchors + level < length) & same & _take(rows.loss_mask, anchors + level)


def _states(
    head: "BlockHead",
    params: "BlockHeadParams",
    batch: Batch,
    features: jax.Array,
    anchors: jax.Array,
) -> jax.Array:
    """Returns the states of every anchor's block, `[B, A, R, E]`."""
    config, layer, rows = head.config, head.config.layer, batch.rows
    read = head.read_features(params, features)
    text = head.text_entries(params, read, rows.positions)
    table = jax.lax.stop_gradient(batch.tables.embedding)
    shape = *anchors.shape, config.block_size
    tokens = jnp.full(shape, config.mask_token, rows.tokens.dtype)
    tokens = tokens.at[..., 0].set(_take(rows.tokens, anchors))
    positions = _take(rows.positions, anchors)[..., None] + jnp.arange(shape[2])
    flat = shape[0], shape[1] * shape[2]
    rotary = rotary_tables(positions.reshape(flat), layer.rope, layer.head_dim)
    # Rows of one block see the same text, but for a window.
    places = jnp.arange(rows.tokens.shape[1])
    sees = places < anchors[..., None]
    sees &= rows.segments[:, None] == _take(rows.segments, anchors)[..., None]
    mask = jnp.broadcast_to(sees[:, :, None], (*shape, len(places)))
    if config.sliding_window is not None:
        far = positions[..., None] - rows.positions[:, None, None]
        mask &= far < config.sliding_window

    def mix(number: int, weights: LayerParams, inputs: jax.Array) -> jax.Array:
        query, own = project(weights, layer, inputs, rotary)
        return attend_beside(query, text[number], mask, [own], head.own_mask())

    x = table[tokens.reshape(flat)].astype(read.dtype)
    return head.run(params, x, mix).reshape(*shape, -1)
