"""Plain decoding, one token per pass: the baseline, and the judge of every method."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from eagle_jax.decoding.growth import (
    cache_sizes,
    decode_growing,
    grow,
    has_room,
)
from eagle_jax.decoding.requests import Requests
from eagle_jax.decoding.state import DecodeState, emit, record_round, start
from eagle_jax.interface import Target
from eagle_jax.sampling import choose_tokens


def generate(
    target: Target,
    params: Any,
    requests: Requests,
    *,
    greedy: bool,
    num_slots: int | None = None,
) -> DecodeState:
    """Decodes every request to its end.

    Args:
        target: Static.
        params: The target's.
        requests: `B` rows, concrete.
        greedy: Take the likeliest tokens and compile no sampling. Static.
        num_slots: `S`; `None` for a cache that grows with the texts, up to what the
            requests need. Static.

    Returns:
        The final state: `tokens`, `lengths` and `stop_reason` are the answer.

    Raises:
        InputError: If `num_slots` is too small for the requests.
    """
    sizes = cache_sizes(requests, num_slots, depth=0)
    state = prefill(target, params, requests, num_slots=sizes[0], greedy=greedy)
    limits = requests.without_prompts()
    return decode_growing(
        state,
        sizes,
        lambda state: decode(target, params, limits, state, greedy=greedy),
        lambda state, size: grow(target, None, state, num_slots=size),
    )


@functools.partial(jax.jit, static_argnames=("target", "num_slots", "greedy"))
def prefill(
    target: Target, params: Any, requests: Requests, *, num_slots: int, greedy: bool
) -> DecodeState:
    """Reads the prompts and emits the first tokens; arguments as for `generate`."""
    state, _ = start(target, params, requests, num_slots=num_slots, greedy=greedy)
    return state


@functools.partial(
    jax.jit, static_argnames=("target", "greedy"), donate_argnames=("state",)
)
def decode(
    target: Target, params: Any, requests: Requests, state: DecodeState, *, greedy: bool
) -> DecodeState:
    """Runs steps as one program; the state is donated.

    It ends when every row has, or when one needs a larger cache: see `growth`.
    """
    return jax.lax.while_loop(
        lambda state: state.is_running.any() & has_room(state, depth=0),
        lambda state: _step(target, params, requests, state, greedy=greedy),
        state,
    )


@functools.partial(
    jax.jit, static_argnames=("target", "greedy"), donate_argnames=("state",)
)
def decode_step(
    target: Target, params: Any, requests: Requests, state: DecodeState, *, greedy: bool
) -> DecodeState:
    """Emits one token per running row, for streaming; the state is donated."""
    return _step(target, params, requests, state, greedy=greedy)


def _step(
    target: Target, params: Any, requests: Requests, state: DecodeState, *, greedy: bool
) -> DecodeState:
    positions = (state.lengths - 1)[:, None]
    output = target.forward(
        params, state.root[:, None], positions, None, state.target_cache
    )
    logits = target.unembed(params, output.hidden[:, 0])
    chosen = choose_tokens(
        requests.sampling, requests.keys, logits, state.lengths, greedy=greedy
    )

    state = record_round(state, jnp.zeros_like(state.lengths))
    state, taken = emit(requests, state, chosen[:, None], jnp.ones_like(chosen))
    cache = target.commit(
        state.target_cache, output.entries, jnp.zeros_like(positions), taken
    )
    return dataclasses.replace(state, target_cache=cache)
