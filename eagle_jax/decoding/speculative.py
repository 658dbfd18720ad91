"""Speculative decoding: draft a tree, verify it, accept a path, commit it."""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct

from eagle_jax.decoding.growth import (
    cache_sizes,
    decode_growing,
    grow,
    has_room,
)
from eagle_jax.decoding.requests import Requests
from eagle_jax.decoding.state import DecodeState, emit, record_round, start
from eagle_jax.interface import Drafter, Draws, Params, Target, TargetOutput
from eagle_jax.sampling import (
    distribution,
    drafting_keys,
    draw_tokens,
    position_noise,
    rejection_noise,
)
from eagle_jax.tree import (
    Acceptance,
    DraftTree,
    Step,
    flatten,
    match_child,
    reject_drawn_siblings,
    reject_siblings,
    verify,
)

AcceptanceRule = Literal["greedy", "coupled", "rejection"]
"""How drafts are accepted.

`greedy` follows the target's argmax. `coupled` follows the tokens that plain
decoding draws with the same keys. `rejection` has the same law and other tokens.
"""


@struct.dataclass(kw_only=True)
class Round:
    """What happened in one round, for streaming and for looking at trees.

    Attributes:
        tree: The verified trees, `[B, N]` fields.
        acceptance: The accepted paths, uncut by limits, `[B]` and `[B, P]` fields.
        was_running: `[B]` bool; what a finished row reports means nothing.
    """

    tree: DraftTree
    acceptance: Acceptance
    was_running: jax.Array


def generate(
    target: Target,
    drafter: Drafter,
    params: Params,
    requests: Requests,
    *,
    acceptance: AcceptanceRule,
    num_slots: int | None = None,
) -> DecodeState:
    """Decodes every request to its end.

    With `greedy` and `coupled` acceptance the tokens are those of
    `autoregressive.generate`, whatever the drafter proposes.

    Args:
        target: Static.
        drafter: Static.
        params: Of both.
        requests: `B` rows, concrete.
        acceptance: Static.
        num_slots: `S`; `None` for a cache that grows with the texts, up to what the
            requests need. Static.

    Returns:
        The final state: `tokens`, `lengths` and `stop_reason` are the answer,
        `accept_lengths` and `num_rounds` tell how it came about.

    Raises:
        InputError: If `num_slots` is too small for the requests.
    """
    depth = drafter.depth
    sizes = cache_sizes(requests, num_slots, depth=depth)
    settings = {"acceptance": acceptance}
    state = prefill(target, drafter, params, requests, num_slots=sizes[0], **settings)
    limits = requests.without_prompts()
    return decode_growing(
        state,
        sizes,
        lambda state: decode(target, drafter, params, limits, state, **settings),
        lambda state, size: grow(target, drafter, state, num_slots=size),
    )


@functools.partial(
    jax.jit, static_argnames=("target", "drafter", "num_slots", "acceptance")
)
def prefill(
    target: Target,
    drafter: Drafter,
    params: Params,
    requests: Requests,
    *,
    num_slots: int,
    acceptance: AcceptanceRule,
) -> DecodeState:
    """Reads the prompts, emits the first tokens and prepares the drafter.

    Arguments are those of `generate`, but nothing checks `num_slots` here: it must be
    at least `round_up_slots` of the longest text.
    """
    state, features = start(
        target,
        params.target,
        requests,
        num_slots=num_slots,
        greedy=acceptance == "greedy",
    )
    drafter_state = drafter.prefill(
        params.drafter,
        drafter.init_state(requests.prompts.shape[0], num_slots),
        requests.prompts,
        features,
        requests.prompt_lengths,
    )
    return dataclasses.replace(state, drafter_state=drafter_state)


@functools.partial(
    jax.jit,
    static_argnames=("target", "drafter", "acceptance"),
    donate_argnames=("state",),
)
def decode(
    target: Target,
    drafter: Drafter,
    params: Params,
    requests: Requests,
    state: DecodeState,
    *,
    acceptance: AcceptanceRule,
) -> DecodeState:
    """Runs rounds as one program; the state, caches included, is donated.

    It ends when every row has, or when one needs a larger cache: see `growth`.
    """

    def body(state: DecodeState) -> DecodeState:
        state, _ = _round(
            target, drafter, params, requests, state, acceptance=acceptance
        )
        return state

    def goes_on(state: DecodeState) -> jax.Array:
        return state.is_running.any() & has_room(state, drafter.depth)

    return jax.lax.while_loop(goes_on, body, state)


