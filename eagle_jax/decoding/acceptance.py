"""Which drafts are accepted."""

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
    ancestor_mask,
    match_child,
    match_path,
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
    rows = state.rows
    # Of the whole batch: mapped over rows, a `cond` would run both branches.
    any_filter = rows.sampling.any_filter
    if decoder.rule == "rejection":
        reject = functools.partial(_reject, decoder, any_filter)
        keys_and_places = rows.keys, state.lengths - 1
        return jax.vmap(reject)(tree, logits, rows.sampling, *keys_and_places)
    follow = functools.partial(_follow, decoder, any_filter)
    noise = None if decoder.rule == "greedy" else noise
    return jax.vmap(follow)(tree, logits, rows.sampling, noise)


def _follow(
    decoder: Decoder,
    any_filter: jax.Array,
    tree: DraftTree,
    logits: jax.Array,
    sampling: SamplingParams,
    noise: jax.Array | None,
) -> Acceptance:
    """Follows the child that plain decoding goes on with."""
    depth, is_greedy = decoder.depth, decoder.rule == "greedy"

    def choose(
        logits: jax.Array, noise: jax.Array | None, any_filter: jax.Array
    ) -> jax.Array:
        if is_greedy:
            return jnp.argmax(logits).astype(jnp.int32)
        assert noise is not None, "coupled acceptance needs round_draws' noise"
        return draw_tokens(logits, noise, sampling, any_filter)

    def walk(any_filter: jax.Array) -> Acceptance:
        def step(node: jax.Array, level: jax.Array) -> Step:
            one = None if noise is None else noise[level]
            return match_child(tree, node, choose(logits[node], one, any_filter))

        return verify(tree, step, depth=depth)

    def at_once() -> Acceptance:
        depths = ancestor_mask(tree.parents).sum(axis=1) - 1
        every = None if noise is None else noise[depths]
        tokens = jax.vmap(choose, (0, 0, None))(logits, every, jnp.array(False))
        return match_path(tree, tokens, depth=depth)

    def on_gpu() -> Acceptance:
        # Each step of a walk is several kernels. But filters take memory: that of
        # one node at a time.
        if is_greedy:
            return at_once()
        filtered = functools.partial(walk, jnp.array(True))
        return jax.lax.cond(any_filter, filtered, at_once)

    return jax.lax.platform_dependent(
        cuda=on_gpu, default=functools.partial(walk, any_filter)
    )


def _reject(
    decoder: Decoder,
    any_filter: jax.Array,
    tree: DraftTree,
    logits: jax.Array,
    sampling: SamplingParams,
    key: jax.Array,
    root_position: jax.Array,
) -> Acceptance:
    """Tests each node's children by rejection, with coins of its own."""
    coins = rejection_noise(key, root_position, *logits.shape)
    is_drawn = tree.draft_logits is not None
    test = reject_drawn_siblings if is_drawn else reject_siblings

    def step(node: jax.Array, level: jax.Array) -> Step:
        wanted = distribution(logits[node], sampling, any_filter)
        return test(tree, node, wanted, *coins)

    return verify(tree, step, depth=decoder.depth)
