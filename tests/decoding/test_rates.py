"""Tau and n-alpha against examples worked out by hand."""

import numpy as np
import pytest

from eagle_jax.decoding.rates import n_alpha


def test_alphas_are_conditional_on_the_drafts_before() -> None:
    lengths = np.array([0, 0, 1, 2, 5, 5, 5, 5])
    assert n_alpha(lengths, 5).rates.tolist() == [6 / 8, 5 / 6, 4 / 5, 1.0, 1.0]
    assert np.isnan(n_alpha(np.array([0, 0]), 5).rates[1])


def test_depths_count_the_rounds_that_got_so_far() -> None:
    # Of four rounds three accepted a child of the root; of these one went on.
    rates = n_alpha([0, 1, 2, 1], depth=2)
    assert rates.accepted.tolist() == [3, 1]
    assert rates.tried.tolist() == [4, 3]
    assert rates.rates.tolist() == pytest.approx([3 / 4, 1 / 3])


def test_n_alpha_counts_the_chains_that_got_so_far() -> None:
    # All five try the first token; four the second, of which three are accepted; and
    # three the third.
    rates = n_alpha([0, 1, 3, 3, 2], depth=3)
    assert rates.accepted.tolist() == [4, 3, 2]
    assert rates.tried.tolist() == [5, 4, 3]


def test_behind_the_last_drafted_token_nothing_is_tried() -> None:
    rates = n_alpha([2, 2], depth=2)
    assert rates.rates.tolist() == [1.0, 1.0]
    # A depth that no step reached was still drafted.
    assert n_alpha([0, 1], depth=3).tried.tolist() == [2, 1, 0]


def test_no_rounds_have_no_rates() -> None:
    assert np.isnan(n_alpha([], depth=2).rates).all()
