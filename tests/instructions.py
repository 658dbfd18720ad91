"""What the instructions of a compiled program move and make, by their types."""

import math
import re
from collections.abc import Iterator, Sequence

from eagle_jax.testing.programs import COLLECTIVES, operation_of

_ARRAY = re.compile(r"\b[a-z]+(\d+)\w*\[([\d,]*)\]")


def moved_bytes(lines: Sequence[str]) -> int:
    """Returns how many bytes a device gets from all collectives together.

    An asynchronous instruction counts where it ends.
    """
    return sum(
        size
        for kind, name in map(operation_of, lines)
        if name.removesuffix("-done") in COLLECTIVES
        for size in _sizes(kind)
    )


def random_words(lines: Sequence[str]) -> int:
    """Returns how many random words a device makes at once, at most.

    That is the size of the largest array of `threefry2x32`, which is made of exclusive
    ors of unsigned words; 0 where nothing is random.
    """
    sizes = (
        size
        for kind, name in map(operation_of, lines)
        if name == "xor" and kind.startswith("u32[")
        for size in _sizes(kind)
    )
    return max(sizes, default=0) // 4


def _sizes(kind: str) -> Iterator[int]:
    """Yields the bytes of each array of an instruction's type."""
    for bits, sizes in _ARRAY.findall(kind):
        shape = (int(size) for size in sizes.split(",") if size)
        yield math.prod(shape) * int(bits) // 8
