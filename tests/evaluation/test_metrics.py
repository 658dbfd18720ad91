"""Metrics against examples worked out by hand."""

import numpy as np
import pytest

from eagle_jax.evaluation.metrics import Reliability


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
