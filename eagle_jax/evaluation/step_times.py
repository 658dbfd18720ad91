"""What the steps of decoding cost, in one shape: for models of speed-ups."""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from eagle_jax.decoding import autoregressive, speculative
from eagle_jax.decoding.requests import Requests, round_up_slots
from eagle_jax.decoding.sampling import draft_sampling
from eagle_jax.decoding.speculative import AcceptanceRule
from eagle_jax.decoding.state import DecodeState
from eagle_jax.interface import Drafter, Params, Target
from eagle_jax.tree import DraftTree

StepSeconds = dict[str, float | None]

_ITERATIONS = 8


def measure_steps(
    target: Target,
    drafter: Drafter | None,
    params: Params,
    requests: Requests,
    *,
    max_length: int,
    acceptance: AcceptanceRule,
    repeats: int = 5,
) -> StepSeconds:
    """Times the steps of a batch: medians over repeats, compilation left out.

    A round and a token are timed as the loops that decode texts run them; a round's
    parts in loops of their own, right behind the prompts.

    Args:
        target: Static.
        drafter: Static; `None` where nothing is drafted.
        params: Of both.
        requests: `B` rows, which shall not stop early.
        max_length: Prompt plus output, as in the texts that are timed.
        acceptance: Static.
        repeats: Measurements per figure.

    Returns:
        Seconds per step of the whole batch: "token" of plain decoding, "draft" and
        "verify" of a round, and "commit", which is what else a round takes. `None`
        for what does not exist: rounds without a drafter or for texts of one token.
    """
    longest = max(max_length, requests.prompts.shape[1])
    greedy = acceptance == "greedy"

    def start_plainly() -> DecodeState:
        return autoregressive.prefill(
            target,
            params.target,
            requests,
            num_slots=round_up_slots(longest, depth=0),
            greedy=greedy,
        )

    def decode_plainly(state: DecodeState) -> DecodeState:
        return autoregressive.decode(
            target, params.target, requests, state, greedy=greedy
        )

    programs: dict[str, Callable[[], float | None]] = {
        "token": lambda: _seconds_per_step(start_plainly, decode_plainly)
    }
    if drafter is None:
        return _parts(_medians(programs, repeats))

    def start() -> DecodeState:
        return speculative.prefill(
            target,
            drafter,
            params,
            requests,
            num_slots=round_up_slots(longest, depth=drafter.depth),
            acceptance=acceptance,
        )

    def decode(state: DecodeState) -> DecodeState:
        return speculative.decode(
            target, drafter, params, requests, state, acceptance=acceptance
        )

    state = start()
    tree, _ = jax.eval_shape(
        functools.partial(_propose, drafter), params, requests, state, state.root
    )
    num_nodes = tree.tokens.shape[1]

    def draft() -> jax.Array:
        return _draft_over_and_over(drafter, params, requests, state)

    def verify() -> jax.Array:
        text = (state.root, state.lengths, state.target_cache)
        return _verify_over_and_over(target, num_nodes, params.target, *text)

    programs["round"] = lambda: _seconds_per_step(start, decode)
    programs["draft"] = lambda: _seconds(draft)
    programs["verify"] = lambda: _seconds(verify)
    return _parts(_medians(programs, repeats))


def _parts(seconds: dict[str, float | None]) -> StepSeconds:
    """Returns what steps cost, the rest of a round as "commit"."""
    whole, token = seconds.get("round"), seconds["token"]
    draft, verify = seconds.get("draft"), seconds.get("verify")
    if whole is None or draft is None or verify is None:
        return {"draft": None, "verify": None, "commit": None, "token": token}
    rest = max(whole - draft - verify, 0.0)
    return {"draft": draft, "verify": verify, "commit": rest, "token": token}


def _medians(
    programs: dict[str, Callable[[], float | None]], repeats: int
) -> dict[str, float | None]:
    """Runs programs in turn, so that differences compare neighbours in time."""
    times: dict[str, list[float]] = {name: [] for name in programs}
    for repeat in range(1 + repeats):
        for name, program in programs.items():
            seconds = program()
            if repeat and seconds is not None:  # The first one compiles.
                times[name].append(seconds)
    return {
        name: statistics.median(values) if values else None
        for name, values in times.items()
    }


def _seconds_per_step(
    start: Callable[[], DecodeState], decode: Callable[[DecodeState], DecodeState]
) -> float | None:
    """Times a decoding loop, which takes its state for itself; `None` without steps."""
    state = jax.block_until_ready(start())
    started = time.perf_counter()
    state = jax.block_until_ready(decode(state))
    seconds = time.perf_counter() - started
    steps = int(state.num_rounds.max())
    return seconds / steps if steps else None


def _seconds(program: Callable[[], Any]) -> float:
    """Times one of the calls that a program makes in a row."""
    started = time.perf_counter()
    jax.block_until_ready(program())
    return (time.perf_counter() - started) / _ITERATIONS


def _propose(
    drafter: Drafter,
    params: Params,
    requests: Requests,
    state: DecodeState,
    root: jax.Array,
) -> tuple[DraftTree, Any]:
    sampling = draft_sampling(requests, state.lengths - 1)
    return drafter.propose(params.drafter, state.drafter_state, root, sampling)


@functools.partial(jax.jit, static_argnums=0)
def _draft_over_and_over(
    drafter: Drafter, params: Params, requests: Requests, state: DecodeState
) -> jax.Array:
    """Drafts the same trees in a row, with the drafter's cache updates."""

    def step(_: jax.Array, shift: jax.Array) -> jax.Array:
        return _nothing(_propose(drafter, params, requests, state, state.root + shift))

    return jax.lax.fori_loop(0, _ITERATIONS, step, jnp.zeros((), jnp.int32))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _verify_over_and_over(
    target: Target,
    num_nodes: int,
    params: Any,
    root: jax.Array,
    lengths: jax.Array,
    cache: Any,
) -> jax.Array:
    """Runs the target over as many nodes in a row, logits included.

    What a mask shows does not change the cost, so that of a chain stands for all.
    """
    shape = (root.shape[0], num_nodes)
    positions = jnp.broadcast_to((lengths - 1)[:, None], shape)
    mask = jnp.broadcast_to(jnp.tri(num_nodes, dtype=bool), (*shape, num_nodes))

    def step(_: jax.Array, shift: jax.Array) -> jax.Array:
        tokens = jnp.broadcast_to((root + shift)[:, None], shape)
        output = target.forward(params, tokens, positions, mask, cache)
        return _nothing((target.unembed(params, output.hidden), output))

    return jax.lax.fori_loop(0, _ITERATIONS, step, jnp.zeros((), jnp.int32))


def _nothing(results: Any) -> jax.Array:
    """Returns a 0 that needs every result in full, which the compiler cannot know."""
    total = jnp.zeros(())
    for leaf in jax.lax.optimization_barrier(jax.tree.leaves(results)):
        total += leaf.reshape(-1)[0].astype(jnp.float32)
    return (total > 1e30).astype(jnp.int32)
