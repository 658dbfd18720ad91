"""What rounds accepted, as numbers: the papers' tau and n-alpha."""

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """Acceptance rates by depth, rank or place in a chain.

    Attributes:
        accepted: `[X]` int, how often something was accepted.
        tried: `[X]` int, how often it could have been.
    """

    accepted: np.ndarray
    tried: np.ndarray

    @property
    def rates(self) -> np.ndarray:
        """`[X]` float64, NaN where nothing was tried."""
        return divide(self.accepted, self.tried)


def decoded_tokens(new_tokens: Sequence[int]) -> int:
    """Returns the tokens of some texts that rounds emitted, not their prefills.

    Args:
        new_tokens: Of each text, its generated tokens, the prefill's first included.
    """
    return sum(new_tokens) - sum(number > 0 for number in new_tokens)


def tokens_per_round(new_tokens: Sequence[int], num_rounds: int) -> float | None:
    """Returns what the rounds of some texts emitted, over their number (tau).

    A text's first token is the prefill's. What a round accepted after a limit or a
    stop token was never emitted: to count it would add most where texts are short, as
    the round that crosses a limit is more likely a long one.

    Args:
        new_tokens: Of each text, its generated tokens, the prefill's included.
        num_rounds: Of all texts together.

    Returns:
        1 for plain decoding; `None` without any round.
    """
    return decoded_tokens(new_tokens) / num_rounds if num_rounds else None


def n_alpha(accept_lengths: Sequence[int] | np.ndarray, depth: int) -> Rates:
    """Returns n-alpha: of the rounds that accepted n drafts, how many one more.

    For a tree these are its acceptance rates by depth, from 1 on; a leaf ends its
    round.

    >>> n_alpha([0, 1, 5, 5], depth=5).rates.tolist()
    [0.75, 0.6666666666666666, 1.0, 1.0, 1.0]

    Args:
        accept_lengths: `[R]` int, drafted tokens accepted in each round, uncut.
        depth: Drafted levels: after the last one nothing is tried.

    Returns:
        `[depth]` rates, NaN where no round accepted that many; more of them if a
        round accepted more than `depth`.
    """
    rounds = np.bincount(np.asarray(accept_lengths, int), minlength=depth + 1)
    reached = rounds[::-1].cumsum()[::-1]
    return Rates(accepted=reached[1:], tried=reached[:-1])


def divide(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """Returns the quotient of two `[X]` in float64, NaN over 0."""
    return np.divide(part, whole, out=np.full(len(whole), np.nan), where=whole > 0)
