import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_jax import tree as trees
from eagle_jax.testing.asserts import assert_valid_tree
from tests import reference

rerank = jax.jit(trees.rerank, static_argnames=("num_nodes", "rank_by", "use_rerank"))

ROOT_TOKEN = 9
SEEDS = st.integers(0, 2**32 - 1)
# What each row of table 3 ranks by, and whether it reranks.
HOW = {
    "paper": ("value", True),
    "by_confidence": ("confidence", True),
    "no_rerank": ("value", False),
    "no_both": ("confidence", False),
}


def pool(judged: list[reference.Candidate], *, depth, width) -> trees.Candidates:
    """Lays the judge's candidates out in slots; the slots left over do not exist."""
    count = width + (depth - 1) * width**2
    tokens = np.zeros(count, np.int32)
    parents = np.full(count, -1, np.int32)
    scores = np.full((2, count), -np.inf, np.float32)
    is_expanded = np.zeros(count, bool)
    slots: dict[reference.Path, int] = {}
    next_slot: dict[reference.Path, int] = {}
    for node in judged:
        above = node.path[:-1]
        if above not in next_slot:
            # Parents come up in the order in which they were expanded.
            rank = sum(len(path) == len(above) for path in next_slot)
            start = width + (len(above) - 1) * width**2 if above else 0
            next_slot[above] = start + rank * width
        slot = next_slot[above]
        next_slot[above] += 1
        slots[node.path] = slot
        tokens[slot] = node.path[-1]
        parents[slot] = slots.get(above, -1)
        scores[:, slot] = node.log_value, node.log_confidence
        is_expanded[slot] = node.is_expanded
    return trees.Candidates(
        tokens=jnp.array(tokens),
        parents=jnp.array(parents),
        log_values=jnp.array(scores[0]),
        log_confidences=jnp.array(scores[1]),
        is_expanded=jnp.array(is_expanded),
    )


def paths_of(tree: trees.DraftTree) -> list[reference.Path]:
    """The real nodes as paths, in the order of the tree."""
    tokens, parents, is_node = (
        np.asarray(field).tolist()
        for field in (tree.tokens, tree.parents, tree.is_node)
    )
    paths: list[reference.Path] = [()]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        paths.append((*paths[parent], token) if parent >= 0 else ())
    return [path for path, real in zip(paths, is_node, strict=True) if real]


@pytest.mark.parametrize(
    ("depth", "width", "num_nodes", "how"),
    [
        (1, 1, 2, "paper"),
        (1, 3, 1, "paper"),
        (1, 3, 2, "by_confidence"),
        (1, 3, 4, "paper"),
        (2, 3, 8, "paper"),
        (2, 3, 13, "paper"),
        (4, 1, 5, "paper"),
        (4, 1, 8, "by_confidence"),
        (4, 3, 1, "paper"),
        (4, 3, 2, "paper"),
        (4, 3, 8, "paper"),
        (4, 3, 8, "by_confidence"),
        (4, 3, 8, "no_rerank"),
        (4, 3, 8, "no_both"),
        (4, 3, 31, "paper"),
        (4, 3, 31, "by_confidence"),
        (4, 3, 31, "no_rerank"),
        (4, 3, 36, "paper"),
    ],
)
@given(seed=SEEDS, vocab_size=st.sampled_from([2, 5]))
@settings(max_examples=20, deadline=None, derandomize=True)
def test_tree_is_that_of_the_judge(depth, width, num_nodes, how, seed, vocab_size):
    rank_by, use_rerank = HOW[how]
    judged = reference.expand(
        reference.tied_draft(seed, vocab_size),
        depth=depth,
        width=width,
        rank_by=rank_by,
    )
    tree = rerank(
        pool(judged, depth=depth, width=width),
        jnp.array(ROOT_TOKEN, jnp.int32),
        num_nodes=num_nodes,
        rank_by=rank_by,
        use_rerank=use_rerank,
    )
    assert tree.tokens.shape == (num_nodes,)
    assert_valid_tree(tree)
    assert tree.tokens[0] == ROOT_TOKEN
    expected = reference.rerank(
        judged, num_nodes=num_nodes, rank_by=rank_by, use_rerank=use_rerank
    )
    assert paths_of(tree) == expected
    values = {node.path: node.log_value for node in judged} | {(): 0.0}
    np.testing.assert_array_equal(
        np.asarray(tree.log_values)[np.asarray(tree.is_node)],
        [values[path] for path in expected],
    )


def test_a_certain_child_does_not_displace_its_parent():
    chain = [
        reference.Candidate((0,), 0.0, 0.0, True),
        reference.Candidate((0, 0), 0.0, 0.0, True),
        reference.Candidate((0, 0, 0), 0.0, 0.0, True),
        reference.Candidate((0, 0, 0, 0), 0.0, 0.0, True),
    ]
    tree = rerank(
        pool(chain, depth=4, width=1), jnp.array(ROOT_TOKEN, jnp.int32), num_nodes=2
    )
    assert paths_of(tree) == [(), (0,)]


@pytest.mark.parametrize("variant", ["jit", "eager"])
def test_minus_zero_does_not_orphan_a_certain_child(variant):
    def grow_and_keep(first: jax.Array, second: jax.Array) -> trees.DraftTree:
        tokens = jnp.zeros(1, jnp.int32)
        candidates, frontier = trees.first_level(tokens, first)
        candidates, _ = trees.expand(candidates, frontier, tokens[None], second)
        return trees.rerank(candidates, jnp.array(ROOT_TOKEN, jnp.int32), num_nodes=2)

    run = jax.jit(grow_and_keep) if variant == "jit" else grow_and_keep
    assert paths_of(run(jnp.array([-0.0]), jnp.array([[0.0]]))) == [(), (0,)]


def test_orphans_and_what_hangs_on_them_are_dropped():
    judged = [
        reference.Candidate((0,), -1.0, -1.0, True),
        reference.Candidate((1,), -2.0, -2.0, True),
        reference.Candidate((0, 3), -3.5, -2.5, False),
        reference.Candidate((1, 4), -2.25, -0.25, True),
        reference.Candidate((1, 4, 5), -2.5, -0.25, True),
    ]
    tree = rerank(
        pool(judged, depth=4, width=3),
        jnp.array(ROOT_TOKEN, jnp.int32),
        num_nodes=4,
        rank_by="confidence",
    )
    assert_valid_tree(tree)
    assert paths_of(tree) == [(), (0,)]


def test_without_candidates_only_the_root_is_left():
    tree = rerank(
        pool([], depth=4, width=3), jnp.array(ROOT_TOKEN, jnp.int32), num_nodes=8
    )
    assert_valid_tree(tree)
    assert paths_of(tree) == [()]
    assert math.isinf(tree.log_values[1])
