"""Chunked prefill: target and drafter read prompts together, a chunk at a time."""

import dataclasses
import functools
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from flax import struct

from eagle_jax.constraints import find_forbidden, process
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.logprobs import Logprobs, no_logprobs
from eagle_jax.decoding.requests import Requests
from eagle_jax.decoding.state import (
    DecodeState,
    StopReason,
    begin_state,
    emit,
    record_logprobs,
)
from eagle_jax.errors import InputError
from eagle_jax.interface import Cache, Params, PromptChunk
from eagle_jax.interface.checks import check, check_batch, check_logits, check_output
from eagle_jax.interface.prefill import chunk_size, read_chunk
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
        logprobs: The log-probabilities of these tokens; `None` unless the decoder was
            asked for any.
    """

    requests: Requests
    target_cache: Cache
    drafter_state: Any
    hidden: jax.Array | None
    num_read: jax.Array
    logprobs: Logprobs | None = None


@functools.partial(jax.jit, static_argnames=("decoder", "num_slots", "num_samples"))
def prefill(
    decoder: Decoder,
    params: Params,
    requests: Requests,
    *,
    num_slots: int,
    num_samples: int = 1,
) -> DecodeState:
    """Reads the prompts and emits each row's first token.

    Time and memory follow the longest prompt, not the padding.

    Args:
        decoder: The decoder. Static.
        params: The parameters of target and drafter.
        requests: The requests, `B` rows.
        num_slots: The number of cache slots, `S`: at least `round_up_slots` of the
            longest text, of which only the prompt is checked here. Static.
        num_samples: The number of neighbours that have one prompt, `n`; it is read
            once for all of them. Static.

    Raises:
        InputError: If a target or a drafter breaks its protocol, the padded prompts are
            no whole chunks or longer than a row's slots, or `num_samples` does not
            divide the rows.
    """
    check_samples(requests, num_samples)
    firsts = jax.tree.map(lambda leaf: leaf[::num_samples], requests)
    state = start_prefill(decoder, params, firsts, num_slots=num_slots)
    read = functools.partial(prefill_chunk, decoder, params)
    num_tokens = requests.prompts.shape[1]
    size = chunk_size(num_tokens)
    if size == num_tokens:
        state = read(state)
    else:
        num_chunks = -(-firsts.prompt_lengths.max() // size)
        state = jax.lax.fori_loop(0, num_chunks, lambda _, state: read(state), state)
    state = share_prefill(state, requests)
    return finish_prefill(decoder, params, state, num_slots=num_slots)


def share_prefill(state: PrefillState, requests: Requests) -> PrefillState:
    """Returns the prompts of all requests, of which as many neighbours share each."""
    count = len(requests.prompts) // len(state.requests.prompts)
    if count > 1:
        state = jax.tree.map(lambda leaf: jnp.repeat(leaf, count, axis=0), state)
    return dataclasses.replace(state, requests=requests)


def check_samples(requests: Requests, num_samples: int) -> None:
    """Refuses requests that do not come in groups of `num_samples` equal prompts.

    Traced prompts, inside somebody's `jax.jit`, are not looked at.
    """
    prompts, lengths = requests.prompts, requests.prompt_lengths
    rows = len(prompts)
    if num_samples < 1 or rows % num_samples:
        raise InputError(
            f"num_samples = {num_samples} must divide the {rows} requests, of which so "
            "many neighbours have one prompt"
        )
    if isinstance(prompts, jax.core.Tracer) or num_samples == 1:
        return
    whole = jnp.column_stack([lengths, prompts])
    firsts = jnp.repeat(whole[::num_samples], num_samples, axis=0)
    if (differs := (whole != firsts).any(axis=1)).any():
        row = int(differs.argmax())
        raise InputError(
            f"prompt {row} differs from prompt {row - row % num_samples}, but "
            f"num_samples = {num_samples} neighbours share one"
        )


def start_prefill(
    decoder: Decoder,
    params: Params,
    requests: Requests,
    *,
    num_slots: int,
    size: int | None = None,
) -> PrefillState:
    """Begins to read prompts in chunks; arguments as for `prefill`.

    `size` is the number of tokens of a chunk, by default as many as pay. Static.

    Call `prefill_chunk` as often as `num_chunks` of `slots` says, between rounds of the
    running rows, then `finish_prefill`: no row waits for longer than a chunk takes,
    however long the prompt is.
    """
    prompts = requests.prompts
    batch, num_tokens = prompts.shape
    if num_tokens % (size := size or chunk_size(num_tokens)):
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
        logprobs=no_logprobs(decoder.logprobs, batch, num_slots),
    )


@functools.partial(jax.jit, static_argnames=("decoder", "size"))
def reuse_prefill(
    decoder: Decoder,
    params: Params,
    requests: Requests,
    state: DecodeState,
    slot: jax.Array | int,
    length: jax.Array | int,
    *,
    size: int,
) -> PrefillState:
    """Begins to read a prompt after what it has in common with a text that is there.

    Target and drafter must be `Truncating`; `prefill_chunk`, with the same `size`, then
    reads what is new. What is accepted later is what it would be had all been read.

    Args:
        decoder: The decoder. Static.
        params: The parameters of target and drafter.
        requests: One request.
        state: The running state.
        slot: `[]` int32, the row of the text, which may have ended.
        length: `[]` int32, the tokens that are not read again, a multiple of `size`:
            fewer than the prompt and the text have in common, and a round's fewer than
            the text has.
        size: The number of tokens of a chunk. Static.
    """
    begun = start_prefill(
        decoder, params, requests, num_slots=state.tokens.shape[1], size=size
    )
    lengths = jnp.full(1, length, jnp.int32)

    def cut(part: Any, rows: Any) -> Any:
        take = functools.partial(
            jax.lax.dynamic_slice_in_dim, start_index=slot, slice_size=1
        )
        return part.truncate(jax.tree.map(take, rows), lengths)

    return dataclasses.replace(
        begun,
        target_cache=cut(decoder.target, state.target_cache),
        drafter_state=cut(decoder.drafting, state.drafter_state),
        num_read=lengths,
    )


@functools.partial(
    jax.jit, static_argnames=("decoder", "size"), donate_argnames=("state",)
)
def prefill_chunk(
    decoder: Decoder, params: Params, state: PrefillState, *, size: int | None = None
) -> PrefillState:
    """Reads the prompts' next chunk with target and drafter; donates the state."""
    requests, begin = state.requests, state.num_read[0]
    prompts, lengths = requests.prompts, requests.prompt_lengths
    size = size or chunk_size(prompts.shape[1])
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
    logprobs = state.logprobs
    if logprobs is not None and logprobs.config.prompt:
        logits = decoder.target.unembed(params.target, output.hidden)
        logprobs = logprobs.after_chunk(chunk, logits)
    return PrefillState(
        requests=requests,
        target_cache=cache,
        drafter_state=drafter_state,
        hidden=chunk.newest(output.hidden, state.hidden),
        num_read=state.num_read + size,
        logprobs=logprobs,
    )


