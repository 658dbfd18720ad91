"""What a pair's calls need: engines of the right size, memory, programs."""

import dataclasses
import itertools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from eagle_jax.checkpoints import check_max_length
from eagle_jax.decoding.growth import bucket_sizes, capacity_ends
from eagle_jax.decoding.requests import bucket_ends, bucket_rows
from eagle_jax.engine.engine import Engine
from eagle_jax.engine.request import Request
from eagle_jax.engine.text import Text
from eagle_jax.errors import InputError
from eagle_jax.models import devices
from eagle_jax.models.transformer import Transformer

if TYPE_CHECKING:
    from eagle_jax.engine.pair import Pair

_MOST_ROWS = 8


def engine_for(
    pair: "Pair", texts: Sequence[Text], batch_size: int | None = None
) -> Engine:
    """Returns an engine that holds texts, with the rows and the lengths they need.

    Args:
        pair: What writes.
        texts: The texts; those that share a constraint are written together.
        batch_size: The most texts that are written together; `None` for 8.

    Raises:
        InputError: If a prompt leaves no room for a token, the rounds cannot be in
            memory, or an expression or schema cannot be used.
    """
    engine = empty_engine_for(pair, texts, batch_size)
    grammars = [text.needs.grammar for text in texts]
    for text in sorted(texts, key=lambda text: grammars.index(text.needs.grammar)):
        engine.add(text, name=f"prompt {text.index}")
    return engine


def empty_engine_for(
    pair: "Pair", texts: Sequence[Text], batch_size: int | None = None
) -> Engine:
    """Returns an engine for texts like these, see `engine_for`."""
    limit = _MOST_ROWS if batch_size is None else batch_size
    most = -(-pair.config.with_(batch_size=limit).batch_size // pair.num_parts)
    each = -(-len(texts) // pair.num_parts)
    rows, samples = min(bucket_rows(each), most), texts[0].request.n
    if samples <= most and all(text.request.n == samples for text in texts):
        # As many as read each prompt once.
        rows = samples * min(bucket_rows(-(-each // samples)), most // samples)
    longest = _longest(pair, texts)
    return pair.engine(batch_size=pair.num_parts * rows, max_length=longest)


def _longest(pair: "Pair", texts: Sequence[Text]) -> int:
    """Returns the most tokens of a text, prompt and output together."""
    limit = pair.config.max_length
    if limit is not None:
        check_max_length(pair.max_positions, limit)
    needed = max(x.longest for x in texts)
    # More slots would cost time for nothing.
    max_length = min(limit or pair.max_positions, needed)
    for text in texts:
        if (size := len(text.prompt_ids)) >= max_length:
            raise InputError(
                f"prompt {text.index} has {size} tokens, but prompt and output "
                f"together may have {max_length}; shorten it or raise `max_length` "
                f"(the target has {pair.max_positions} positions)"
            )
    return max_length


def make_engine(
    pair: "Pair", batch_size: int, max_length: int | None, compiles_beside: bool
) -> Engine:
    """Returns what `Pair.engine` does."""
    max_length = max_length or pair.max_positions
    check_max_length(pair.max_positions, max_length)
    rows = pair.num_parts * -(-batch_size // pair.num_parts)
    check_memory(pair, batch_size=rows, max_length=max_length)
    return Engine(
        pair, batch_size=rows, max_length=max_length, compiles_beside=compiles_beside
    )


def check_memory(pair: "Pair", *, batch_size: int, max_length: int) -> None:
    """Refuses caches that cannot be in memory, before any weight is read.

    They are counted as they begin, see `decoding.growth`.

    Args:
        pair: The pair; targets that were not read from files are not judged.
        batch_size: The number of rows, `B`.
        max_length: The largest number of tokens of prompt and output together.
    """
    if not isinstance(pair.target, Transformer):
        return
    drafter = pair.drafter
    depth = 0 if drafter is None else drafter.depth
    devices.check_memory(
        pair.sizes,
        pair.dtype,
        pair.bits,
        drafter,
        batch_size=batch_size,
        num_slots=bucket_sizes(max_length, prompt=1, depth=depth)[0],
    )


def warm_up(pair: "Pair", most: Request, prompt_length: int, batch_size: int) -> float:
    """Compiles the programs of calls with up to so many and so long prompts."""
    started = time.perf_counter()
    sizes = sorted({bucket_rows(rows) for rows in range(1, batch_size + 1)})
    for rows, length in itertools.product(sizes, bucket_ends(prompt_length)):
        for limit in capacity_ends(length, most.max_new_tokens):
            one = dataclasses.replace(most, max_new_tokens=limit)
            texts = [pair.text([0] * length, one)] * rows
            empty_engine_for(pair, texts, rows).warm_up(texts, with_growth=True)
    return time.perf_counter() - started
