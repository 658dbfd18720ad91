"""What the records of an evaluation say, as numbers.

The definitions are the papers': a node is *tried* where its parent was accepted. Tau
and n-alpha are in `decoding.rates`.
"""

import dataclasses
from collections.abc import Iterable

import numpy as np

from eagle_jax.decoding.rates import Rates, divide

NUM_BINS = 20
"""Equal bins of [0, 1] for confidences."""


def quartiles(values: Iterable[float | None]) -> list[float] | None:
    """Returns first quartile, median and third, interpolated; `None` without values.

    Args:
        values: Numbers; `None` among them is left out.
    """
    known = [value for value in values if value is not None]
    return np.quantile(known, [0.25, 0.5, 0.75]).tolist() if known else None


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


def rates_by_rank(rank: np.ndarray, is_accepted: np.ndarray) -> Rates:
    """Returns the rates by a node's place among its siblings, 0 = most likely.

    Args:
        rank: `[M]` int, of the tried nodes.
        is_accepted: `[M]` bool.
    """
    length = int(rank.max(initial=-1)) + 1
    return Rates(
        accepted=np.bincount(rank[is_accepted], minlength=length),
        tried=np.bincount(rank, minlength=length),
    )
