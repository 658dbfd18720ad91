"""How prompts are read: together, in chunks, or after what a row holds already."""

import dataclasses
import itertools
import operator
from collections.abc import Sequence
from typing import Self

from eagle_jax.decoding import slots
from eagle_jax.decoding.chunked_prefill import PrefillState
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.requests import bucket_length
from eagle_jax.engine.programs import Programs
from eagle_jax.engine.text import Text
from eagle_jax.interface import Truncating
from eagle_jax.interface.prefill import PREFILL_CHUNK

SMALL_CHUNK = 64
"""The tokens of small chunks: as many as keep a CPU's units busy."""

LEAST_CHUNK = 8
"""The tokens of the least chunks, beside a last token alone; a CPU takes two's time."""

_MOST_PADDING = 1 << 14


def chunk_sizes(length: int) -> list[int]:
    """Returns the sizes of the chunks that so many tokens are read in, descending.

    Few sizes, so few programs; together they are hardly longer than the prompt.

    >>> chunk_sizes(250), chunk_sizes(260), chunk_sizes(1025)
    ([256], [256, 8], [512, 512, 1])
    """
    small = min(SMALL_CHUNK, PREFILL_CHUNK)
    least, rest = min(LEAST_CHUNK, small), length % small
    if rest > 2 * least:
        rest = small
    elif rest % least > 1:
        rest += -rest % least
    left, sizes = length - length % small + rest, list[int]()
    for size in (PREFILL_CHUNK, PREFILL_CHUNK // 2, small, least, 1):
        sizes += [size] * (left // size)
        left %= size
    return sizes


def chunks_of(lengths: Sequence[int]) -> tuple[int, list[int]]:
    """Returns the padded length of prompts, and the chunks that they are read in."""
    longest = max(lengths)
    bucket = bucket_length(longest)
    # The shortest are read as a whole, by one program.
    return bucket, [bucket] if bucket <= SMALL_CHUNK else chunk_sizes(longest)


def every_chunk(bucket: int) -> list[list[int]]:
    """Returns chunks of all sizes that prompts of a padded length may need."""
    if bucket <= SMALL_CHUNK:
        return [[bucket]]
    sizes = (PREFILL_CHUNK, PREFILL_CHUNK // 2, SMALL_CHUNK, LEAST_CHUNK, 1)
    whole = [[bucket]] if bucket in sizes else []
    return [*whole, [size for size in sizes if size < bucket]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """A prompt that is being read in chunks.

    Attributes:
        text: The text that begins with it.
        prefix: What is read so far.
        num_slots: The slots of the state that it enters.
        sizes: The tokens of the chunks that are left.
    """

    text: Text
    prefix: PrefillState
    num_slots: int
    sizes: Sequence[int]

    def next(self, programs: Programs) -> Self:
        """Reads the next chunk."""
        size, *left = self.sizes
        prefix = programs.call(slots.prefill_chunk, self.prefix, size=size)
        return dataclasses.replace(self, prefix=prefix, sizes=left)


def find_prefix(
    ids: Sequence[int], held: Sequence[Sequence[int]], decoder: Decoder
) -> tuple[int, int]:
    """Returns the row that a prompt has most in common with, and how many tokens.

    They are whole small chunks; 0 where to read all of the prompt is as quick, or
    target or drafter cannot go back.

    Args:
        ids: The prompt's token ids.
        held: The token ids of what is in each row, as far as it is known.
        decoder: What reads prompts.
    """
    parts = decoder.target, decoder.drafting
    if not all(isinstance(part, Truncating) for part in parts):
        return 0, 0
    most = []
    for text in held:
        equal = [*itertools.takewhile(bool, map(operator.eq, ids, text))]
        # The last round's tokens may still wait to be read by the drafter.
        most.append(min(len(equal) - 1, len(text) - decoder.depth - 2))
    row = max(range(len(most)), key=most.__getitem__)
    length = most[row] // SMALL_CHUNK * SMALL_CHUNK
    left = sum(chunk_sizes(len(ids) - length))
    return (row, length) if length > 0 and left < prefill_tokens(len(ids)) else (0, 0)


def prefill_tokens(length: int) -> int:
    """Returns the tokens that reading a prompt takes, with its padding."""
    return sum(chunks_of([length])[1])


def is_one_prefill(lengths: Sequence[int], rows: int) -> bool:
    """Returns whether prompts of these lengths are best read at once, as all rows.

    They are if they fill most rows, and one padded length for all reads not far more
    padding than prompts: to enter one by one takes more programs, which must pay.
    """
    if not rows < 2 * len(lengths) <= 2 * rows:
        return False
    needed = [prefill_tokens(length) for length in lengths]
    return rows * max(needed) <= max(4 * sum(needed), sum(needed) + _MOST_PADDING)


def num_samples(texts: Sequence[Text], rows: int) -> int:
    """Returns how many neighbours have one prompt, which is read once for all of them.

    Args:
        texts: The texts, in order.
        rows: The rows that each device has, which the number must divide.
    """
    count = texts[0].request.n
    if rows % count or len(texts) % count:
        return 1
    prompts = [text.prompt_ids for text in texts]
    firsts = [prompts[place - place % count] for place in range(len(prompts))]
    return count if prompts == firsts else 1


def with_one_prompt(texts: Sequence[Text], most: int) -> list[Text]:
    """Returns the first texts that have the first one's prompt."""
    prompt = texts[0].prompt_ids
    same = [*itertools.takewhile(lambda text: text.prompt_ids == prompt, texts)]
    most = min(len(same), most)
    # A power of two: few numbers of samples, so few programs.
    return same[: 1 << (most.bit_length() - 1)] if most else []


def num_slots_for(texts: Sequence[Text]) -> int:
    """Returns the slots that prompts take with their padding, and a first token."""
    longest = max(len(text.prompt_ids) for text in texts)
    return max(bucket_length(longest), longest + 1)
