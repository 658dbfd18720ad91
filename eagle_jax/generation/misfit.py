"""Says that drafts do not fit their target: the text is right, but slow."""

import dataclasses
import warnings
from collections.abc import Iterable, Sequence

ENOUGH_ROUNDS = 32
"""The rounds, of all rows together, after which acceptance is judged."""

CHANCE = 0.05
"""The accepted drafts per round below which weights are taken to know nothing.

Low, so that no weak head is accused: one with 0.3 is, one time in 1,000. A head that
reads wrong features still knows which token follows which, and in a vocabulary of 512
tokens is not found: 0.2 (a chain) to 0.9 (60 nodes) are accepted, against 2.6 to 3.6 of
the right one.
"""


def is_misfit(accept_lengths: Sequence[int]) -> bool:
    """Returns whether so few drafts are accepted that the weights cannot belong here.

    Args:
        accept_lengths: The number of drafted tokens that each round accepted.
    """
    rounds = len(accept_lengths)
    return rounds >= ENOUGH_ROUNDS and sum(accept_lengths) < CHANCE * rounds


@dataclasses.dataclass
class FitWatch:
    """Judges a pair once, by its first rounds.

    Attributes:
        accept_lengths: What the rounds so far accepted; `None` after the judgement.
    """

    accept_lengths: list[int] | None = dataclasses.field(default_factory=list)

    def add(self, rows: Iterable[Sequence[int]]) -> None:
        """Takes in the accept lengths of finished rows; may warn, once."""
        if self.accept_lengths is None:
            return
        for accept_lengths in rows:
            self.accept_lengths += accept_lengths
        seen = self.accept_lengths
        if len(seen) < ENOUGH_ROUNDS:
            return
        self.accept_lengths = None
        if is_misfit(seen):
            warnings.warn(
                f"the drafts do not fit the target: {sum(seen)} were accepted in "
                f"{len(seen)} rounds, below {CHANCE} per round, as by chance; the "
                "text is right, but slow. Likely reasons: draft weights that were "
                "trained for another target, or on features of other layers; a chat "
                "model without its chat template (`chat`), or the reverse",
                stacklevel=2,
            )