@functools.partial(
    jax.jit,
    static_argnames=("target", "drafter", "acceptance"),
    donate_argnames=("state",),
)
def decode_round(
    target: Target,
    drafter: Drafter,
    params: Params,
    requests: Requests,
    state: DecodeState,
    *,
    acceptance: AcceptanceRule,
) -> tuple[DecodeState, Round]:
    """Runs one round, for streaming and serving loops; the state is donated.

    Args:
        target: Static.
        drafter: Static.
        params: Of both.
        requests: `B` rows.
        state: From `prefill` or the last round; finished rows stay as they are.
        acceptance: Static.

    Returns:
        The new state, and what happened.
    """
    return _round(target, drafter, params, requests, state, acceptance=acceptance)


def _round(
    target: Target,
    drafter: Drafter,
    params: Params,
    requests: Requests,
    state: DecodeState,
    *,
    acceptance: AcceptanceRule,
) -> tuple[DecodeState, Round]:
    root_positions = state.lengths - 1

    # Draft: a tree of likely continuations of the root, under this round's noise.
    draws = round_draws(
        requests,
        root_positions,
        acceptance=acceptance,
        depth=drafter.depth,
        vocab_size=vocab_size(target, params.target, state),
    )
    tree, drafter_state = drafter.propose(
        params.drafter, state.drafter_state, state.root, draws
    )

    # Verify: one call of the target over all nodes, beside its cache.
    flat = jax.vmap(flatten)(tree, root_positions)
    output = target.forward(
        params.target, flat.tokens, flat.positions, flat.mask, state.target_cache
    )
    logits = target.unembed(params.target, output.hidden)

    # Accept: the path that the target's own text follows.
    accepted = accept(
        requests,
        tree,
        logits,
        root_positions,
        draws.noise,
        rule=acceptance,
        depth=drafter.depth,
    )

    # Commit: the text grows, and what it ends with becomes the next root.
    was_running = state.is_running
    state = dataclasses.replace(state, drafter_state=drafter_state)
    state = commit(target, drafter, params, requests, state, tree, output, accepted)
    return state, Round(tree=tree, acceptance=accepted, was_running=was_running)


def round_draws(
    requests: Requests,
    root_positions: jax.Array,
    *,
    acceptance: AcceptanceRule,
    depth: int,
    vocab_size: int,
) -> Draws:
    """Returns how the tokens of the next round will be drawn.

    The noise is made once per round, for drafting and verification alike: the nodes of
    one depth share a position, so `P` rows serve a tree of any size.

    Args:
        requests: `B` rows.
        root_positions: `[B]` int32, absolute.
        acceptance: Static; without "coupled" there is no noise to share.
        depth: `D`. Static.
        vocab_size: `V`. Static.
    """
    noise = None
    if acceptance == "coupled":
        positions = root_positions[:, None] + jnp.arange(1, depth + 2)
        noise = position_noise(requests.keys, positions, requests.sampling, vocab_size)
    return Draws(
        sampling=requests.sampling,
        noise=noise,
        keys=drafting_keys(requests.keys, root_positions),
    )


def vocab_size(target: Target, params: Any, state: DecodeState) -> int:
    """Returns `V` before the target runs; nothing is computed.

    Args:
        target: Static.
        params: The target's.
        state: Between rounds.
    """

    def logits_of(params: Any, state: DecodeState) -> jax.Array:
        tokens, positions = state.root[:, None], (state.lengths - 1)[:, None]
        output = target.forward(params, tokens, positions, None, state.target_cache)
        return target.unembed(params, output.hidden)

    return jax.eval_shape(logits_of, params, state).shape[-1]


