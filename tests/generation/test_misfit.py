"""Drafts that do not fit their target are said, once."""

import warnings
from pathlib import Path

import pytest

import eagle_jax
from eagle_jax.config import ChainConfig
from eagle_jax.generation.misfit import warn_if_never_accepted


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([[0] * 31], False),
        ([[0] * 32], True),
        ([[1, 1] + [0] * 30], False),
        ([[0] * 96 + [1] * 4], True),
        ([[0] * 95 + [1] * 5], False),
        ([[0] * 8, [0] * 8, [0] * 8, [2] * 8, [0] * 1000], False),
        ([[0] * 16, [0] * 16, [1] * 9], True),
    ],
)
def test_too_little_acceptance_in_the_first_rounds_of_all_rows_is_said(
    rows: list[list[int]], expected: bool
) -> None:
    seen: list[int] = []
    with warnings.catch_warnings(record=True, action="always") as warned:
        for row in rows:
            warn_if_never_accepted(seen, [row])
    assert len(warned) == expected


def test_a_head_that_knows_nothing_is_said_once_with_figures(tiny_pair: Path) -> None:
    # Three drafts of 300 tokens: they hit by chance in one round of a hundred.
    pair = eagle_jax.load_pair(
        str(tiny_pair / "target"),
        str(tiny_pair / "head"),
        method="chain",
        tree=ChainConfig(depth=3),
    )
    with pytest.warns(UserWarning, match=r"drafts do not fit.* accepted in 4") as said:
        for _ in range(2):
            pair.generate(["a", "b"], max_new_tokens=24)
    assert len(said) == 1
