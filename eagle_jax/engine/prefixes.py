"""What a prompt has in common with a text that is in a row already."""

from collections.abc import Sequence

from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.requests import bucket_length
from eagle_jax.interface import Truncating
from eagle_jax.interface.prefill import PREFILL_CHUNK

SMALL_CHUNK = 64
"""The tokens that are read at once after a prefix that is there already."""


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
    # The last round's tokens may still wait to be read by the drafter.
    most = [
        min(_num_common(ids, text) - 1, len(text) - decoder.depth - 2) for text in held
    ]
    row = max(range(len(most)), key=most.__getitem__)
    length = most[row] // SMALL_CHUNK * SMALL_CHUNK
    left = -(-(len(ids) - length) // SMALL_CHUNK) * SMALL_CHUNK
    return (row, length) if length > 0 and left < prefill_tokens(len(ids)) else (0, 0)


def prefill_tokens(length: int) -> int:
    """Returns the tokens that reading a prompt takes, with its padding."""
    return min(bucket_length(length), -(-length // PREFILL_CHUNK) * PREFILL_CHUNK)


def _num_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Returns how many tokens two texts have in common at their beginning."""
    if one[:SMALL_CHUNK] != other[:SMALL_CHUNK]:
        return 0  # Mostly, and nothing is reused then.
    pairs = zip(one, other, strict=False)
    return next(
        (place for place, (a, b) in enumerate(pairs) if a != b),
        min(len(one), len(other)),
    )
