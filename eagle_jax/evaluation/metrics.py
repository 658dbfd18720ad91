"""What the records of an evaluation say, as numbers.

The definitions are the papers': a node is *tried* where its parent was accepted. Tau
and n-alpha are in `decoding.rates`.
"""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from eagle_jax.decoding.rates import Rates, decoded_tokens, divide

NUM_BINS = 20
"""Equal bins of [0, 1] for confidences."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quartiles:
    """The middle half of some values.

    Attributes:
        low: First quartile.
        median: Second quartile.
        high: Third quartile.
    """

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "Quartiles | None":
        """Returns the quartiles, interpolated; `None` without any value.

        Args:
            values: Numbers; `None` among them is left out.
        """
        known = [value for value in values if value is not None]
        if not known:
            return None
        low, median, high = np.quantile(known, [0.25, 0.5, 0.75]).tolist()
        return cls(low=low, median=median, high=high)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reliability:
    """Predicted against measured acceptance, in equal bins of [0, 1].

    Attributes:
        count: `[bins]` int, nodes.
        accepted: `[bins]` int, accepted ones among them.
        total: `[bins]` float64, sum of the predictions.
    """

    count: np.ndarray
    accepted: np.ndarray
    total: np.ndarray

    @classmethod
    def of(cls, predicted: np.ndarray, is_accepted: np.ndarray) -> "Reliability":
        """Sorts nodes into `NUM_BINS` bins; 1 belongs to the last.

        Args:
            predicted: `[M]` float, probabilities.
            is_accepted: `[M]` bool.
        """
        places = np.minimum((predicted * NUM_BINS).astype(int), NUM_BINS - 1)
        return cls(
            count=np.bincount(places, minlength=NUM_BINS),
            accepted=np.bincount(places[is_accepted], minlength=NUM_BINS),
            total=np.bincount(places, weights=predicted, minlength=NUM_BINS),
        )

    @property
    def predicted(self) -> np.ndarray:
        """`[bins]` float64, mean prediction; NaN in an empty bin."""
        return divide(self.total, self.count)

    @property
    def rates(self) -> np.ndarray:
        """`[bins]` float64, share accepted; NaN in an empty bin."""
        return divide(self.accepted, self.count)

    @property
    def expected_error(self) -> float | None:
        """Expected calibration error, `None` without nodes.

        The distance between mean prediction and rate, averaged over nodes.
        """
        if not self.count.sum():
            return None
        return float(np.abs(self.accepted - self.total).sum() / self.count.sum())


def tokens_per_second(
    new_tokens: Sequence[int], seconds: Sequence[float], *, with_prefill: bool
) -> float | None:
    """Returns the speed over some turns.

    Args:
        new_tokens: Of each turn, the prefill's first token included.
        seconds: Of each turn, of the whole turn or without its prefill.
        with_prefill: Whether `seconds` holds the prefill; without it the first token
            of a turn, which the prefill gives, does not count.

    Returns:
        Tokens per second; `None` where no time passed or nothing was decoded.
    """
    tokens = sum(new_tokens) if with_prefill else decoded_tokens(new_tokens)
    total = sum(seconds)
    return tokens / total if tokens > 0 and total > 0 else None


def rates_by_rank(rank: np.ndarray, is_accepted: np.ndarray) -> Rates:
    """Returns the rates by a node's place among its siblings, 0 = likeliest.

    Args:
        rank: `[M]` int, of the tried nodes.
        is_accepted: `[M]` bool.
    """
    length = int(rank.max(initial=-1)) + 1
    return Rates(
        accepted=np.bincount(rank[is_accepted], minlength=length),
        tried=np.bincount(rank, minlength=length),
    )


def length_shares(lengths: Sequence[int]) -> np.ndarray:
    """Returns the share of steps by tokens emitted.

    Args:
        lengths: Of each step, what it accepted and one more, uncut.

    Returns:
        `[longest + 1]` float64; `[0]`, of steps without a token, is 0. Empty without
        steps.
    """
    return np.bincount(lengths) / len(lengths) if lengths else np.zeros(0)
