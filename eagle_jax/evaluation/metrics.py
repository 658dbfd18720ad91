"""How far confidences are from acceptance; tau and n-alpha are in `decoding.rates`."""

import dataclasses

import numpy as np

from eagle_jax.decoding.rates import divide

NUM_BINS = 20
"""The number of equal bins of [0, 1] for confidences."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reliability:
    """Predicted against measured acceptance, in equal bins of [0, 1].

    Attributes:
        count: `[bins]` int, the number of nodes.
        accepted: `[bins]` int, the number of accepted nodes.
        total: `[bins]` float64, the sum of the predictions.
    """

    count: np.ndarray
    accepted: np.ndarray
    total: np.ndarray

    @classmethod
    def of(cls, predicted: np.ndarray, is_accepted: np.ndarray) -> "Reliability":
        """Returns nodes sorted into `NUM_BINS` bins; 1 belongs to the last.

        Args:
            predicted: `[M]` float, the predicted probabilities.
            is_accepted: `[M]` bool, whether each node was accepted.
        """
        places = np.minimum((predicted * NUM_BINS).astype(int), NUM_BINS - 1)
        return cls(
            count=np.bincount(places, minlength=NUM_BINS),
            accepted=np.bincount(places[is_accepted], minlength=NUM_BINS),
            total=np.bincount(places, weights=predicted, minlength=NUM_BINS),
        )

    @property
    def predicted(self) -> np.ndarray:
        """`[bins]` float64, the mean prediction; NaN in an empty bin."""
        return divide(self.total, self.count)

    @property
    def rates(self) -> np.ndarray:
        """`[bins]` float64, the share accepted; NaN in an empty bin."""
        return divide(self.accepted, self.count)

    @property
    def expected_error(self) -> float | None:
        """The expected calibration error, `None` without nodes.

        It is the distance between mean prediction and rate, averaged over nodes.
        """
        if not self.count.sum():
            return None
        return float(np.abs(self.accepted - self.total).sum() / self.count.sum())
