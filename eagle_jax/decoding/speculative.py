"""Speculative decoding: draft a tree, verify it, accept a path, commit it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import struct

from eagle_jax.constraints import find_forbidden, process_nodes, prune
from eagle_jax.decoding.acceptance import accept
from eagle_jax.decoding.chunked_prefill import check_samples, emit_next, prefill
from eagle_jax.decoding.decoder import AcceptanceRule, Decoder
from eagle_jax.decoding.growth import Limits, cache_sizes, grow, has_room
from eagle_jax.decoding.requests import Requests
from eagle_jax.decoding.state import (
    DecodeState,
    emit,
    record_logprobs,
    record_round,
)
from eagle_jax.interface import Draws, Params, TargetOutput, Verified
from eagle_jax.interface.checks import check, check_tree
from eagle_jax.sampling import drafting_keys, position_noise
from eagle_jax.tree import Acceptance, DraftTree, flatten

__all__ = [
    "AcceptanceRule",
    "Round",
    "accept",
    "commit",
    "decode",
    "decode_round",
    "decode_until",
    "generate",
    "prefill",
    "round_draws",
    "run_target",
]


@struct.dataclass(kw_only=True)
class Round:
    """The events of one round, for streaming and for looking at trees.

    Attributes:
        tree: The verified trees, `[B, N]` fields.
        acceptance: The accepted paths, uncut by limits, `[B]` and `[B, P]` fields;
            undefined in rows that were finished.
        tokens: `[B, P]` int32, the emitted tokens; undefined after `count`.
        count: `[B]` int32, tokens emitted, cut at limits and stop tokens; 0 in rows
            that were finished before, or that came to a dead end.
    """

    tree: DraftTree
    acceptance: Acceptance
    tokens: jax.Array
    count: jax.Array


def generate(
    decoder: Decoder,
    params: Params,
    requests: Requests,
    *,
    num_slots: int | None = None,
    num_samples: int = 1,
) -> DecodeState:
    """Decodes every request to its end.

    With `greedy` and `coupled` acceptance the tokens are those of
    `autoregressive.generate`, whatever the drafter proposes; with `rejection` they have
    the same distribution.

    Args:
        decoder: The decoder. Static.
        params: The parameters of target and drafter.
        requests: The requests, `B` rows of concrete arrays.
        num_slots: The number of cache slots, `S`; `None` for a cache that grows with
            the texts, up to what the requests need. Static.
        num_samples: The number of neighbours that have one prompt, `n`, and keys of
            their own; it is read once for all of them. Static.

    Returns:
        The final state: `tokens`, `lengths` and `stop_reason` are the answer,
        `accept_lengths` and `num_rounds` tell how it came about.

    Raises:
        InputError: If `num_slots` is too small for the requests, a temperature above 0
            meets a greedy decoder, or neighbours differ that are to share a prompt.
    """
    decoder.check(params, requests)
    check_samples(requests, num_samples)
    size, *larger = cache_sizes(requests, num_slots, depth=decoder.depth)
    state = prefill(decoder, params, requests, num_slots=size, num_samples=num_samples)
    state = decode(decoder, params, state)
    for size in larger:
        if not jax.device_get(state.is_running).any():
            break
        state = decode(decoder, params, grow(decoder, state, num_slots=size))
    return state


@functools.partial(
    jax.jit, static_argnames=("decoder", "depth"), donate_argnames=("state",)
)
def decode_until(
    decoder: Decoder,
    params: Params,
    state: DecodeState,
    limits: Limits | None = None,
    *,
    depth: int | None = None,
) -> DecodeState:
    """Runs rounds as one program; the state, caches included, is donated.

    The loop ends when every row has, or when one needs a larger cache: see `growth`.

    Args:
        decoder: The decoder; without a drafter each round is a step of plain decoding.
            Static.
        params: The parameters of target and drafter.
        state: The state of `prefill` or of the last round; finished rows stay as they
            are.
        limits: Where it ends although rows are running and have room; `None` for
            nowhere.
        depth: The depth that there must be room for; `None` for the drafter's own.
            Static.
    """

    def advance(state: DecodeState) -> DecodeState:
        if decoder.drafter is None:
            return _step(decoder, params, state)
        return _round(decoder, params, state)[0]

    was_running, rounds_before = state.is_running, state.num_rounds

    def goes_on(state: DecodeState) -> jax.Array:
        is_running = state.is_running
        needed = decoder.depth if depth is None else depth
        has_more = is_running.any() & has_room(state, needed)
        if limits is None:
            return has_more
        # A row that goes on was running in every round.
        done = (state.num_rounds - rounds_before).max()
        ended = (was_running & ~is_running).sum(dtype=jnp.int32)
        return has_more & (done < limits.most_rounds) & (ended <= limits.most_ended)

    return jax.lax.while_loop(goes_on, advance, state)


def _step(decoder: Decoder, params: Params, state: DecodeState) -> DecodeState:
    """Emits one token per running row: a round without a tree."""
    target, cache = decoder.target, state.target_cache
    tokens, positions = state.root[:, None], (state.lengths - 1)[:, None]
    output = target.forward(params.target, tokens, positions, None, cache)
    raw = target.unembed(params.target, output.hidden[:, 0])
    state = record_round(state, jnp.zeros_like(state.lengths))
    state, taken = emit_next(decoder, params, state, raw)
    cache = target.commit(cache, output.entries, jnp.zeros_like(positions), taken)
    return dataclasses.replace(state, target_cache=cache)


decode = decode_until
"""All rounds as one program: `decode_until` without limits."""


@functools.partial(jax.jit, static_argnames=("decoder",), donate_argnames=("state",))
def decode_round(
    decoder: Decoder, params: Params, state: DecodeState
) -> tuple[DecodeState, Round]:
    """Runs one round, for streaming and serving loops; the state is donated.

    Args:
        decoder: The decoder. Static.
        params: The parameters of target and drafter.
        state: The state of `prefill` or of the last round; finished rows stay as they
            are.

    Returns:
        The new state, and the events of the round.
    """
    return _round(decoder, params, state)


def _round(
    decoder: Decoder, params: Params, state: DecodeState
) -> tuple[DecodeState, Round]:
    # Draft: a tree of likely continuations of the root, under this round's noise.
    draws = round_draws(decoder, params, state)
    drafter, before = decoder.drafting, state.drafter_state
    tree, drafter_state = drafter.propose(params.drafter, before, state.root, draws)
    check_tree(f"{type(drafter).__name__}.propose", tree, len(state.root))
    state = dataclasses.replace(state, drafter_state=drafter_state)

    # Verify: one call of the target over all nodes, beside its cache.
    output, raw = run_target(decoder, params, state, tree)
    logits = process_nodes(draws.guide, raw, tree)
    tree = prune(draws.guide, tree, logits)

    # Accept: the path that the target's own text follows.
    accepted = accept(decoder, state, tree, logits, draws.noise)

    # Commit: the text grows, and what it ends with becomes the next root.
    state, done = commit(decoder, params, state, tree, output, logits, accepted)
    state = record_logprobs(state, raw, done.tokens, done.count, accepted.path)
    check(f"{type(drafter).__name__}.advance", before, state.drafter_state)
    return state, done


def round_draws(decoder: Decoder, params: Params, state: DecodeState) -> Draws:
    """Returns how the tokens of the next round will be drawn.

    The noise is made once per round, for drafting and verification alike: the nodes of
    one depth share a position, so `P` rows serve a tree of any size. Without "coupled"
    acceptance there is no noise to share.

    Args:
        decoder: The decoder. Static.
        params: The parameters of target and drafter, of which only shapes are read.
        state: The state between two rounds.
    """
    rows, root_positions = state.rows, state.lengths - 1
    noise = None
    if decoder.rule == "coupled":
        positions = root_positions[:, None] + jnp.arange(1, decoder.depth + 2)
        vocab_size = decoder.vocab_size(params)
        noise = position_noise(rows.keys, positions, rows.sampling, vocab_size)
    return Draws(
        sampling=rows.sampling,
        noise=noise,
        keys=drafting_keys(rows.keys, root_positions),
        guide=decoder.guide(params, state),
    )


def run_target(
    decoder: Decoder, params: Params, state: DecodeState, tree: DraftTree
) -> tuple[TargetOutput, jax.Array]:
    """Runs the target over all nodes of a tree, beside its cache.

    Args:
        decoder: The decoder. Static.
        params: The parameters of target and drafter.
        state: The state between two rounds.
        tree: The drafted trees, `[B, N]` fields.

    Returns:
        The target's output, and its own logits `[B, N, V]`, float32, after each node:
        processors and the constraint change them later.
    """
    target, cache = decoder.target, state.target_cache
    positions, mask = jax.vmap(flatten)(tree, state.lengths - 1)
    output = target.forward(params.target, tree.tokens, positions, mask, cache)
    return output, target.unembed(params.target, output.hidden)


def commit(
    decoder: Decoder,
    params: Params,
    state: DecodeState,
    tree: DraftTree,
    output: TargetOutput,
    logits: jax.Array,
    accepted: Acceptance,
) -> tuple[DecodeState, Round]:
    """Appends the accepted paths to the texts, the cache and the drafter's state.

    Args:
        decoder: The decoder. Static.
        params: The parameters of target and drafter.
        state: The state before the round, but with the drafter's state of `propose`;
            rows that are finished commit nothing.
        tree: The drafted trees, `[B, N]` fields.
        output: The target's output of the verification.
        logits: `[B, N, V]` float32, the target's after each node.
        accepted: The outcomes of the verification, `[B, P]` paths.

    Returns:
        The state for the next round, and the events of this one.
    """
    # The accepted drafts, then the next token.
    drafts = jnp.roll(jnp.take_along_axis(tree.tokens, accepted.path, axis=1), -1, 1)
    is_next = jnp.arange(decoder.depth + 1) == accepted.num_accepted[:, None]
    tokens = jnp.where(is_next, accepted.next_token[:, None], drafts)
    state = record_round(state, accepted.num_accepted, tree)
    guide = decoder.guide(params, state)
    is_forbidden = find_forbidden(guide, logits, accepted.path, tokens)
    state, count = emit(state, tokens, accepted.num_accepted + 1, guide, is_forbidden)
    verified = Verified(
        tree=tree,
        logits=logits,
        features=output.features,
        path=accepted.path,
        count=count,
    )
    state = dataclasses.replace(
        state,
        target_cache=decoder.target.commit(
            state.target_cache, output.entries, accepted.path, count
        ),
        drafter_state=decoder.drafting.advance(
            params.drafter, state.drafter_state, verified
        ),
    )
    return state, Round(tree=tree, acceptance=accepted, tokens=tokens, count=count)
