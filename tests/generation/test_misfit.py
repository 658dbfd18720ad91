"""Drafts that do not fit their target are said, once."""

import warnings
from pathlib import Path

import pytest

import eagle_jax
from eagle_jax.generation.misfit import ENOUGH_ROUNDS, FitWatch

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.parametrize(
    ("accept_lengths", "expected"),
    [
        ([], False),
        ([0] * (ENOUGH_ROUNDS - 1), False),
        ([0] * ENOUGH_ROUNDS, True),
        ([1] + [0] * (ENOUGH_ROUNDS - 1), True),
        ([1, 1] + [0] * (ENOUGH_ROUNDS - 2), False),
        ([0] * 96 + [1] * 4, True),
        ([0] * 95 + [1] * 5, False),
    ],
)
def test_acceptance_below_chance_over_enough_rounds_is_a_misfit(
    accept_lengths: list[int], expected: bool
) -> None:
    with warnings.catch_warnings(record=True, action="always") as warned:
        FitWatch().add([accept_lengths])
    assert bool(warned) == expected


def test_the_first_rounds_of_all_rows_decide() -> None:
    watch = FitWatch()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watch.add([[0] * 8, [0] * 8])
        watch.add([[0] * 8, [2] * 8])
        watch.add([[0] * 1000])


def test_a_head_that_knows_nothing_is_said_once_with_figures(tiny_pair: Path) -> None:
    # Three drafts of 300 tokens: they hit by chance in one round of a hundred.
    pair = eagle_jax.load_pair(
        str(tiny_pair / "target"),
        str(tiny_pair / "head"),
        method="chain",
        tree=eagle_jax.TreeConfig(num_nodes=4, depth=3, width=1),
    )
    with pytest.warns(UserWarning, match="drafts do not fit") as warned:
        pair.generate(["a", "b"], max_new_tokens=24)
        pair.generate(["a", "b"], max_new_tokens=24)
    (one,) = warned
    message = str(one.message)
    assert "accepted in 4" in message
    assert "trained for another target" in message
    assert "`chat`" in message