def accept(
    requests: Requests,
    tree: DraftTree,
    logits: jax.Array,
    root_positions: jax.Array,
    noise: jax.Array | None,
    *,
    rule: AcceptanceRule,
    depth: int,
) -> Acceptance:
    """Finds the accepted path of every row.

    Args:
        requests: `B` rows.
        tree: `[B, N]` fields.
        logits: `[B, N, V]` float32, the target's behind each node.
        root_positions: `[B]` int32, absolute.
        noise: `[B, P, V]` float32 for "coupled", see `Draws.noise`; else unused.
        rule: Static.
        depth: `D`. Static.

    Returns:
        `[B, P]` paths, `[B]` counts and next tokens.
    """
    any_filter = requests.sampling.any_filter

    def accept_row(
        row: Requests,
        tree: DraftTree,
        logits: jax.Array,
        root_position: jax.Array,
        noise: jax.Array | None,
    ) -> Acceptance:
        def follow_argmax(node: jax.Array, level: jax.Array) -> Step:
            del level
            return match_child(tree, node, jnp.argmax(logits[node]).astype(jnp.int32))

        if rule == "greedy":
            return verify(tree, follow_argmax, depth=depth)
        if rule == "coupled":
            if noise is None:
                raise ValueError("coupled acceptance needs the noise of round_draws")

            def follow_draw(node: jax.Array, level: jax.Array) -> Step:
                token = draw_tokens(
                    logits[node], noise[level], row.sampling, any_filter
                )
                return match_child(tree, node, token)

            return verify(tree, follow_draw, depth=depth)
        if rule != "rejection":
            raise ValueError(f"{rule!r} is no acceptance rule; see AcceptanceRule")

        coins, last_noise = rejection_noise(row.keys, root_position, *logits.shape)

        def try_children(node: jax.Array, level: jax.Array) -> Step:
            del level
            law = distribution(logits[node], row.sampling, any_filter)
            if tree.draft_logits is None:
                return reject_siblings(tree, node, law, coins, last_noise)
            return reject_drawn_siblings(tree, node, law, coins, last_noise)

        return verify(tree, try_children, depth=depth)

    return jax.vmap(accept_row)(requests, tree, logits, root_positions, noise)


def commit(
    target: Target,
    drafter: Drafter,
    params: Params,
    requests: Requests,
    state: DecodeState,
    tree: DraftTree,
    output: TargetOutput,
    accepted: Acceptance,
) -> DecodeState:
    """Appends the accepted paths to the texts, the cache and the drafter's state.

    Args:
        target: Static.
        drafter: Static.
        params: Of both.
        requests: The limits; rows that are finished commit nothing.
        state: Of before the round, but with the drafter's state of `propose`.
        tree: `[B, N]` fields.
        output: The target's, of the verification.
        accepted: `[B, P]` paths.

    Returns:
        The state for the next round.
    """
    tokens = accepted_tokens(tree, accepted)
    state = record_round(state, accepted.num_accepted)
    state, count = emit(requests, state, tokens[:, 1:], accepted.num_accepted + 1)
    path_features = jnp.take_along_axis(
        output.features, accepted.path[..., None], axis=1
    )
    return dataclasses.replace(
        state,
        target_cache=target.commit(
            state.target_cache, output.entries, accepted.path, count
        ),
        drafter_state=drafter.advance(
            params.drafter, state.drafter_state, tokens[:, :-1], path_features, count
        ),
    )


def accepted_tokens(tree: DraftTree, accepted: Acceptance) -> jax.Array:
    """Returns the root, the accepted drafts and the next token, in this order.

    Args:
        tree: `[B, N]` fields.
        accepted: `[B, P]` paths.

    Returns:
        `[B, P + 1]` int32; entries behind the next token mean nothing.
    """
    path_tokens = jnp.take_along_axis(tree.tokens, accepted.path, axis=1)
    shape = (path_tokens.shape[0], path_tokens.shape[1] + 1)
    is_next = jnp.arange(shape[1]) == accepted.num_accepted[:, None] + 1
    padded = jnp.pad(path_tokens, [(0, 0), (0, 1)])
    return jnp.where(is_next, accepted.next_token[:, None], padded)
