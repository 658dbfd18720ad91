"""What decoding is timed with: whole loops, their parts in loops of their own.

Every figure comes from a compiled loop with a carried dependence; the programs are run
in turn, over and over, so that differences compare neighbours in time.
"""

import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from eagle_jax.decoding import autoregressive, speculative
from eagle_jax.decoding.requests import Requests
from eagle_jax.decoding.speculative import AcceptanceRule
from eagle_jax.decoding.state import DecodeState
from eagle_jax.interface import Drafter, Params, Target

Body = Callable[[Any, jax.Array], jax.Array]
"""From parameters with a state, and roots `[B]`, to a `witness` of what was done."""

Name = TypeVar("Name", bound=Hashable)


def medians(
    programs: Mapping[Name, Callable[[], float]],
    repeats: int,
    report: Callable[[int], None] = lambda done: None,
) -> dict[Name, float]:
    """Runs all programs in turn, over and over.

    Args:
        programs: Each returns a time in seconds.
        repeats: Measurements per program; one before them compiles it.
        report: Called with the number of programs compiled so far.

    Returns:
        The median time of each, in seconds.
    """
    for number, program in enumerate(programs.values(), 1):
        program()  # Compiles, and touches all memory once.
        report(number)
    times: dict[Name, list[float]] = {name: [] for name in programs}
    for _ in range(repeats):
        for name, program in programs.items():
            times[name].append(program())
    return {name: statistics.median(values) for name, values in times.items()}


def time_tokens(
    target: Target, params: Params, requests: Requests, num_slots: int, greedy: bool
) -> Callable[[], float]:
    """Returns what times a step of plain decoding, seconds."""

    def run() -> float:
        state = autoregressive.prefill(
            target, params.target, requests, num_slots=num_slots, greedy=greedy
        )
        jax.block_until_ready(state)
        started = time.perf_counter()
        state = autoregressive.decode(
            target, params.target, requests, state, greedy=greedy
        )
        jax.block_until_ready(state)
        return (time.perf_counter() - started) / max(int(state.num_rounds.max()), 1)

    return run


def time_rounds(
    target: Target,
    drafter: Drafter,
    params: Params,
    requests: Requests,
    num_slots: int,
    acceptance: AcceptanceRule,
) -> Callable[[], float]:
    """Returns what times a whole round, seconds."""
    settings = (target, drafter, params, requests)

    def run() -> float:
        state = speculative.prefill(
            *settings, num_slots=num_slots, acceptance=acceptance
        )
        jax.block_until_ready(state)
        started = time.perf_counter()
        state = speculative.decode(*settings, state, acceptance=acceptance)
        jax.block_until_ready(state)
        return (time.perf_counter() - started) / max(int(state.num_rounds.max()), 1)

    return run


def verify_body(target: Target, num_nodes: int) -> Body:
    """The target's call of a round; what the mask shows does not change its cost."""

    def body(inputs: tuple[Any, DecodeState], root: jax.Array) -> jax.Array:
        params, state = inputs
        tokens = jnp.broadcast_to(root[:, None], (root.shape[0], num_nodes))
        positions = jnp.broadcast_to((state.lengths - 1)[:, None], tokens.shape)
        visible = jnp.tri(num_nodes, dtype=bool)
        mask = jnp.broadcast_to(visible, (root.shape[0], *visible.shape))
        output = target.forward(params, tokens, positions, mask, state.target_cache)
        return witness(target.unembed(params, output.hidden), output)

    return body


def draft_body(
    drafter: Drafter, requests: Requests, acceptance: AcceptanceRule, vocab_size: int
) -> Body:
    """The drafting of a round, with its noise and its cache update."""

    def body(inputs: tuple[Any, DecodeState], root: jax.Array) -> jax.Array:
        params, state = inputs
        # No token is below zero, but the compiler cannot know: the noise must wait.
        root_positions = state.lengths - 1 + (root < 0)
        draws = speculative.round_draws(
            requests,
            root_positions,
            acceptance=acceptance,
            depth=drafter.depth,
            vocab_size=vocab_size,
        )
        return witness(drafter.propose(params, state.drafter_state, root, draws))

    return body


def time_loop(
    body: Body, inputs: tuple[Any, DecodeState], iterations: int
) -> Callable[[], float]:
    """Returns what times one call of `body`, seconds."""

    @jax.jit
    def loop(inputs: tuple[Any, DecodeState]) -> jax.Array:
        def step(_: jax.Array, root: jax.Array) -> jax.Array:
            # Never true, but the compiler cannot know: the next call must wait.
            is_huge = body(inputs, root) > 1e30
            return jnp.where(is_huge, root + 1, root)

        return jax.lax.fori_loop(0, iterations, step, inputs[1].root)

    def run() -> float:
        started = time.perf_counter()
        jax.block_until_ready(loop(inputs))
        return (time.perf_counter() - started) / iterations

    return run


def witness(*results: Any) -> jax.Array:
    """Returns one number that needs every result in full."""
    leaves = jax.lax.optimization_barrier(jax.tree.leaves(results))
    return sum((x.reshape(-1)[0].astype(jnp.float32) for x in leaves), jnp.zeros(()))
