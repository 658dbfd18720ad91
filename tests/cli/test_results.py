"""Runs as JSON."""

from typing import Any

import jax.numpy as jnp

from eagle_jax.cli import results
from eagle_jax.decoding.speculative import Round
from eagle_jax.decoding.state import StopReason
from eagle_jax.generation.rows import Row
from eagle_jax.tree import DraftTree


def run_of(num_tokens: int, accept_lengths: list[int]) -> dict[str, object]:
    row = Row(
        prompt_ids=[1],
        generated_ids=list(range(num_tokens)),
        stop_reason=StopReason.MAX_TOKENS,
        accept_lengths=accept_lengths,
    )
    return results.run_record(row, prompt="", text="", seed=0)


def test_tokens_per_round_leave_out_what_a_limit_cut_off_and_the_prefills_token() -> (
    None
):
    # The second round accepted three drafts; there was room for one token.
    cut, whole = run_of(5, [2, 3]), run_of(4, [2])
    none = run_of(1, [])
    assert cut["accept_lengths"] == [2, 3]
    assert cut["tokens_per_round"] == 4 / 2
    assert whole["tokens_per_round"] == 3.0
    assert none["tokens_per_round"] is None
    sums = results.totals([cut, whole, none], decode_seconds=1.0, compile_seconds=0.0)
    assert (sums["tokens"], sums["rounds"]) == (10, 3)
    assert sums["tokens_per_round"] == (10 - 3) / 3


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
