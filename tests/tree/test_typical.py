"""Typical acceptance against its formula in plain Python."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_jax import tree as trees
from tests import reference
from tests.helpers import as_tree

accept_typical = jax.jit(trees.accept_typical, static_argnames="depth")

Table = dict[reference.Path, list[float]]

NUM_NODES, DEPTH, VOCAB_SIZE = 12, 4, 5


def accepted(
    paths: list[reference.Path],
    next_probs: reference.Draft,
    *,
    num_nodes: int = NUM_NODES,
    depth: int = DEPTH,
) -> tuple[reference.Path, int]:
    """The accepted tokens and the one after them."""
    rows = [next_probs(path) for path in paths]
    # What stands in padding must not matter.
    rows += [[1.0] + [0.0] * (len(rows[0]) - 1)] * (num_nodes - len(paths))
    tree = as_tree(paths, num_nodes)
    outcome = accept_typical(tree, jnp.array(rows, jnp.float32), depth=depth)
    count, nodes = int(outcome.num_accepted), np.asarray(outcome.path).tolist()
    assert nodes[0] == trees.ROOT and len(nodes) == depth + 1
    path = tuple(np.asarray(tree.tokens)[nodes[1 : count + 1]].tolist())
    assert [paths[node] for node in nodes[: count + 1]] == [
        path[:end] for end in range(count + 1)
    ]
    assert set(nodes[count:]) == {nodes[count]}
    return path, int(outcome.next_token)


def judge(
    paths: list[reference.Path], next_probs: reference.Draft
) -> tuple[reference.Path, int]:
    """Medusa, section 2.3.1, path by path, as its code has it."""

    def is_likely(path: reference.Path) -> bool:
        probs = next_probs(path[:-1])
        entropy = -sum(p * math.log(p + 1e-5) for p in probs)
        return probs[path[-1]] > min(0.09, 0.3 * math.exp(-entropy))

    def log_likelihood(path: reference.Path) -> float:
        ends = range(1, len(path) + 1)
        return sum(math.log(next_probs(path[: end - 1])[path[end - 1]]) for end in ends)

    taken = [p for p in paths if all(map(is_likely, reference.prefixes(p)))]
    longest = max(map(len, taken))
    best = max((p for p in taken if len(p) == longest), key=log_likelihood)
    after = next_probs(best)
    return best, after.index(max(after))


@given(
    seed=st.integers(0, 2**32 - 1),
    sharpness=st.sampled_from([0.1, 1.0, 2.0, 8.0]),
    vocab_size=st.sampled_from([1, 2, VOCAB_SIZE]),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_the_path_is_that_of_the_judge(seed, sharpness, vocab_size):
    draft = reference.smooth_draft(seed, vocab_size)
    candidates = reference.expand(draft, depth=DEPTH, width=3)
    paths = reference.rerank(candidates, num_nodes=NUM_NODES)

    def next_probs(path: reference.Path) -> list[float]:
        logits = reference.smooth_logits(seed + 1, path, vocab_size)
        scaled = reference.log_softmax([sharpness * x for x in logits])
        return [math.exp(x) for x in scaled]

    assert accepted(paths, next_probs) == judge(paths, next_probs)


@pytest.mark.parametrize("depth", [1, 4])
def test_the_full_depth_is_accepted_with_every_slot_in_use(depth):
    paths = [tuple(range(level)) for level in range(depth + 1)]
    outcome = accepted(paths, lambda path: [0.2] * 5, num_nodes=depth + 1, depth=depth)
    assert outcome == (paths[-1], 0)


@pytest.mark.parametrize(
    ("probs", "is_accepted"),
    [
        # Nearly certain: the threshold is epsilon, which must be exceeded.
        ([0.91, 0.09], False),
        ([0.90, 0.10], True),
        # The threshold is delta * exp(-entropy) = 0.3 * 0.0625 for 16 equal tokens.
        ([1 / 16] * 16, True),
        # About 0.018 for nearly 16 equal ones: 0.01 is less.
        ([0.99 / 16] * 8 + [0.01] + [0.99 / 16] * 8, False),
        ([1.0, 0.0], False),
    ],
)
def test_a_draft_must_exceed_the_threshold(probs, is_accepted):
    token = 8 if len(probs) > 2 else 1
    path, _ = accepted([(), (token,)], lambda path: probs, num_nodes=3, depth=1)
    assert bool(path) == is_accepted


PAIRS: list[reference.Path] = [(), (0,), (1,), (0, 0), (1, 1)]


@pytest.mark.parametrize(
    ("after_root", "after_one", "wanted"),
    [
        ([0.6, 0.4], [0.1, 0.9], (1, 1)),  # 0.4 * 0.9 against 0.6 * 0.5.
        ([0.6, 0.4], [0.3, 0.7], (0, 0)),  # 0.4 * 0.7.
        ([0.5, 0.5], [0.5, 0.5], (0, 0)),  # A tie: the lower node.
    ],
)
def test_of_equal_lengths_the_more_probable_path_wins(after_root, after_one, wanted):
    table: Table = {(): after_root, (1,): after_one}
    path, _ = accepted(PAIRS, lambda path: table.get(path, [0.5, 0.5]))
    assert path == wanted


def test_a_longer_path_wins_over_a_more_probable_one():
    table: Table = {(): [0.85, 0.15], (0,): [0.05, 0.95], (1,): [0.4, 0.6]}
    path, token = accepted(PAIRS, lambda path: table.get(path, [0.2, 0.8]))
    assert (path, token) == ((1, 1), 1)
