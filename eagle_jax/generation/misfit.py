"""Says that drafts do not fit their target: the text is right, but slow."""

import warnings
from collections.abc import Iterable, Sequence

ENOUGH_ROUNDS = 32
"""The rounds, of all rows together, after which acceptance is judged."""

CHANCE = 0.05
"""The accepted drafts per round below which weights are taken to know nothing.

Low, so that no weak head is accused: one with 0.3 is, one time in 1,000.
"""


class FitWatch:
    """Judges a pair once, by its first rounds."""

    def __init__(self) -> None:
        """Begins without any round."""
        self._seen: list[int] | None = []

    def add(self, rows: Iterable[Sequence[int]]) -> None:
        """Takes in the accept lengths of finished rows; may warn, once."""
        if self._seen is None:
            return
        for accept_lengths in rows:
            self._seen += accept_lengths
        rounds, accepted = len(self._seen), sum(self._seen)
        if rounds < ENOUGH_ROUNDS:
            return
        self._seen = None
        if accepted < CHANCE * rounds:
            warnings.warn(
                f"the drafts do not fit the target: {accepted} were accepted in "
                f"{rounds} rounds, below {CHANCE} per round, as by chance; the text "
                "is right, but slow. Likely reasons: draft weights that were trained "
                "for another target, or on features of other layers; a chat model "
                "without its chat template (`chat`), or the reverse",
                stacklevel=2,
            )
