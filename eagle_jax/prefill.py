"""Reading prompts into a target's cache; long ones piece by piece.

In one piece the scores of a prompt take memory with the square of its length, 34 GB for
16,384 tokens and 32 heads. In pieces they take `PREFILL_CHUNK` rows of it.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import struct

from eagle_jax import checked
from eagle_jax.interface import Cache, Target
from eagle_jax.ordering import after

T = TypeVar("T")

PREFILL_CHUNK = 512
"""The number of tokens read at once: enough to keep an accelerator's units busy."""


def chunk_size(num_tokens: int) -> int:
    """Returns how many tokens of prompts padded to `num_tokens` are read at once."""
    return min(PREFILL_CHUNK, num_tokens)


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
        nothing = checked.init_cache(target, batch, 0)
        output = checked.forward(target, params, prompts, positions, None, nothing)
        return Reading(
            cache=checked.commit(target, cache, output.entries, positions, lengths),
            hidden=_rows(output.hidden, lengths - 1),
            features=output.features,
        )
    return in_pieces(
        functools.partial(read_piece, target, params, prompts, lengths),
        begin_reading(target, params, prompts, cache),
        lengths,
        num_tokens,
    )


def in_pieces(
    read: Callable[[T, jax.Array | int, int], T],
    start: T,
    lengths: jax.Array,
    num_tokens: int,
) -> T:
    """Reads prompts piece by piece, as far as the longest of them goes.

    Args:
        read: A function of what was read so far, the first token of a piece and the
            tokens in it, which returns what is read then.
        start: What is read at first.
        lengths: `[B]` int32, real tokens per row.
        num_tokens: The tokens of the padded prompts, `T`. Static.
    """
    num_chunks = -(-lengths.max() // PREFILL_CHUNK)
    num_whole = num_tokens // PREFILL_CHUNK
    reading = jax.lax.fori_loop(
        0,
        jnp.minimum(num_chunks, num_whole),
        lambda chunk, reading: read(reading, chunk * PREFILL_CHUNK, PREFILL_CHUNK),
        start,
    )
    rest = num_tokens - num_whole * PREFILL_CHUNK
    return read(reading, num_whole * PREFILL_CHUNK, rest) if rest else reading


def begin_reading(
    target: Target, params: Any, prompts: jax.Array, cache: Cache
) -> Reading:
    """Returns the reading of prompts of which no token is read; nothing is computed."""
    tokens = prompts[:, :PREFILL_CHUNK]
    run = functools.partial(checked.forward, target)
    output = jax.eval_shape(run, params, tokens, tokens, None, cache)
    batch, num_tokens = prompts.shape
    hidden, features = output.hidden, output.features
    return Reading(
        cache=cache,
        hidden=jnp.zeros((batch, hidden.shape[-1]), hidden.dtype),
        features=jnp.zeros((batch, num_tokens, features.shape[-1]), features.dtype),
    )


def read_piece(
    target: Target,
    params: Any,
    prompts: jax.Array,
    lengths: jax.Array,
    reading: Reading,
    begin: jax.Array | int,
    size: int,
) -> Reading:
    """Reads the next tokens of prompts.

    Rows that ended before them commit nothing: their window lies after their end and,
    as pieces have one size, before the padded end.

    Args:
        target: The target. Static.
        params: The target's parameters.
        prompts: `[B, T]` int32, padded at the end.
        lengths: `[B]` int32, real tokens per row, at least 1.
        reading: What was read of the `begin` tokens before.
        begin: `[]` int32, the first token of the piece.
        size: The number of tokens to read, at most `T - begin`. Static.
    """
    tokens = jax.lax.dynamic_slice_in_dim(prompts, begin, size, axis=1)
    rows = jnp.broadcast_to(jnp.arange(size), tokens.shape)
    cache = reading.cache
    output = checked.forward(target, params, tokens, begin + rows, None, cache)
    last = lengths - 1 - begin
    is_last = (last >= 0) & (last < size)
    hidden = _rows(output.hidden, jnp.clip(last, 0, size - 1))
    count = after(jnp.clip(lengths - begin, 0, size), hidden[:, 0])
    # A target's writes need not depend on `count`, which waits for the read.
    rows = after(rows, count[:, None])
    return Reading(
        cache=checked.commit(target, cache, output.entries, rows, count),
        hidden=jnp.where(is_last[:, None], hidden, reading.hidden),
        features=jax.lax.dynamic_update_slice_in_dim(
            reading.features, output.features, begin, axis=1
        ),
    )


def _rows(values: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns `[B, X]`: one entry along axis 1 of each row of `[B, T, X]`."""
    return jnp.take_along_axis(values, rows[:, None, None], axis=1)[:, 0]
