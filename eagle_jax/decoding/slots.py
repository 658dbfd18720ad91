"""Slots for serving loops: rows of a running batch that texts enter and leave.

The verbs are those of JetStream's engines: `prefill` reads a prompt, `insert` puts it
into a row, `generate` runs rounds, `free` gives a row back. A serving loop keeps one
state and asks for one small `Result` per call; a text depends on neither its row nor
its neighbours. Arguments that are traced, inside your own `jax.jit`, are not checked.

>>> from eagle_jax import Decoder, LookupDrafter, Params, make_requests
>>> from eagle_jax.testing import ToyTarget
>>> decoder = Decoder(target=ToyTarget(), drafter=LookupDrafter())
>>> params = Params(target=())
>>> state = init_decode_state(decoder, params, batch=2, num_slots=64)
>>> requests = make_requests([[1, 2, 3]], max_new_tokens=9)
>>> prefix, first = prefill(decoder, params, requests, num_slots=64)
>>> state = insert(prefix, state, slot=1)
>>> state, result = generate(decoder, params, state, rounds=8)
>>> result.counts.tolist(), result.is_finished.tolist()
([0, 8], [True, True])
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import struct

from eagle_jax.decoding import chunked_prefill, speculative
from eagle_jax.decoding.checks import (
    check_prompts,
    check_read,
    check_rounds,
    check_row,
    check_slot,
    checked_by,
)
from eagle_jax.decoding.chunked_prefill import PrefillState
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.growth import Limits
from eagle_jax.decoding.logprobs import Logprobs, no_logprobs
from eagle_jax.decoding.requests import Requests, make_requests
from eagle_jax.decoding.state import DecodeState, StopReason, begin_state
from eagle_jax.decoding.windows import read_window
from eagle_jax.interface import Params
from eagle_jax.interface.prefill import chunk_size
from eagle_jax.processors import ProcessorConfig


@struct.dataclass(kw_only=True)
class Result:
    """What one call added to the texts: all that leaves the device.

    Attributes:
        tokens: `[B, n * P]` int32, the new tokens of each row; 0 after `counts`. After
            a prefill `[B, 1]`, the first tokens.
        counts: `[B]` int32, new tokens per row.
        accept_lengths: `[B, n]` int32, the drafted tokens that each round accepted,
            uncut by limits; 0 after `num_rounds`.
        num_rounds: `[B]` int32, rounds of this call in which the row was running.
        stop_reason: `[B]` int32, each row's `StopReason` after the call.
        logprobs: Those of `tokens`, undefined after `counts`; `None` unless the decoder
            was asked for them.
    """

    tokens: jax.Array
    counts: jax.Array
    accept_lengths: jax.Array
    num_rounds: jax.Array
    stop_reason: jax.Array
    logprobs: Logprobs | None = None

    @property
    def is_finished(self) -> jax.Array:
        """`[B]` bool, true in rows that hold no text, or one that has ended."""
        return self.stop_reason != StopReason.RUNNING


def init_decode_state(
    decoder: Decoder,
    params: Params,
    *,
    batch: int,
    num_slots: int,
    num_stop_tokens: int = 1,
    processor_room: ProcessorConfig | None = None,
) -> DecodeState:
    """Returns a state in which every row is free.

    Args:
        decoder: The decoder.
        params: The parameters, of which a constraint's are read.
        batch: The number of rows, `B`.
        num_slots: The number of cache slots per row, `S`: `round_up_slots` of the
            longest text.
        num_stop_tokens: The stop tokens of a request at most.
        processor_room: The processors that requests may ask for, see `make_requests`.
    """
    requests = make_requests(
        [[0]] * batch,
        max_new_tokens=1,
        stop_tokens=range(num_stop_tokens),
        processor_room=processor_room,
    )
    return begin_state(
        requests.settings(),
        jnp.zeros((batch, num_slots), jnp.int32),
        StopReason.FREE,
        target_cache=decoder.target.init_cache(batch, num_slots),
        drafter_state=decoder.drafting.init_state(batch, num_slots),
        constraint_state=decoder.init_constraint(params, batch),
        logprobs=no_logprobs(decoder.logprobs, batch, num_slots),
    )


@checked_by(check_prompts)
@functools.partial(jax.jit, static_argnames=("decoder", "num_slots", "num_samples"))
def prefill(
    decoder: Decoder,
    params: Params,
    requests: Requests,
    *,
    num_slots: int,
    num_samples: int = 1,
) -> tuple[DecodeState, Result]:
    """Reads prompts as a whole and emits the first token of each.

    Args:
        decoder: The decoder. Static.
        params: The parameters of target and drafter.
        requests: The requests: one, or a few.
        num_slots: The number of cache slots, `S`, of the state that they will enter.
            Static.
        num_samples: The number of neighbours that have one prompt, which is read once.
            Static.

    Returns:
        A state of their own, for `insert`, and the first tokens.

    Raises:
        InputError: If the padded prompts are longer than a row's slots, or a
            temperature above 0 meets a greedy decoder.
    """
    state = chunked_prefill.prefill(
        decoder, params, requests, num_slots=num_slots, num_samples=num_samples
    )
    return state, _first_tokens(requests, state)


def num_chunks(requests: Requests) -> int:
    """Returns how often `prefill_chunk` must be called for these concrete requests."""
    longest = int(requests.prompt_lengths.max())
    return -(-longest // chunk_size(requests.prompts.shape[1]))


start_prefill = checked_by(check_prompts)(
    jax.jit(chunked_prefill.start_prefill, static_argnames=("decoder", "num_slots"))
)
reuse_prefill = chunked_prefill.reuse_prefill
prefill_chunk = chunked_prefill.prefill_chunk


@checked_by(check_read)
@functools.partial(jax.jit, static_argnames=("decoder", "num_slots"))
def finish_prefill(
    decoder: Decoder, params: Params, prefix: PrefillState, *, num_slots: int
) -> tuple[DecodeState, Result]:
    """Emits the first tokens of prompts that were read; returns what `prefill` does.

    Raises:
        InputError: If they were not read to their end, or beyond it.
    """
    state = chunked_prefill.finish_prefill(decoder, params, prefix, num_slots=num_slots)
    return state, _first_tokens(prefix.requests, state)


@checked_by(check_slot)
@functools.partial(jax.jit, donate_argnames=("state",))
def insert(
    prefix: DecodeState,
    state: DecodeState,
    slot: jax.Array | int,
    row: jax.Array | int = 0,
) -> DecodeState:
    """Puts a text that was read into a row of the running batch.

    Args:
        prefix: The state that `prefill` returned.
        state: The running state, which is donated; what the row held is gone.
        slot: `[]` int32, the row, in `0 .. B - 1`.
        row: `[]` int32, the row of the prefix, where it has several.

    Raises:
        InputError: If the two states differ in more than their rows, or have no such
            row.
    """

    def write(rows: jax.Array, read: jax.Array) -> jax.Array:
        one = jax.lax.dynamic_slice_in_dim(read, row, 1, axis=0)
        return jax.lax.dynamic_update_slice_in_dim(rows, one, slot, axis=0)

    return jax.tree.map(write, state, prefix)


@checked_by(check_rounds)
@functools.partial(
    jax.jit, static_argnames=("decoder", "rounds"), donate_argnames=("state",)
)
def generate(
    decoder: Decoder, params: Params, state: DecodeState, *, rounds: int = 16
) -> tuple[DecodeState, Result]:
    """Runs 1 to `rounds` rounds as one program, until a text ends.

    It also returns before a row outgrows its cache: `growth.grow` gives more room, in
    the same state.

    Args:
        decoder: The decoder; without a drafter, each round is a step. Static.
        params: The parameters of target and drafter.
        state: The running state, which is donated; free rows stay as they are.
        rounds: The most rounds, `n`. Static.

    Returns:
        The new state, and what the rounds added.

    Raises:
        InputError: If a running row has no room for a round, or there are no rounds.
    """
    before, rounds_before = state.lengths, state.num_rounds
    state = speculative.decode_until(decoder, params, state, Limits(rounds, 0))
    width = rounds * (decoder.depth + 1)
    return state, _added(state, before, rounds_before, width, rounds)


@checked_by(check_row)
@functools.partial(jax.jit, donate_argnames=("state",))
def free(state: DecodeState, slot: jax.Array | int) -> DecodeState:
    """Ends the text of a row, whose reader went away; the state is donated.

    Raises:
        InputError: If there is no such row.
    """
    reasons = state.stop_reason.at[slot].set(StopReason.FREE)
    return dataclasses.replace(state, stop_reason=reasons)


def _first_tokens(requests: Requests, state: DecodeState) -> Result:
    return _added(state, requests.prompt_lengths, state.num_rounds, 1, 0)


def _added(
    state: DecodeState,
    lengths: jax.Array,
    num_rounds: jax.Array,
    width: int,
    rounds: int,
) -> Result:
    """Returns what a state holds beyond these lengths and numbers of rounds, `[B]`.

    After a text, and after its rounds, a state holds 0.
    """
    return Result(
        tokens=read_window(state.tokens, lengths, width),
        counts=state.lengths - lengths,
        accept_lengths=read_window(state.accept_lengths, num_rounds, rounds),
        num_rounds=state.num_rounds - num_rounds,
        stop_reason=state.stop_reason,
        logprobs=jax.tree.map(
            lambda leaf: read_window(leaf, lengths, width), state.logprobs
        ),
    )
