"""What became of drafted nodes, on trees made by hand."""

import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.decoding.speculative import Round
from eagle_jax.evaluation.nodes import Reliability, VerifiedTree, tried_in
from eagle_jax.tree import DraftTree, match_child, verify

# root -> 1 (.5), 2 (.25), 3 (.25); 1 -> 4 (.1), 5 (.4); 5 -> 6 (.4); 7 is padding.
PARENTS = np.array([-1, 0, 0, 0, 1, 1, 5, -1])
VALUES = np.array([1, 0.5, 0.25, 0.25, 0.1, 0.4, 0.4, 0])
IS_NODE = np.array([True] * 7 + [False])


def tree(*accepted: int) -> VerifiedTree:
    with np.errstate(divide="ignore"):
        log_values = np.log(VALUES)
    return VerifiedTree(parents=PARENTS, log_values=log_values, accepted=accepted)


def test_the_children_of_the_accepted_path_were_tried() -> None:
    assert tree().depths.tolist() == [0, 1, 1, 1, 2, 2, 3, 0]
    assert tree().ranks.tolist() == [0, 0, 1, 2, 1, 0, 0, 0]  # Ties in node order.
    tried = tried_in([tree(1, 5)])
    assert tried["depth"].tolist() == [1, 1, 1, 2, 2, 3]
    assert tried["rank"].tolist() == [0, 1, 2, 1, 0, 0]
    assert tried["is_accepted"].tolist() == [1, 0, 0, 0, 1, 0]
    confidences = [0.5, 0.25, 0.25, 0.2, 0.8, 1.0]
    assert tried["log_confidence"] == pytest.approx(np.log(confidences), abs=1e-6)
    refused = tried_in([tree()])
    assert refused["depth"].tolist() == [1, 1, 1]
    assert not refused["is_accepted"].any()


def test_no_node_is_more_than_certain() -> None:
    values = np.array([0.0, 1e-7])  # Rounding may leave more than 1.
    certain = VerifiedTree(parents=np.array([-1, 0]), log_values=values, accepted=[1])
    assert tried_in([certain])["log_confidence"].tolist() == [0.0]


def test_a_tree_is_that_of_a_round_and_what_was_accepted_in_it() -> None:
    drafted = DraftTree(
        tokens=jnp.arange(8),
        parents=jnp.array(PARENTS),
        log_values=jnp.log(jnp.array(VALUES)),
        is_node=jnp.array(IS_NODE),
    )
    target = jnp.array([1, 5, 0, 0, 0, 7, 0, 0])  # Root -> 1 -> 5 -> something else.
    accepted = verify(
        drafted, lambda node, _: match_child(drafted, node, target[node]), depth=3
    )
    done = Round(
        tree=drafted, acceptance=accepted, tokens=jnp.zeros(4, int), count=jnp.array(3)
    )
    taken = VerifiedTree.of(jax.device_get(done))
    assert taken.accepted == [1, 5]
    assert math.exp(taken.log_values[5]) == pytest.approx(0.4)


def test_a_round_is_read_back_from_its_record() -> None:
    for accepted in ([], [1], [1, 5], [1, 5, 6]):
        record = json.loads(json.dumps(tree(*accepted).to_json()))
        found = VerifiedTree.from_json(record)
        np.testing.assert_array_equal(found.parents, PARENTS)
        assert np.isneginf(found.log_values[7])
        np.testing.assert_allclose(found.log_values[:7], np.log(VALUES[:7]), atol=1e-6)
        assert found.accepted == accepted


@pytest.mark.parametrize(
    "changed",
    [
        {"parents": [-1, 0, 0, 3]},
        {"parents": [-1, 0, -2, 0]},
        {"parents": [-1, 0, 0]},
        {"parents": [], "log_values": []},
        {"log_values": [0, "x", -1, -1]},
        {"accepted": [4]},
        {"accepted": [3]},
    ],
    ids=str,
)
def test_what_is_no_round_is_refused(changed: dict[str, Any]) -> None:
    record = {"parents": [-1, 0, 0, 1], "log_values": [0, -1, -1, -2], "accepted": [1]}
    assert VerifiedTree.from_json(record).accepted == [1]
    with pytest.raises(ValueError, match=r"tree|float"):
        VerifiedTree.from_json(record | changed)


def test_bins_hold_their_lower_edge_and_the_last_holds_one() -> None:
    predicted = np.array([0.0, 0.049, 0.05, 0.95, 1.0])
    bins = Reliability.of(predicted, np.array([0, 1, 0, 1, 1], bool))
    expected = np.zeros(20, int)
    expected[[0, 1, 19]] = 2, 1, 2
    np.testing.assert_array_equal(bins.count, expected)
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
    assert np.isnan(Reliability.of(none, none.astype(bool)).expected_error)
    true = Reliability.of(np.full(8, 0.25), np.array([1, 0, 0, 0] * 2, bool))
    assert true.expected_error == pytest.approx(0.0)
