"""Reading prompts into a target's cache; long ones piece by piece.

In one piece the scores of a prompt take memory with the square of its length, 34 GB for
16,384 tokens and 32 heads. In pieces they take `PREFILL_CHUNK` rows of it.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from eagle_jax import interface
from eagle_jax.interface import Cache, Target, TargetOutput
from eagle_jax.ordering import after

PREFILL_CHUNK = 512
"""The number of tokens read at once: enough to keep an accelerator's units busy."""


@struct.dataclass(kw_only=True)
class Reading:
    """The results of reading prompts.

    Attributes:
        cache: The target's cache, which holds the tokens that were read.
        hidden: `[B, E]`, the hidden state of each prompt's last token.
        features: `[B, T, F]`, the target's; after a prompt's end they mean nothing.
    """

    cache: Cache
    hidden: jax.Array
    features: jax.Array


def read_prompts(
    target: Target, params: Any, prompts: jax.Array, lengths: jax.Array, cache: Cache
) -> Reading:
    """Reads prompts; time and memory follow the longest prompt, not the padding.

    Args:
        target: The target. Static.
        params: The target's parameters.
        prompts: `[B, T]` int32, padded at the end.
        lengths: `[B]` int32, real tokens per row, at least 1.
        cache: An empty cache of the target, with at least `T` slots.
    """
    batch, num_tokens = prompts.shape
    if num_tokens <= PREFILL_CHUNK:
        positions = jnp.broadcast_to(jnp.arange(num_tokens), prompts.shape)
        # Nothing is cached yet: a cache without slots costs no attention.
        nothing = interface.init_cache(target, batch, 0)
        output = interface.forward(target, params, prompts, positions, None, nothing)
        return Reading(
            cache=interface.commit(target, cache, output.entries, positions, lengths),
            hidden=_rows(output.hidden, lengths - 1),
            features=output.features,
        )

    def read(reading: Reading, begin: jax.Array | int, size: int) -> Reading:
        tokens = jax.lax.dynamic_slice_in_dim(prompts, begin, size, axis=1)
        rows = jnp.broadcast_to(jnp.arange(size), tokens.shape)
        positions = begin + rows
        output = interface.forward(
            target, params, tokens, positions, None, reading.cache
        )
        return _add(target, reading, output, begin, rows, lengths)

    reading = _nothing_read(target, params, prompts, cache)
    num_chunks = -(-lengths.max() // PREFILL_CHUNK)
    num_whole = num_tokens // PREFILL_CHUNK
    reading = jax.lax.fori_loop(
        0,
        jnp.minimum(num_chunks, num_whole),
        lambda chunk, reading: read(reading, chunk * PREFILL_CHUNK, PREFILL_CHUNK),
        reading,
    )
    rest = num_tokens - num_whole * PREFILL_CHUNK
    return read(reading, num_whole * PREFILL_CHUNK, rest) if rest else reading


def _nothing_read(
    target: Target, params: Any, prompts: jax.Array, cache: Cache
) -> Reading:
    tokens = prompts[:, :PREFILL_CHUNK]
    run = functools.partial(interface.forward, target)
    output = jax.eval_shape(run, params, tokens, tokens, None, cache)
    batch, num_tokens = prompts.shape
    hidden, features = output.hidden, output.features
    return Reading(
        cache=cache,
        hidden=jnp.zeros((batch, hidden.shape[-1]), hidden.dtype),
        features=jnp.zeros((batch, num_tokens, features.shape[-1]), features.dtype),
    )


def _add(
    target: Target,
    reading: Reading,
    output: TargetOutput,
    begin: jax.Array | int,
    rows: jax.Array,
    lengths: jax.Array,
) -> Reading:
    """Takes in a piece of `rows.shape[1]` tokens.

    Rows that ended before it commit nothing: their window lies after their end and,
    as pieces have one size, before the padded end.
    """
    size = rows.shape[1]
    last = lengths - 1 - begin
    is_last = (last >= 0) & (last < size)
    hidden = _rows(output.hidden, jnp.clip(last, 0, size - 1))
    count = after(jnp.clip(lengths - begin, 0, size), hidden[:, 0])
    return Reading(
        cache=interface.commit(target, reading.cache, output.entries, rows, count),
        hidden=jnp.where(is_last[:, None], hidden, reading.hidden),
        features=jax.lax.dynamic_update_slice_in_dim(
            reading.features, output.features, begin, axis=1
        ),
    )


def _rows(values: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns `[B, X]`: one entry along axis 1 of each row of `[B, T, X]`."""
    return jnp.take_along_axis(values, rows[:, None, None], axis=1)[:, 0]
