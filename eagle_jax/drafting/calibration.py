"""A draft's confidence as a better guess of what will be accepted.

EAGLE-2 takes the confidence for the probability of acceptance. Where a draft is too
sure of itself, path values mislead the tree; an exponent per depth and rank mends most
of it and keeps every value within (0, 1], so no child is worth more than its parent.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from eagle_jax.config import require


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """Exponents of confidences, a static setting: `c' = c ** exponent`.

    >>> calibration = Calibration(exponents=((1.0,), (2.0, 3.0)))
    >>> calibration.apply(jnp.array([-1.0, -2.0, -3.0]), level=2)
    Array([-2., -6., -9.], dtype=float32)

    Attributes:
        exponents: By depth (1 first) and rank among siblings (0, the likeliest,
            first). Deeper nodes and higher ranks take the last entry there is.

    Raises:
        InputError: If a depth has no exponent, or one is not finite and above 0.
    """

    exponents: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        """Refuses tables without entries and exponents out of range."""
        wanted = "a table with at least one exponent per depth"
        is_table = bool(self.exponents) and all(self.exponents)
        require(is_table, "exponents", self.exponents, wanted)
        for row in self.exponents:
            for exponent in row:
                is_exponent = math.isfinite(exponent) and exponent > 0
                require(is_exponent, "exponents", exponent, "finite and above 0")

    def apply(self, log_probs: jax.Array, *, level: int) -> jax.Array:
        """Returns calibrated log probabilities.

        Args:
            log_probs: `[..., K]` float32, of siblings in rank order; `-inf` stays.
            level: Their depth, at least 1. Static.

        Returns:
            `[..., K]`, not above 0 where `log_probs` are not; siblings may have
            changed places.
        """
        row = self.exponents[min(level, len(self.exponents)) - 1]
        ranks = range(log_probs.shape[-1])
        factors = [row[min(rank, len(row) - 1)] for rank in ranks]
        return log_probs * jnp.asarray(factors, log_probs.dtype)
