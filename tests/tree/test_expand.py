import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_jax import tree as trees
from tests import reference

first_level = jax.jit(trees.first_level)
expand = jax.jit(trees.expand, static_argnames="rank_by")
top_children = jax.jit(trees.top_children, static_argnames="width")

SEEDS = st.integers(0, 2**32 - 1)
SIZES = [(1, 1), (1, 3), (2, 3), (4, 1), (4, 3)]


def as_row(log_probs: list[float], width: int) -> tuple[list[int], list[float]]:
    """What a drafter hands over: impossible children follow the possible ones."""
    tokens = reference.top_children(log_probs, width)
    missing = width - len(tokens)
    return (
        tokens + [0] * missing,
        [log_probs[token] for token in tokens] + [-math.inf] * missing,
    )


def grow(draft, *, depth, width, rank_by="value"):
    """Expands with a draft that is asked path by path.

    Returns the candidates and, level by level, each frontier with its paths; the
    path of a row that stands for no node is None.
    """
    tokens, log_probs = as_row(draft(()), width)
    candidates, frontier = first_level(
        jnp.array(tokens, jnp.int32), jnp.array(log_probs, jnp.float32)
    )
    levels = [(frontier, paths_of(frontier, [()] * width))]
    for _ in range(1, depth):
        # Rows that stand for no node claim certain children.
        rows = [
            (list(range(width)), [0.0] * width)
            if path is None
            else as_row(draft(path), width)
            for path in levels[-1][1]
        ]
        candidates, frontier = expand(
            candidates,
            frontier,
            jnp.array([row[0] for row in rows], jnp.int32),
            jnp.array([row[1] for row in rows], jnp.float32),
            rank_by=rank_by,
        )
        levels.append((frontier, paths_of(frontier, levels[-1][1])))
    return candidates, levels


def paths_of(frontier: trees.Frontier, above: list) -> list[reference.Path | None]:
    tokens, rows, log_values = (
        np.asarray(field).tolist()
        for field in (frontier.tokens, frontier.parents, frontier.log_values)
    )
    return [
        (*above[row], token) if log_value > -math.inf else None
        for token, row, log_value in zip(tokens, rows, log_values, strict=True)
    ]


def as_judged(candidates: trees.Candidates) -> list[reference.Candidate]:
    tokens, parents, log_values, log_confidences, is_expanded = (
        np.asarray(field).tolist() for field in vars(candidates).values()
    )
    paths: list[reference.Path] = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    rows = zip(paths, log_values, log_confidences, is_expanded, strict=True)
    return [reference.Candidate(*row) for row in rows if row[1] > -math.inf]


@pytest.mark.parametrize("rank_by", ["value", "confidence"])
@pytest.mark.parametrize(("depth", "width"), SIZES)
@given(seed=SEEDS, vocab_size=st.sampled_from([1, 2, 5]))
@settings(max_examples=15, deadline=None, derandomize=True)
def test_candidates_are_those_of_the_judge(depth, width, rank_by, seed, vocab_size):
    draft = reference.tied_draft(seed, vocab_size)
    candidates, _ = grow(draft, depth=depth, width=width, rank_by=rank_by)
    expected = reference.expand(draft, depth=depth, width=width, rank_by=rank_by)
    assert as_judged(candidates) == expected


@pytest.mark.parametrize("rank_by", ["value", "confidence"])
@given(seed=SEEDS, vocab_size=st.sampled_from([2, 5]))
@settings(max_examples=15, deadline=None, derandomize=True)
def test_frontier_agrees_with_the_candidates(rank_by, seed, vocab_size):
    draft = reference.tied_draft(seed, vocab_size)
    candidates, levels = grow(draft, depth=4, width=3, rank_by=rank_by)
    for frontier, paths in levels:
        exists = np.array([path is not None for path in paths])
        at = np.asarray(frontier.candidates)[exists]
        for name in ("tokens", "log_values"):
            np.testing.assert_array_equal(
                np.asarray(getattr(frontier, name))[exists],
                np.asarray(getattr(candidates, name))[at],
            )
        assert np.asarray(candidates.is_expanded)[at].all()


@given(seed=SEEDS, vocab_size=st.sampled_from([2, 5]))
@settings(max_examples=15, deadline=None, derandomize=True)
def test_frontier_sees_its_ancestors_among_the_expanded(seed, vocab_size):
    draft = reference.tied_draft(seed, vocab_size)
    _, levels = grow(draft, depth=4, width=3)
    expanded: list[reference.Path | None] = []
    for frontier, paths in levels:
        expanded += paths
        visible = np.asarray(frontier.visible)
        assert visible.shape == (3, len(expanded))
        assert visible.any(axis=1).all()
        for row, path in zip(visible, paths, strict=True):
            if path is not None:
                seen = {expanded[column] for column in np.flatnonzero(row)}
                assert seen == reference.prefixes(path)
                assert row.sum() == len(path)


