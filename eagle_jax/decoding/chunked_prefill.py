"""Chunked prefill: target and drafter read prompts together, a chunk at a time."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from eagle_jax.constraints import constrain
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.requests import Requests
from eagle_jax.decoding.state import DecodeState, StopReason, emit
from eagle_jax.errors import InputError
from eagle_jax.interface import Cache, Params, PromptChunk
from eagle_jax.prefill import chunk_size, read_chunk
from eagle_jax.protocols import check, check_batch, check_logits, check_output
from eagle_jax.sampling import choose_tokens


@struct.dataclass(kw_only=True)
class PrefillState:
    """Prompts of which some chunks are read; every leaf has the batch first.

    Attributes:
        requests: The requests, `B` rows.
        target_cache: The target's cache of the tokens that are read.
        drafter_state: The drafter's state after them.
        hidden: `[B, E]`, the target's hidden state of each prompt's newest token;
            `None` before the only chunk.
        num_read: `[B]` int32, the tokens read so far, the same in every row.
    """

    requests: Requests
    target_cache: Cache
    drafter_state: Any
    hidden: jax.Array | None
    num_read: jax.Array


@functools.partial(jax.jit, static_argnames=("decoder", "num_slots"))
def prefill(
    decoder: Decoder, params: Params, requests: Requests, *, num_slots: int
) -> DecodeState:
    """Reads the prompts and emits each row's first token.

    Time and memory follow the longest prompt, not the padding.

    Args:
        decoder: The decoder. Static.
        params: The parameters of target and drafter.
        requests: The requests, `B` rows.
        num_slots: The number of cache slots, `S`: at least `round_up_slots` of the
            longest text, of which only the prompt is checked here. Static.

    Raises:
        InputError: If a target or a drafter breaks its protocol, or the padded prompts
            are no whole chunks or longer than a row's slots.
    """
    state = start_prefill(decoder, params, requests, num_slots=num_slots)
    read = functools.partial(prefill_chunk, decoder, params)
    num_tokens = requests.prompts.shape[1]
    size = chunk_size(num_tokens)
    if size == num_tokens:
        state = read(state)
    else:
        num_chunks = -(-requests.prompt_lengths.max() // size)
        state = jax.lax.fori_loop(0, num_chunks, lambda _, state: read(state), state)
    return finish_prefill(decoder, params, state, num_slots=num_slots)


def start_prefill(
    decoder: Decoder, params: Params, requests: Requests, *, num_slots: int
) -> PrefillState:
    """Begins to read prompts in chunks; arguments as for `prefill`.

    Call `prefill_chunk` as often as `num_chunks` of `slots` says, between rounds of the
    running rows, then `finish_prefill`: no row waits for longer than a chunk takes,
    however long the prompt is.
    """
    prompts = requests.prompts
    batch, num_tokens = prompts.shape
    if num_tokens % (size := chunk_size(num_tokens)):
        raise InputError(
            f"prompts padded to {num_tokens} tokens are no whole chunks of {size}; pad "
            "them to `bucket_prompt`, as `make_requests` does"
        )
    if num_tokens > num_slots:
        raise InputError(
            f"prompts padded to {num_tokens} tokens do not fit into num_slots = "
            f"{num_slots}; give `round_up_slots` of the longest text"
        )
    target, drafter = decoder.target, decoder.drafting
    cache = target.init_cache(batch, num_slots)
    check_batch(f"{type(target).__name__}.init_cache", cache, batch)
    drafter_state = drafter.init_state(batch, num_slots)
    check_batch(f"{type(drafter).__name__}.init_state", drafter_state, batch)
    hidden = None
    if size < num_tokens:
        tokens = prompts[:, :size]
        run = functools.partial(target.forward, params.target, tokens, tokens, None)
        output = jax.eval_shape(run, cache)
        check_output(f"{type(target).__name__}.forward", output, tokens)
        shape = (batch, output.hidden.shape[-1])
        hidden = jnp.zeros(shape, output.hidden.dtype)
    return PrefillState(
        requests=requests,
        target_cache=cache,
        drafter_state=drafter_state,
        hidden=hidden,
        num_read=jnp.zeros(batch, jnp.int32),
    )


def prefill_chunk(
    decoder: Decoder, params: Params, state: PrefillState
) -> PrefillState:
    """Reads the next chunk of all prompts, with the target and then the drafter.

    As `slots.prefill_chunk` the state is donated.
    """
    requests, begin = state.requests, state.num_read[0]
    prompts, lengths = requests.prompts, requests.prompt_lengths
    size = chunk_size(prompts.shape[1])
    output, cache = read_chunk(
        decoder.target,
        params.target,
        jax.lax.dynamic_slice_in_dim(prompts, begin, size, axis=1),
        jnp.clip(lengths - begin, 0, size),
        begin,
        state.target_cache,
        is_whole=size == prompts.shape[1],
    )
    chunk = PromptChunk(
        prompts=prompts, lengths=lengths, begin=begin, features=output.features
    )
    drafter, before = decoder.drafting, state.drafter_state
    drafter_state = drafter.prefill_chunk(params.drafter, before, chunk)
    check(f"{type(drafter).__name__}.prefill_chunk", before, drafter_state)
    return PrefillState(
        requests=requests,
        target_cache=cache,
        drafter_state=drafter_state,
        hidden=chunk.newest(output.hidden, state.hidden),
        num_read=state.num_read + size,
    )


def finish_prefill(
    decoder: Decoder, params: Params, state: PrefillState, *, num_slots: int
) -> DecodeState:
    """Emits each row's first token after its prompt, of which all chunks are read."""
    requests, lengths = state.requests, state.requests.prompt_lengths
    batch, num_tokens = requests.prompts.shape
    guide = decoder.first_guide(params, batch)
    target = decoder.target
    assert state.hidden is not None, "a chunk was read"
    logits = target.unembed(params.target, state.hidden)
    check_logits(f"{type(target).__name__}.unembed", logits, batch)
    logits, greedy = constrain(guide, logits), decoder.is_greedy
    first = choose_tokens(
        requests.sampling, requests.keys, logits, lengths, greedy=greedy
    )
    is_prompt = jnp.arange(num_tokens) < lengths[:, None]
    tokens = jnp.zeros((batch, num_slots), jnp.int32)
    begun = DecodeState(
        rows=requests.settings(),
        tokens=tokens.at[:, :num_tokens].set(jnp.where(is_prompt, requests.prompts, 0)),
        lengths=lengths,
        stop_reason=jnp.full(batch, StopReason.RUNNING, jnp.int32),
        target_cache=state.target_cache,
        drafter_state=state.drafter_state,
        accept_lengths=jnp.zeros((batch, num_slots), jnp.int32),
        num_rounds=jnp.zeros(batch, jnp.int32),
        expected=jnp.zeros((batch, 2), jnp.float32),
    )
    return emit(begun, first[:, None], jnp.ones(batch, jnp.int32), guide)[0]
