"""Tau and acceptance by depth against examples worked out by hand."""

import numpy as np

from eagle_jax.decoding.rates import (
    acceptance_by_depth,
    decoded_tokens,
    tokens_per_round,
)


def test_the_prefills_token_is_in_no_round() -> None:
    # Texts of 6, 1 and 0 tokens: rounds emitted the last five of the first.
    assert decoded_tokens([6, 1, 0]) == 5
    assert tokens_per_round([6, 1, 0], 2) == 2.5
    # Each step of plain decoding emits one token.
    assert tokens_per_round([6], 5) == 1
    assert tokens_per_round([1], 0) is None


def test_acceptance_by_depth_counts_the_chains_that_got_so_far() -> None:
    # All five try the first token; four the second, of which three are accepted; and
    # three the third.
    rates, tried = acceptance_by_depth([0, 1, 3, 3, 2], depth=3)
    assert rates.tolist() == [4 / 5, 3 / 4, 2 / 3]
    assert tried.tolist() == [5, 4, 3]


def test_after_the_last_drafted_token_nothing_is_tried() -> None:
    assert acceptance_by_depth([2, 2], depth=2)[0].tolist() == [1.0, 1.0]
    # A depth that no step reached was still drafted.
    assert acceptance_by_depth([0, 1], depth=3)[1].tolist() == [2, 1, 0]


def test_there_is_no_rate_where_nothing_was_tried() -> None:
    assert np.isnan(acceptance_by_depth([], depth=2)[0]).all()
    assert np.isnan(acceptance_by_depth([0, 0], depth=2)[0][1])
