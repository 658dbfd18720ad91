"""Checks of what `slots` is called with, as far as it is concrete."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.core

from eagle_jax.config import require
from eagle_jax.decoding.chunked_prefill import PrefillState
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.growth import has_room
from eagle_jax.decoding.requests import Requests
from eagle_jax.decoding.state import DecodeState
from eagle_jax.errors import InputError
from eagle_jax.interface import Params


class _Checked:
    """A function under `jax.jit` whose concrete arguments are checked at each call."""

    def __init__(self, jitted: Any, check: Callable[..., None]) -> None:
        functools.update_wrapper(self, jitted)
        self._check = check

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self._check(*arguments, **named)
        return self.__wrapped__(*arguments, **named)

    def __getattr__(self, name: str) -> Any:
        """Returns what `jax.jit` gives a function, as `lower`."""
        return getattr(self.__wrapped__, name)


def checked_by(check: Callable[..., None]) -> Callable[[Any], Any]:
    """Returns a decorator: `check` is called first, with the same arguments."""
    return functools.partial(_Checked, check=check)


def check_prompts(
    decoder: Decoder, params: Params, requests: Requests, **static: int
) -> None:
    """Raises if the decoder would decode in another way than it was asked to."""
    decoder.check(params, requests)


def check_read(
    decoder: Decoder, params: Params, prefix: PrefillState, **static: int
) -> None:
    """Raises if a part of the prompts is unread, or was read twice."""
    if isinstance(prefix.num_read, jax.core.Tracer):
        return
    requests, num_read = prefix.requests, int(prefix.num_read[0])
    longest = int(requests.prompt_lengths.max())
    if not longest <= num_read <= requests.prompts.shape[1]:
        raise InputError(
            f"{num_read} tokens were read of a prompt of {longest}; call "
            "`prefill_chunk` as often as `num_chunks` says, then `finish_prefill`"
        )


def check_slot(
    prefix: DecodeState,
    state: DecodeState,
    slot: jax.Array | int,
    row: jax.Array | int = 0,
) -> None:
    """Raises if a prefix cannot enter a state, or one of them has no such row."""
    check_row(state, slot)
    check_row(prefix, row, "row")
    one, other = (
        jax.tree.flatten(jax.tree.map(lambda leaf: f"{leaf.dtype}{leaf.shape[1:]}", x))
        for x in (prefix, state)
    )
    if one != other:
        raise InputError(
            "the prefix does not fit into the state; make both with the same decoder, "
            "num_slots, number of stop tokens and processor_room"
        )


def check_row(state: DecodeState, slot: jax.Array | int, name: str = "slot") -> None:
    """Raises if a row lies beyond the last: a write would clamp, or be dropped."""
    last = len(state.stop_reason) - 1
    if not isinstance(slot, jax.core.Tracer) and not 0 <= int(slot) <= last:
        raise InputError(f"{name} = {slot} is no row; the state has rows 0 to {last}")


def check_rounds(
    decoder: Decoder, params: Params, state: DecodeState, *, rounds: int = 16
) -> None:
    """Raises if a call could run no round, and would do so for ever."""
    require(rounds >= 1, "rounds", rounds, "at least 1")
    if isinstance(state.lengths, jax.core.Tracer):
        return
    if not has_room(state, decoder.depth):
        raise InputError(
            f"a running row has no room for a round in its {state.tokens.shape[1]} "
            "slots; give the state more with `growth.grow`, or begin with "
            "`round_up_slots` of the longest text"
        )
