"""Exponents of confidences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.drafting.calibration import Calibration
from tests.helpers import refused

LOGS = jnp.array([[-0.1, -1.0, -jnp.inf], [0.0, -3.0, -4.0]])


@pytest.mark.parametrize(
    ("level", "factors"),
    [(1, [0.5, 0.5, 0.5]), (2, [2.0, 3.0, 3.0]), (7, [2.0, 3.0, 3.0])],
)
def test_deeper_levels_and_higher_ranks_take_the_last_entry(
    level: int, factors: list[float]
) -> None:
    calibration = Calibration(exponents=((0.5,), (2.0, 3.0)))
    found = calibration.apply(LOGS, level=level)
    np.testing.assert_allclose(found, np.asarray(LOGS) * factors, rtol=1e-6)


def test_no_child_is_worth_more_than_its_parent() -> None:
    found = Calibration(exponents=((1 / 8, 8.0),)).apply(LOGS, level=1)
    assert found.dtype == LOGS.dtype
    assert bool((found <= 0).all())
    assert found[0, 2] == -jnp.inf


def test_a_calibration_is_a_static_setting() -> None:
    @jax.jit
    def apply(logs: jax.Array) -> jax.Array:
        return calibration.apply(logs, level=1)

    calibration = Calibration(exponents=((2.0,),))
    np.testing.assert_allclose(apply(LOGS), LOGS * 2)
    assert hash(calibration) == hash(Calibration(exponents=((2.0,),)))


@pytest.mark.parametrize(
    "exponents",
    [(), ((),), ((1.0,), ()), ((0.0,),), ((-1.0,),), ((float("inf"),),)],
    ids=str,
)
def test_exponents_out_of_range_are_refused(
    exponents: tuple[tuple[float, ...], ...],
) -> None:
    refused(lambda: Calibration(exponents=exponents), "exponents")
