"""Chains drafted from every position of a text at once, as decoding drafts them.

Step `n` at position `i` is the draft that decoding makes when true features end at `i`
and `n` of the text's tokens have been drafted after it: its pair joins token `i + n +
1` with the chain's own output of step `n - 1`, stands at position `i + n`, and sees the
true pairs up to `i` and the chain's own pairs of steps 1 to `n`. This is at once the
harmonised context alignment of HASS (section 3.2), whose pass `n + 1` it is, read by
where the true features end, and the training-time test of EAGLE-3 (section 3.2).
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from eagle_jax.heads.feature import FeatureHead
from eagle_jax.heads.rows import PackedRows, segment_mask
from eagle_jax.models.cache import KeyValues
from eagle_jax.models.layers import finish, project
from eagle_jax.models.linear import precision_of
from eagle_jax.models.rope import rotary_tables


def draft_chains(
    head: FeatureHead,
    params: Any,
    table: jax.Array,
    features: jax.Array,
    rows: PackedRows,
    *,
    steps: int,
) -> list[jax.Array]:
    """Drafts `steps` levels of a chain from every position, with the text's tokens.

    What would reach beyond the end of a segment is computed from other tokens and
    is unspecified; mask it out of the loss.

    Args:
        head: The head. Static.
        params: Its weights, in the type to compute in.
        table: `[V, E]`, the embedding table.
        features: `[B, T, E]`, the true features at the head's width.
        rows: The rows, `[B, T]` fields.
        steps: The number of levels, at least 1. Static.

    Returns:
        The outputs `[B, T, E]` of each level; those of level `n`, counted from 0, at
        position `i` predict what the target says of token `i + n + 2`.
    """
    layer, window = head.config.layer, head.sliding_window
    mask = segment_mask(rows.segments)
    distance = jnp.arange(mask.shape[1])[:, None] - jnp.arange(mask.shape[1])
    layers = params.layer, *getattr(params, "later_layers", ())
    outputs: list[jax.Array] = []
    entries: list[list[KeyValues]] = [[] for _ in layers]
    for step in range(steps):
        tokens = jnp.roll(rows.tokens, -step - 1, axis=1)
        embedded = table[tokens].astype(features.dtype)
        x, inputs = head.layer_inputs(params, embedded, features)
        rotary = rotary_tables(rows.positions + step, layer.rope, layer.head_dim)
        seen = mask if window is None else mask & (distance + step < window)
        for weights, known in zip(layers, entries, strict=True):
            query, new = project(weights, layer, inputs, rotary)
            known.append(new)
            own = known[1:] if window is None else known[1:][-window:]
            x = inputs = finish(weights, layer, x, _attend(query, known[0], seen, own))
        outputs.append(x)
        features = head.recycle(params, x)
    return outputs


@jax.checkpoint  # Scores are made again in the backward pass: they are the memory.
def _attend(
    query: jax.Array, true: KeyValues, mask: jax.Array, own: Sequence[KeyValues]
) -> jax.Array:
    """Attends over the true pairs, and over the query's own chain, in one softmax.

    Args:
        query: `[B, T, H, A]`, the queries, rotated.
        true: `[B, G, T, A]`, the keys and values of the pairs with true features.
        mask: `[B, T, T]` bool, true where a query sees a true pair.
        own: For each later level `[B, G, T, A]`: query `i` sees entry `i` alone.

    Returns:
        The heads' mixed values side by side, `[B, T, H * A]`.
    """
    batch, length, _, head_dim = query.shape
    precision = precision_of(query)
    grouped = query.reshape(batch, length, true.keys.shape[1], -1, head_dim)
    grouped = grouped * head_dim**-0.5

    def dot(pattern: str, *operands: jax.Array) -> jax.Array:
        return jnp.einsum(
            pattern,
            *operands,
            precision=precision,
            preferred_element_type=jnp.float32,
        )

    scores = dot("btgra,bgsa->bgrts", grouped, true.keys)
    scores = jnp.where(mask[:, None, None], scores, jnp.finfo(jnp.float32).min)
    for level in own:
        each = dot("btgra,bgta->bgrt", grouped, level.keys)
        scores = jnp.concatenate([scores, each[..., None]], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1).astype(query.dtype)
    mixed = dot("bgrts,bgsa->btgra", weights[..., :length], true.values)
    for number, level in enumerate(own, length):
        mixed += dot("bgrt,bgta->btgra", weights[..., number], level.values)
    return mixed.astype(query.dtype).reshape(batch, length, -1)
