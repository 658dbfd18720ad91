"""Which drafts are accepted: one function of one row per rule.

All take the row's tree, `[N]` fields, and the target's logits `[N, V]`, float32, after
each of its nodes, and return the row's `Acceptance`.
"""

import functools

import jax
import jax.numpy as jnp

from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.state import DecodeState
from eagle_jax.sampling import (
    SamplingParams,
    distribution,
    draw_tokens,
    rejection_noise,
)
from eagle_jax.tree import (
    Acceptance,
    DraftTree,
    Step,
    match_child,
    reject_drawn_siblings,
    reject_siblings,
    verify,
)


def accept(
    decoder: Decoder,
    state: DecodeState,
    tree: DraftTree,
    logits: jax.Array,
    noise: jax.Array | None,
) -> Acceptance:
    """Finds the accepted path of every row, by the decoder's rule.

    Args:
        decoder: The decoder. Static.
        state: The state between two rounds.
        tree: The drafted trees, `[B, N]` fields.
        logits: `[B, N, V]` float32, the target's after each node.
        noise: `[B, P, V]` float32 for "coupled", see `Draws.noise`; else unused.

    Returns:
        The outcomes: `[B, P]` paths, `[B]` counts and next tokens.
    """
    depth, sampling = decoder.depth, state.rows.sampling
    if decoder.rule == "greedy":
        follow = functools.partial(follow_argmax, depth=depth)
        return jax.vmap(follow)(tree, logits)
    # Of the whole batch: mapped over rows, a `cond` would run both branches.
    any_filter = sampling.any_filter
    if decoder.rule == "coupled":
        assert noise is not None, "coupled acceptance needs round_draws' noise"
        follow = functools.partial(follow_draws, any_filter=any_filter, depth=depth)
        return jax.vmap(follow)(tree, logits, sampling, noise)
    keys = state.rows.keys, state.lengths - 1
    reject = functools.partial(reject_drafts, any_filter=any_filter, depth=depth)
    return jax.vmap(reject)(tree, logits, sampling, *keys)


def follow_argmax(tree: DraftTree, logits: jax.Array, *, depth: int) -> Acceptance:
    """Follows the child that is the target's most likely token ("greedy")."""

    def step(node: jax.Array, level: jax.Array) -> Step:
        return match_child(tree, node, jnp.argmax(logits[node]).astype(jnp.int32))

    return verify(tree, step, depth=depth)


def follow_draws(
    tree: DraftTree,
    logits: jax.Array,
    sampling: SamplingParams,
    noise: jax.Array,
    *,
    any_filter: jax.Array,
    depth: int,
) -> Acceptance:
    """Follows the child that plain decoding draws with the `noise`, `[P, V]`."""

    def step(node: jax.Array, level: jax.Array) -> Step:
        token = draw_tokens(logits[node], noise[level], sampling, any_filter)
        return match_child(tree, node, token)

    return verify(tree, step, depth=depth)


def reject_drafts(
    tree: DraftTree,
    logits: jax.Array,
    sampling: SamplingParams,
    key: jax.Array,
    root_position: jax.Array,
    *,
    any_filter: jax.Array,
    depth: int,
) -> Acceptance:
    """Tests each node's children by rejection, with coins of its own ("rejection")."""
    coins, last_noise = rejection_noise(key, root_position, *logits.shape)
    is_drawn = tree.draft_logits is not None
    reject = reject_drawn_siblings if is_drawn else reject_siblings

    def step(node: jax.Array, level: jax.Array) -> Step:
        wanted = distribution(logits[node], sampling, any_filter)
        return reject(tree, node, wanted, coins, last_noise)

    return verify(tree, step, depth=depth)
