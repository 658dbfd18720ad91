"""Plain decoding, one token per pass: the baseline, and the judge of every method.

It reads a decoder's target and whether the decoder is greedy, and the target's
parameters alone: the decoder that is judged can be its own judge.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from eagle_jax.decoding import chunked_prefill
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.growth import advance_until, generate_growing
from eagle_jax.decoding.requests import Requests
from eagle_jax.decoding.state import DecodeState, record_round
from eagle_jax.interface import Params


def generate(
    decoder: Decoder,
    params: Params,
    requests: Requests,
    *,
    num_slots: int | None = None,
    num_samples: int = 1,
) -> DecodeState:
    """Decodes every request to its end, token by token.

    Arguments, results and errors are those of `speculative.generate`; the drafter and
    its parameters are not used.
    """
    plain = dataclasses.replace(decoder, drafter=None)
    return generate_growing(
        plain, params, requests, decode, num_slots=num_slots, num_samples=num_samples
    )


def prefill(
    decoder: Decoder,
    params: Params,
    requests: Requests,
    *,
    num_slots: int,
    num_samples: int = 1,
) -> DecodeState:
    """Reads the prompts and emits the first tokens; arguments as for `generate`."""
    plain = dataclasses.replace(decoder, drafter=None)
    return chunked_prefill.prefill(
        plain, params, requests, num_slots=num_slots, num_samples=num_samples
    )


@functools.partial(jax.jit, static_argnames=("decoder",), donate_argnames=("state",))
def decode(decoder: Decoder, params: Params, state: DecodeState) -> DecodeState:
    """Runs steps as one program; the state is donated.

    The loop ends when every row has, or when one needs a larger cache: see `growth`.
    """
    advance = functools.partial(step, decoder, params)
    return advance_until(advance, state, None, depth=0)


def step(decoder: Decoder, params: Params, state: DecodeState) -> DecodeState:
    """Emits one token per running row: a round without a tree."""
    target, cache = decoder.target, state.target_cache
    tokens, positions = state.root[:, None], (state.lengths - 1)[:, None]
    output = target.forward(params.target, tokens, positions, None, cache)
    raw = target.unembed(params.target, output.hidden[:, 0])
    state = record_round(state, jnp.zeros_like(state.lengths))
    state, taken = chunked_prefill.emit_next(decoder, params, state, raw)
    cache = target.commit(cache, output.entries, jnp.zeros_like(positions), taken)
    return dataclasses.replace(state, target_cache=cache)
