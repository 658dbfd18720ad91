"""What the programs of a batch do to its rows, besides decoding.

Each is a function of a decoder, of its parameters, of rows and of what every device has
whole, as `Programs.call` runs them.
"""

import inspect
from typing import Any

import jax

from eagle_jax.decoding import chunked_prefill, growth, slots
from eagle_jax.decoding.chunked_prefill import PrefillState
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.requests import Requests
from eagle_jax.decoding.state import DecodeState

CACHES = "target_cache", "drafter_state"
"""What the state of a prompt that was read holds as the state of its text does."""


def start(
    decoder: Decoder,
    params: Any,
    requests: Requests,
    *,
    num_slots: int,
    num_samples: int,
) -> PrefillState:
    """Begins to read prompts of which `num_samples` neighbours have one."""
    firsts = jax.tree.map(lambda leaf: leaf[::num_samples], requests)
    return chunked_prefill.start_prefill(
        decoder, params, firsts, num_slots=num_slots, size=1
    )


def finish(
    decoder: Decoder,
    params: Any,
    rows: tuple[PrefillState, Requests],
    *,
    num_slots: int,
) -> DecodeState:
    """Emits the first tokens of requests, of which neighbours may share a prompt."""
    prefix = chunked_prefill.share_prefill(*rows)
    return chunked_prefill.finish_prefill(decoder, params, prefix, num_slots=num_slots)


def insert(
    decoder: Decoder, params: Any, state: DecodeState, begun: DecodeState, *places: Any
) -> DecodeState:
    """See `slots.insert`."""
    del decoder, params
    return inspect.unwrap(slots.insert)(begun, state, *places)


def take_rows(decoder: Decoder, params: Any, state: Any, rows: jax.Array) -> Any:
    """Returns a copy of some rows of a state."""
    del decoder, params
    return jax.tree.map(lambda leaf: leaf[rows], state)


def put_rows(
    decoder: Decoder, params: Any, state: Any, others: Any, rows: jax.Array
) -> Any:
    """Returns a state with others in the place of some rows."""
    del decoder, params
    return jax.tree.map(lambda leaf, new: leaf.at[rows].set(new), state, others)


def grow(
    decoder: Decoder, params: Any, state: DecodeState, *, num_slots: int
) -> DecodeState:
    """See `growth.grow`."""
    del params
    return growth.grow(decoder, state, num_slots=num_slots)
