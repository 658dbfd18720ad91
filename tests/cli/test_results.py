"""Runs as JSON."""

from typing import Any

import jax.numpy as jnp

from eagle_jax.cli import results
from eagle_jax.decoding.speculative import Round
from eagle_jax.tree import DraftTree


def test_a_tree_is_shown_without_the_padding_between_its_nodes() -> None:
    tree = DraftTree(
        tokens=jnp.array([[5, 6, 0, 7, 8]]),
        parents=jnp.array([[-1, 0, -1, 0, 3]]),
        log_values=jnp.array([[0.0, -1.0, -jnp.inf, -2.0, -3.0]]),
        is_node=jnp.array([[True, True, False, True, True]]),
    )
    nothing: Any = None
    done = Round(tree=tree, acceptance=nothing, tokens=nothing, count=nothing)
    assert results.tree_record(done, 0) == {
        "tokens": [5, 6, 7, 8],
        "parents": [-1, 0, 0, 2],
        "depths": [0, 1, 1, 2],
        "log_values": [0.0, -1.0, -2.0, -3.0],
    }