def finish_prefill(
    decoder: Decoder, params: Params, state: PrefillState, *, num_slots: int
) -> DecodeState:
    """Emits each row's first token after its prompt, of which all chunks are read."""
    requests, lengths = state.requests, state.requests.prompt_lengths
    batch, num_tokens = requests.prompts.shape
    target = decoder.target
    assert state.hidden is not None, "a chunk was read"
    raw = target.unembed(params.target, state.hidden)
    check_logits(f"{type(target).__name__}.unembed", raw, batch)
    is_prompt = jnp.arange(num_tokens) < lengths[:, None]
    tokens = jnp.zeros((batch, num_slots), jnp.int32)
    begun = begin_state(
        requests.settings(),
        tokens.at[:, :num_tokens].set(jnp.where(is_prompt, requests.prompts, 0)),
        StopReason.RUNNING,
        target_cache=state.target_cache,
        drafter_state=state.drafter_state,
        constraint_state=decoder.init_constraint(params, batch),
        logprobs=state.logprobs,
    )
    return emit_next(decoder, params, begun, raw)[0]


def emit_next(
    decoder: Decoder, params: Params, state: DecodeState, raw: jax.Array
) -> tuple[DecodeState, jax.Array]:
    """Chooses and appends each running row's next token.

    Args:
        decoder: The decoder. Static.
        params: The parameters, of which a constraint's are read.
        state: The state of texts without these tokens.
        raw: `[B, V]` float32, the target's logits after the texts.

    Returns:
        The new state, and how many tokens each row took, `[B]` int32: 0 or 1.
    """
    guide, rows = decoder.guide(params, state), state.rows
    logits, one = process(guide, raw), jnp.ones_like(state.lengths)
    chosen = choose_tokens(
        rows.sampling, rows.keys, logits, state.lengths, greedy=decoder.is_greedy
    )[:, None]
    is_forbidden = find_forbidden(guide, logits[:, None], one[:, None] - 1, chosen)
    state, taken = emit(state, chosen, one, guide, is_forbidden)
    return record_logprobs(state, raw[:, None], chosen, taken), taken
