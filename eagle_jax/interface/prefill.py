"""Reading prompts into a target's cache, chunk by chunk (chunked prefill).

At once the scores of a prompt would take memory with the square of its length, 34 GB
for 16,384 tokens and 32 heads. In chunks they take `PREFILL_CHUNK` rows of it.
"""

from typing import Any

import jax
import jax.numpy as jnp

from eagle_jax.interface.checks import check, check_output
from eagle_jax.interface.ordering import after
from eagle_jax.interface.protocols import Cache, Target, TargetOutput

PREFILL_CHUNK = 512
"""The number of tokens read at once: enough to keep an accelerator's units busy."""


def chunk_size(num_tokens: int) -> int:
    """Returns how many tokens of prompts padded to `num_tokens` are read at once."""
    return min(PREFILL_CHUNK, num_tokens)


def read_chunk(
    target: Target,
    params: Any,
    tokens: jax.Array,
    count: jax.Array,
    begin: jax.Array,
    cache: Cache,
    *,
    is_whole: bool,
) -> tuple[TargetOutput, Cache]:
    """Reads the next tokens of prompts into a cache with room for all of them.

    Rows that ended before them commit nothing: their window begins at their end, so
    before the chunk's place, and lies within the cache.

    Args:
        target: The target. Static.
        params: The target's parameters.
        tokens: `[B, C]` int32, the chunk's tokens.
        count: `[B]` int32, how many of them are real.
        begin: `[]` int32, the place of the first of them.
        cache: The cache, which holds the chunks before.
        is_whole: Whether there is no other chunk. Static.

    Returns:
        The target's output for the chunk, and the cache with it.
    """
    rows = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    # Where nothing is cached yet, a cache without slots costs no attention.
    past = target.init_cache(tokens.shape[0], 0) if is_whole else cache
    output = target.forward(params, tokens, begin + rows, None, past)
    name = type(target).__name__
    check_output(f"{name}.forward", output, tokens)
    if not is_whole:
        last = jnp.maximum(count - 1, 0)[:, None, None]
        newest = jnp.take_along_axis(output.hidden, last, axis=1)
        # A target's writes need not depend on `count`, which waits for the read.
        count = after(count, newest[:, 0, 0])
        rows = after(rows, count[:, None])
    written = target.commit(cache, output.entries, rows, count)
    check(f"{name}.commit", cache, written)
    return output, written
