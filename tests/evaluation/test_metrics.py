"""Metrics against examples worked out by hand."""

import numpy as np
import pytest

from eagle_jax.evaluation import metrics
from eagle_jax.evaluation.metrics import Quartiles, Reliability


def test_without_prefill_a_turns_first_token_does_not_count() -> None:
    tokens, turns = [11, 6], [2.0, 3.0]
    assert metrics.tokens_per_second(tokens, turns, with_prefill=True) == 17 / 5
    assert metrics.tokens_per_second(tokens, turns, with_prefill=False) == 15 / 5


def test_there_is_no_speed_where_nothing_was_decoded() -> None:
    assert metrics.tokens_per_second([1], [0.0], with_prefill=False) is None
    assert metrics.tokens_per_second([5], [0.0], with_prefill=True) is None
    assert metrics.tokens_per_second([], [], with_prefill=True) is None


def test_quartiles_leave_out_what_is_missing() -> None:
    found = Quartiles.of([4.0, None, 1.0, 2.0, 3.0, 5.0])
    assert found == Quartiles(low=2.0, median=3.0, high=4.0)
    assert Quartiles.of([None]) is None


def test_bins_hold_their_lower_edge_and_the_last_holds_one() -> None:
    predicted = np.array([0.0, 0.049, 0.05, 0.95, 1.0])
    bins = Reliability.of(predicted, np.array([0, 1, 0, 1, 1], bool))
    expected = np.zeros(20, int)
    expected[[0, 1, 19]] = 2, 1, 2
    np.testing.assert_array_equal(bins.count, expected)
    assert bins.accepted[[0, 1, 19]].tolist() == [1, 0, 2]
    assert bins.predicted[19] == pytest.approx(0.975)
    assert bins.rates[[0, 1, 19]].tolist() == [0.5, 0.0, 1.0]
    assert np.isnan(bins.rates[5])


def test_the_calibration_error_weighs_bins_by_their_nodes() -> None:
    # Three nodes of 0.12, one accepted: |1/3 - 0.12|. One of 0.9, accepted: 0.1.
    predicted = np.array([0.12, 0.12, 0.12, 0.9])
    bins = Reliability.of(predicted, np.array([1, 0, 0, 1], bool))
    expected = 3 / 4 * (1 / 3 - 0.12) + 1 / 4 * 0.1
    assert bins.expected_error == pytest.approx(expected)
    none = np.zeros(0)
    assert Reliability.of(none, none.astype(bool)).expected_error is None


def test_confidences_that_come_true_have_no_calibration_error() -> None:
    bins = Reliability.of(np.full(8, 0.25), np.array([1, 0, 0, 0] * 2, bool))
    assert bins.expected_error == pytest.approx(0.0)


def test_ranks_count_nodes() -> None:
    rank = np.array([0, 1, 2, 0, 1, 0])
    is_accepted = np.array([1, 0, 0, 0, 1, 1], bool)
    rates = metrics.rates_by_rank(rank, is_accepted)
    assert rates.accepted.tolist() == [2, 1, 0]
    assert rates.tried.tolist() == [3, 2, 1]


def test_no_nodes_have_no_rates() -> None:
    nobody, none = np.zeros(0, int), np.zeros(0, bool)
    assert not metrics.rates_by_rank(nobody, none).rates.size


def test_shares_of_lengths_add_up() -> None:
    shares = metrics.length_shares([1, 3, 3, 3])
    assert shares.tolist() == [0.0, 0.25, 0.0, 0.75]
    assert not metrics.length_shares([]).size