def test_values_rank_paths_and_confidences_rank_steps():
    def draft(path):
        return {(): [-0.25, -2.0], (0,): [-0.5, -1.0]}.get(path, [0.0, -0.25])

    _, by_value = grow(draft, depth=2, width=2)
    _, by_confidence = grow(draft, depth=2, width=2, rank_by="confidence")
    assert by_value[-1][1] == [(0, 0), (0, 1)]
    assert by_confidence[-1][1] == [(1, 0), (1, 1)]


def test_children_of_missing_nodes_do_not_exist():
    candidates, levels = grow(lambda path: [0.0], depth=3, width=3)
    assert [node.path for node in as_judged(candidates)] == [
        (0,),
        (0, 0),
        (0, 0, 0),
    ]
    assert [path for _, paths in levels for path in paths if path is not None] == [
        (0,),
        (0, 0),
        (0, 0, 0),
    ]
    assert np.asarray(candidates.is_expanded).sum() == 3


def test_a_signed_zero_ranks_like_zero():
    minus = jnp.array([-0.0, -0.0], jnp.float32)
    mixed = jnp.array([[-0.0, -0.0], [0.0, -1.0]], jnp.float32)
    tokens = jnp.array([0, 1], jnp.int32)
    candidates, frontier = first_level(tokens, minus)
    candidates, frontier = expand(
        candidates,
        frontier,
        jnp.tile(tokens, (2, 1)),
        mixed,
        rank_by="confidence",
    )
    scores = np.concatenate([candidates.log_values, candidates.log_confidences])
    assert not np.signbit(scores[scores == 0.0]).any()
    np.testing.assert_array_equal(frontier.candidates, [2, 3])


@given(
    seed=SEEDS,
    rows=st.sampled_from([(), (3,), (2, 3), (1, 2, 2)]),
    vocab_size=st.sampled_from([1, 5, 40]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
@settings(max_examples=30, deadline=None, derandomize=True)
def test_top_children_rank_each_row_alone_in_float32(seed, rows, vocab_size, dtype):
    rng = np.random.default_rng(seed)
    # Few values: most are tied, and some tokens are impossible.
    logits = rng.choice([-1.0, 0.0, 0.5, -math.inf], size=(*rows, vocab_size))
    logits[..., rng.integers(vocab_size)] = 0.0
    # They are exact in bfloat16, so float32's tolerance holds for both.
    tokens, log_probs = top_children(jnp.array(logits, dtype), width=4)
    assert tokens.shape == log_probs.shape == (*rows, 4)
    assert (tokens.dtype, log_probs.dtype) == (jnp.int32, jnp.float32)
    for row in np.ndindex(*rows):
        best = np.argsort(-logits[row], kind="stable")[:4]
        missing = [0] * (4 - len(best))
        np.testing.assert_array_equal(tokens[row], [*best, *missing])
        wanted = logits[row][best] - np.log(np.exp(logits[row]).sum())
        expected = [*wanted, *(-math.inf for _ in missing)]
        # float32 against float64: a few units in the last place of small numbers.
        np.testing.assert_allclose(log_probs[row], expected, atol=2e-6)


def test_top_children_of_a_certain_token_have_log_probability_zero():
    tokens, log_probs = top_children(jnp.array([0.0, 400.0, 0.0]), width=2)
    np.testing.assert_array_equal(tokens, [1, 0])
    np.testing.assert_array_equal(log_probs, [0.0, -400.0])
    assert not np.signbit(log_probs[0])


def test_no_child_is_worth_more_than_its_parent_where_logits_are_computed():
    """Also where XLA fuses what made the logits with what they go through here."""

    @jax.jit
    def children(logits, factors, noise):
        top = logits.max(axis=-1, keepdims=True)
        certain = jnp.where(logits == top, logits, -jnp.inf) + noise
        return trees.top_children(factors * certain, 2)[1]

    rng = np.random.default_rng(0)
    logits, noise = rng.normal(size=(2, 256, 8)).astype(np.float32) * 4
    factors = rng.uniform(0.3, 3, size=(256, 1)).astype(np.float32)
    assert (children(logits, factors, noise)[:, 0] <= 0).all()
