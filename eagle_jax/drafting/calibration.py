"""A draft's confidence as a better guess of what will be accepted.

EAGLE-2 takes the confidence for the probability of acceptance. Where a draft is too
sure of itself, path values mislead the tree; an exponent per depth and rank mends most
of it and keeps every value within (0, 1], so no child is worth more than its parent.

Under shared noise the score of a token is `s = log q + g`, and what is accepted is the
target's own largest `log p + g`. How sure the largest `s` is of being it depends on how
far `log q` lies from `log p`: `softmax(kappa * s)` says so with one number. At another
temperature `t` both logarithms are `1 / t` times as large, and so is what lies between
them: there `softmax(kappa * t * s)` has the same `kappa`, and as `t` goes to 0 it
becomes the confidence of greedy text.

A draft whose distribution is flatter than the target's chooses other tokens under the
same noise. So `log q` has a factor of its own before noise is added, its sharpness.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from eagle_jax.config import require, require_float32
from eagle_jax.interface import Draws

SAMPLED_KAPPA = 1.5
"""The `kappa` under shared noise where no calibration is given."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Confidence:
    """The function from a score to a confidence, a static setting.

    It is `c = softmax(kappa * t * s) ** exponent` at temperature `t`, where
    `s = sharpness * log q + g`, and at temperature 0
    `softmax(kappa * sharpness * log q) ** exponent`.

    >>> confidence = Confidence(exponents=((1.0,), (2.0, 3.0)))
    >>> confidence.factors(3, level=2)
    Array([2., 3., 3.], dtype=float32)

    Attributes:
        kappa: The factor of the scores.
        sharpness: The factor of the draft's logits before noise is added.
        exponents: The exponents by depth (1 first) and by rank among siblings (0, the
            most likely, first). Deeper nodes and higher ranks take the last entry.

    Raises:
        InputError: If `kappa`, the sharpness or an exponent is not finite and above 0,
            or a depth has no exponent.
    """

    kappa: float = 1.0
    sharpness: float = 1.0
    exponents: tuple[tuple[float, ...], ...] = ((1.0,),)

    def __post_init__(self) -> None:
        """Refuses tables without entries and numbers out of range."""
        wanted = "a table with at least one exponent per depth"
        is_table = bool(self.exponents) and all(self.exponents)
        require(is_table, "exponents", self.exponents, wanted)
        factors = {"kappa": [self.kappa], "sharpness": [self.sharpness]}
        factors["exponents"] = [one for row in self.exponents for one in row]
        for name, values in factors.items():
            for value in values:
                holds = math.isfinite(value) and value > 0
                require(holds, name, value, "finite and above 0")
                require_float32(name, value)

    @property
    def is_plain(self) -> bool:
        """Whether every exponent is 1."""
        return all(exponent == 1 for row in self.exponents for exponent in row)

    def factors(self, count: int, *, level: int) -> jax.Array:
        """Returns the exponents of `count` siblings, `[count]` float32.

        The log probabilities of siblings in rank order are multiplied by them, so that
        no child is worth more than its parent; siblings may change their order.

        Args:
            count: The number of siblings. Static.
            level: The siblings' depth, at least 1. Static.
        """
        row = self.exponents[min(level, len(self.exponents)) - 1]
        exponents = [row[min(rank, len(row) - 1)] for rank in range(count)]
        return jnp.array(exponents, jnp.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """A draft's confidences, with and without shared noise.

    Attributes:
        greedy: The confidence where children are the most likely tokens: at temperature
            0, and for drafts that are tested by rejection.
        sampled: The confidence where children are chosen under the noise that they
            share with the target, at temperatures above 0.
    """

    greedy: Confidence = Confidence()
    sampled: Confidence = Confidence(kappa=SAMPLED_KAPPA)

    def exponents(self, draws: Draws, width: int, *, level: int) -> jax.Array | None:
        """Returns the exponents `[K]` or `[B, K]` of siblings; `None` if all are 1."""
        greedy = self.greedy
        # Without shared noise every row drafts as at temperature 0.
        sampled = greedy if draws.noise is None else self.sampled
        if greedy.is_plain and sampled.is_plain:
            return None
        if greedy == sampled:
            return greedy.factors(width, level=level)
        return jnp.where(
            draws.sampling.temperature[:, None] > 0,
            sampled.factors(width, level=level),
            greedy.factors(width, level=level),
        )


UNCALIBRATED = Calibration()
"""The confidences as they are; `kappa` is `SAMPLED_KAPPA` under shared noise."""
