"""How scores become confidences: one factor, and exponents."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.drafting.calibration import Confidence
from tests.helpers import refused

LOGS = jnp.array([[-0.1, -1.0, -jnp.inf], [0.0, -3.0, -4.0]])


@pytest.mark.parametrize(
    ("level", "factors"),
    [(1, [0.5, 0.5, 0.5]), (2, [2.0, 3.0, 3.0]), (7, [2.0, 3.0, 3.0])],
)
def test_deeper_levels_and_higher_ranks_take_the_last_entry(
    level: int, factors: list[float]
) -> None:
    confidence = Confidence(exponents=((0.5,), (2.0, 3.0)))
    np.testing.assert_allclose(confidence.factors(3, level=level), factors)


@pytest.mark.parametrize(
    "exponents",
    [(), ((),), ((1.0,), ()), ((0.0,),), ((-1.0,),), ((float("inf"),),)],
    ids=str,
)
def test_exponents_out_of_range_are_refused(
    exponents: tuple[tuple[float, ...], ...],
) -> None:
    refused(lambda: Confidence(exponents=exponents), "exponents")


@pytest.mark.parametrize("name", ["kappa", "sharpness"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_a_factor_out_of_range_is_refused(name: str, value: float) -> None:
    factor: dict[str, Any] = {name: value}
    refused(lambda: Confidence(**factor), f"{name} = {value}")
