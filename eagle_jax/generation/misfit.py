"""Says that drafts do not fit their target: the text is right, but slow."""

import warnings
from collections.abc import Iterable

_ENOUGH_ROUNDS = 32
_CHANCE = 0.05  # No weak head is accused: one with 0.3 a round is, one time in 1,000.


def warn_if_never_accepted(seen: list[int], rows: Iterable[list[int]]) -> None:
    """Judges a pair once, by its first rounds.

    Args:
        seen: The accept lengths of the rounds so far, of all rows; more are added until
            they are enough.
        rows: The accept lengths of each row that has ended since.
    """
    if len(seen) >= _ENOUGH_ROUNDS:
        return
    for accept_lengths in rows:
        seen += accept_lengths
    if len(seen) >= _ENOUGH_ROUNDS and sum(seen) < _CHANCE * len(seen):
        warnings.warn(
            f"the drafts do not fit the target: {sum(seen)} were accepted in "
            f"{len(seen)} rounds, as by chance; the text is right, but slow. Likely "
            "reasons: draft weights of another target or other feature layers, or a "
            "chat model without its chat template (`chat`)",
            stacklevel=2,
        )
