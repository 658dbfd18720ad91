"""Runs as JSON."""

from typing import Any

import jax.numpy as jnp

from eagle_jax.cli import results
from eagle_jax.decoding.speculative import Round
from eagle_jax.tree import Acceptance, DraftTree


def test_a_tree_is_shown_without_the_padding_between_its_nodes() -> None:
    tree = DraftTree(
        tokens=jnp.array([5, 6, 0, 7, 8]),
        parents=jnp.array([-1, 0, -1, 0, 3]),
        log_values=jnp.array([0.0, -1.0, -jnp.inf, -2.0, -3.0]),
        is_node=jnp.array([True, True, False, True, True]),
    )
    accepted = Acceptance(
        path=jnp.array([0, 3, 4, 0]),
        num_accepted=jnp.array(2),
        next_token=jnp.array(9),
    )
    nothing: Any = None
    done = Round(tree=tree, acceptance=accepted, tokens=nothing, count=nothing)
    assert results.tree_record(done) == {
        "tokens": [5, 6, 7, 8],
        "parents": [-1, 0, 0, 2],
        "depths": [0, 1, 1, 2],
        "log_values": [0.0, -1.0, -2.0, -3.0],
        "path": [0, 2, 3],
        "next_token": 9,
    }


def test_a_run_slower_than_plain_decoding_says_what_a_round_cost_and_brought() -> None:
    totals = {"tokens_per_round": 2.5, "speedup": 0.5}
    reason = results.explain_speedup(totals)
    assert reason and "as long as 5.00 tokens" in reason and "brought 2.50" in reason
    assert "eagle-jax tune" in reason
    assert results.explain_speedup(totals | {"speedup": 1.0}) is None
    assert results.explain_speedup({"tokens_per_round": 2.5}) is None
