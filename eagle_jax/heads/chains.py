"""Chains drafted from every position of a text at once, as decoding drafts them.

Step `n` at position `i` is the draft that decoding makes when true features end at `i`
and `n` of the text's tokens have been drafted after it: its pair joins token `i + n +
1` with the chain's own output of step `n - 1`, stands at position `i + n`, and sees the
true pairs up to `i` and the chain's own pairs of steps 1 to `n`. This is at once the
harmonised context alignment of HASS (section 3.2), whose pass `n + 1` it is, read by
where the true features end, and the training-time test of EAGLE-3 (section 3.2).
"""

from typing import Any

import jax
import jax.numpy as jnp

from eagle_jax.heads.feature import FeatureHead
from eagle_jax.heads.rows import PackedRows, segment_mask
from eagle_jax.models.attention import attend_beside
from eagle_jax.models.cache import KeyValues
from eagle_jax.models.layers import finish, project
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
    alone = jnp.ones((1, 1), bool)  # Of a later level a pair sees its own chain's.
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
            mixed = attend_beside(query, known[0], seen[:, :, None], own, alone)
            x = inputs = finish(weights, layer, x, mixed)
        outputs.append(x)
        features = head.recycle(params, x)
    return outputs
