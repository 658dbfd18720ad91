"""Drafts that do not fit their target: the text stays right, so it must be said."""

import dataclasses
import warnings

from eagle_jax.decoding.decoder import Decoder
from eagle_jax.drafting import TreeDrafter, find_tree_drafter
from eagle_jax.engine.ladder import ROOT
from eagle_jax.engine.text import Text

_ENOUGH_ROUNDS = 32
_CHANCE = 0.05  # No weak head is accused: one with 0.3 a round is, one time in 1,000.

_ENOUGH_FOR_CONFIDENCE = 200
# Right heads hit 0.85 to 1.25 times as often as they are confident to, sampled and
# greedy; the embedded one 0.26 times where it reads the inputs of the last layer.
_LEAST_SHARE = 0.7
# At level 2 that share is 0.85 to 1.35 times what it is at level 1, and 0.3 to 0.58
# times where an EAGLE-3 head goes on from its outputs otherwise than it was trained.
_LEAST_LATER = 0.6


@dataclasses.dataclass(kw_only=True)
class FitCheck:
    """What the first rounds with a pair accepted, all rows together.

    Attributes:
        num_rounds: The number of rounds.
        accepted: The drafts that they accepted.
        hits: The rounds that accepted one at least, and two.
        expected: The rounds that were to, by the draft's own confidences.
    """

    num_rounds: int = 0
    accepted: int = 0
    hits: list[int] = dataclasses.field(default_factory=lambda: [0, 0])
    expected: list[float] = dataclasses.field(default_factory=lambda: [0.0, 0.0])

    def judge(self, text: Text, decoder: Decoder) -> None:
        """Adds a text that has ended, until they are enough, and warns of a misfit.

        A head that knows nothing hits by chance. One that is half wrong, since it reads
        other layers than it was trained for or leaves out a norm, hits far less often
        than it is confident to, at level 1 or where it goes on from its own outputs.

        Args:
            text: The text.
            decoder: What wrote it; drafts without a model are not judged.
        """
        before, drafter = self.num_rounds, decoder.drafter
        is_drafted = find_tree_drafter(drafter) is not None and decoder.depth > 0
        if before >= _ENOUGH_FOR_CONFIDENCE or not is_drafted:
            return
        # Those of a switch are partly copied, and have no probability.
        model = drafter.model if isinstance(drafter, TreeDrafter) else None
        has_confidence = decoder.acceptance != "rejection" and model is not None
        # Where a head drafts each level, as Medusa's, right ones hit less at level 2,
        # too: only others go on from their own outputs.
        continues = model is not None and model.max_levels is None
        self.num_rounds += len(text.accept_lengths) - text.trees.count(ROOT)
        self.accepted += sum(text.accept_lengths)
        for level, confident in enumerate(text.expected):
            self.hits[level] += sum(n > level for n in text.accept_lengths)
            self.expected[level] += confident
        rounds, at_chance = self.num_rounds, self.accepted < _CHANCE * self.num_rounds
        if before < _ENOUGH_ROUNDS <= rounds and at_chance:
            warnings.warn(
                f"the drafts do not fit the target: {self.accepted} were accepted in "
                f"{rounds} rounds, as by chance; the text is right, but slow. Likely "
                "reasons: draft weights of another target or other feature layers, a "
                "head that was hardly trained, or a chat model without its chat "
                "template (`chat`)",
                stacklevel=2,
            )
        (hit, later), (confident, of_later) = self.hits, self.expected
        is_wrong = hit < _LEAST_SHARE * confident
        is_wrong |= continues and later * confident < _LEAST_LATER * hit * of_later
        is_wrong &= has_confidence and not at_chance
        if rounds >= _ENOUGH_FOR_CONFIDENCE and is_wrong:
            warnings.warn(
                "the drafts fit the target badly: one and two were accepted in "
                f"{hit / rounds:.0%} and {later / rounds:.0%} of {rounds} rounds, and "
                f"the head was confident of {confident / rounds:.0%} and "
                f"{of_later / rounds:.0%}; the text is right, but slow. Likely "
                "reasons: features of other layers, a norm that is read otherwise than "
                "it was trained, another chat template (`chat`), or a head of another "
                "version of the target",
                stacklevel=2,
            )
