import collections
import dataclasses
import math
import random

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_jax import tree as trees
from tests import reference
from tests.helpers import as_tree, on_platform
from tests.observed import FOREST, REFUSE, VOCAB_SIZE, forest, observed_step

match_child = jax.jit(trees.match_child)
reject_siblings = jax.jit(trees.reject_siblings)


def follow(tree, target_tokens, *, depth: int) -> trees.Acceptance:
    """Greedy verification of a target whose tokens after every node are known."""
    return trees.verify(
        tree,
        lambda node, _: trees.match_child(tree, node, target_tokens[node]),
        depth=depth,
    )


def reject(tree, probs, coins, noise, *, depth: int) -> trees.Acceptance:
    """Rejection under a target whose distributions after every node are known."""
    return trees.verify(
        tree,
        lambda node, _: trees.reject_siblings(tree, node, probs[node], coins, noise),
        depth=depth,
    )


def follow_on_gpus(*arguments, depth: int) -> trees.Acceptance:
    with on_platform("cuda"):
        return follow(*arguments, depth=depth)


verify_greedy = jax.jit(follow, static_argnames="depth")
verify_on_gpus = jax.jit(follow_on_gpus, static_argnames="depth")
match_path = jax.jit(trees.match_path, static_argnames="depth")
verify_rejection = jax.jit(reject, static_argnames="depth")

many_steps = jax.jit(jax.vmap(trees.reject_siblings, in_axes=(None, None, None, 0, 0)))
many_rejections = jax.jit(
    jax.vmap(
        lambda *arrays: reject(*arrays, depth=2),
        in_axes=(None, None, 0, 0),
    )
)

SEEDS = st.integers(0, 2**32 - 1)
HIGHEST_COIN = np.nextafter(np.float32(1), np.float32(0))


def accepted(
    tree: trees.DraftTree, acceptance: trees.Acceptance
) -> tuple[reference.Path, int]:
    """The accepted tokens and the one after them."""
    nodes = np.asarray(acceptance.path)
    count = int(acceptance.num_accepted)
    assert nodes[0] == trees.ROOT
    np.testing.assert_array_equal(
        np.asarray(tree.parents)[nodes[1 : count + 1]], nodes[:count]
    )
    assert (nodes[count:] == nodes[count]).all()
    tokens = np.asarray(tree.tokens)[nodes[1 : count + 1]]
    return tuple(tokens.tolist()), int(acceptance.next_token)


def greedy(
    paths: list[reference.Path], next_token, *, num_nodes: int, depth: int
) -> tuple[reference.Path, int]:
    tree = as_tree(paths, num_nodes)
    target_tokens = [next_token(path) for path in paths]
    target_tokens += [0] * (num_nodes - len(paths))
    target_tokens = jnp.array(target_tokens, jnp.int32)
    found = verify_greedy(tree, target_tokens, depth=depth)
    on_gpus = verify_on_gpus(tree, target_tokens, depth=depth)
    chex.assert_trees_all_equal(found, on_gpus)
    chex.assert_trees_all_equal(found, match_path(tree, target_tokens, depth=depth))
    return accepted(tree, found)


@given(seed=SEEDS, vocab_size=st.sampled_from([1, 2, 5]))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_greedy_path_is_that_of_the_judge(seed, vocab_size):
    draft = reference.tied_draft(seed, vocab_size)
    judged = reference.expand(draft, depth=4, width=3)
    paths = reference.rerank(judged, num_nodes=12)

    def next_token(path: reference.Path) -> int:
        source = random.Random(f"target {seed} {path}")
        likely = reference.top_children(draft(path), 2)
        return source.choice(likely or [0])

    expected = reference.accept_greedy(paths, next_token)
    assert greedy(paths, next_token, num_nodes=12, depth=4) == expected


@pytest.mark.parametrize("depth", [1, 3])
def test_token_zero_is_not_accepted_through_padding(depth):
    outcome = greedy([(), (1,)], lambda path: 0, num_nodes=6, depth=depth)
    assert outcome == ((), 0)


def test_match_child_ignores_what_is_not_a_node():
    tree = as_tree([(), (1,)], 3)
    tree = dataclasses.replace(tree, parents=jnp.array([-1, 0, 0], jnp.int32))
    step = match_child(tree, jnp.array(0, jnp.int32), jnp.array(0, jnp.int32))
    assert not step.is_accepted


@st.composite
def distributions(draw: st.DrawFn) -> list[float]:
    """Weights of the target: impossible tokens, and not normalised."""
    weights = draw(
        st.lists(st.integers(0, 6), min_size=VOCAB_SIZE, max_size=VOCAB_SIZE)
    )
    weights[draw(st.integers(0, VOCAB_SIZE - 1))] += 1
    scale = draw(st.sampled_from([1.0, sum(weights)]))
    return [float(np.float32(weight / scale)) for weight in weights]


def check_step(tokens: list[int], node: int, probs: list[float]) -> None:
    siblings = [t for t, p in zip(tokens, FOREST, strict=True) if p == node]
    found = observed_step(
        many_steps, forest(tokens), node, jnp.array(probs, jnp.float32)
    )
    expected = reference.rejection_step(probs, siblings)
    np.testing.assert_allclose(found.accepted, expected.accepted, atol=1e-6)
    np.testing.assert_allclose(found.drawn, expected.drawn, atol=1e-6)
    emitted = np.array(found.drawn)
    np.add.at(emitted, siblings, found.accepted)
    np.testing.assert_allclose(emitted, np.array(probs) / sum(probs), atol=1e-6)


@given(
    tokens=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=8, max_size=8),
    node=st.sampled_from([0, 1, 2, 3]),
    probs=distributions(),
)
@settings(max_examples=30, deadline=None, derandomize=True)
def test_one_rejection_step_has_the_distribution_of_the_target(tokens, node, probs):
    check_step(tokens, node, probs)


@pytest.mark.parametrize("repeated", [[9, 2, 2, 4], [9, 2, 4, 2], [9, 2, 2, 2]])
def test_repeated_siblings_keep_the_distribution_of_the_target(repeated):
    check_step([*repeated, 0, 1, 0, 3], 0, [0.125, 0.0, 0.5, 0.125, 0.25, 0.0])


def test_siblings_that_cover_the_target_keep_its_distribution():
    check_step([9, 2, 4, 5, 0, 1, 0, 3], 0, [0.0, 0.0, 0.5, 0.0, 0.2, 0.3])


def step_at_root(
    tokens: list[int], probs: list[float], coins: list[float]
) -> trees.Step:
    return reject_siblings(
        forest(tokens),
        jnp.array(0, jnp.int32),
        jnp.array(probs, jnp.float32),
        jnp.array([*coins, *[REFUSE] * (len(FOREST) - len(coins))], jnp.float32),
        jnp.zeros(VOCAB_SIZE),
    )


def test_a_coin_of_zero_accepts_no_impossible_child():
    step = step_at_root(
        [9, 1, 2, 3, 0, 0, 0, 0], [0.5, 0.0, 0.0, 0.0, 0.25, 0.25], [0.0] * 8
    )
    assert not step.is_accepted
    assert step.token == 0


def test_a_coin_of_zero_accepts_no_repeated_child():
    step = step_at_root(
        [9, 4, 4, 4, 0, 0, 0, 0],
        [0.5, 0.0, 0.0, 0.0, 0.5, 0.0],
        [REFUSE, REFUSE, 0.0, 0.0],
    )
    assert not step.is_accepted
    assert step.token == 0


def test_the_earliest_accepted_sibling_wins():
    step = step_at_root([9, 3, 4, 5, 0, 0, 0, 0], [0.125] * 4 + [0.25] * 2, [0.0] * 8)
    assert step.is_accepted
    assert (step.child, step.token) == (1, 3)


def test_the_last_sibling_takes_all_that_is_left():
    tokens = [9, 2, 4, 5, 0, 1, 0, 3]
    weights = np.random.default_rng(0).random((2000, 3), np.float32) + 1e-3
    probs = np.zeros((2000, VOCAB_SIZE), np.float32)
    probs[:, [2, 4, 5]] = weights / weights.sum(axis=1, keepdims=True)
    coins = np.full(8, REFUSE, np.float32)
    coins[3] = HIGHEST_COIN
    over_probs = jax.jit(
        jax.vmap(trees.reject_siblings, in_axes=(None, None, 0, None, None))
    )
    steps = over_probs(
        forest(tokens),
        jnp.array(0, jnp.int32),
        jnp.array(probs),
        jnp.array(coins),
        jnp.zeros(VOCAB_SIZE),
    )
    assert steps.is_accepted.all()
    assert (steps.child == 3).all()
    assert (steps.token == 5).all()


def target(seed: int, vocab_size: int) -> reference.Draft:
    """Probabilities of a next token; some are zero."""

    def next_probs(path: reference.Path) -> list[float]:
        source = random.Random(f"{seed} {path}")
        weights = [source.choice([0, 1, 2, 4]) for _ in range(vocab_size - 1)] + [1]
        return [weight / sum(weights) for weight in weights]

    return next_probs


JOINT_PATHS: list[reference.Path] = [(), (3,), (0,), (1,), (3, 1), (3, 3), (0, 2)]


@pytest.mark.parametrize("seed", [0, 1])
def test_rejection_has_the_joint_distribution_of_the_judge(seed):
    draws = 20_000
    next_probs = target(seed, 4)
    tree = as_tree(JOINT_PATHS, 8)
    probs = jnp.array([next_probs(p) for p in JOINT_PATHS] + [[0.25] * 4], jnp.float32)
    coin_key, noise_key = jax.random.split(jax.random.key(seed))
    outcomes = many_rejections(
        tree,
        probs,
        jax.random.uniform(coin_key, (draws, 8)),
        jax.random.gumbel(noise_key, (draws, 4)),
    )
    rows = zip(
        np.asarray(outcomes.path).tolist(),
        np.asarray(outcomes.num_accepted).tolist(),
        np.asarray(outcomes.next_token).tolist(),
        strict=True,
    )
    counts = collections.Counter(
        (JOINT_PATHS[path[count]], token) for path, count, token in rows
    )
    expected = reference.rejection_distribution(JOINT_PATHS, next_probs)
    assert math.isclose(math.fsum(expected.values()), 1.0)
    assert set(counts) <= {outcome for outcome, prob in expected.items() if prob > 0.0}
    distance = sum(abs(counts[o] / draws - prob) for o, prob in expected.items()) / 2
    # Twice the mean distance of that many draws from their own distribution.
    spread = sum(math.sqrt(prob * (1 - prob)) for prob in expected.values())
    assert distance < spread * math.sqrt(2 / (math.pi * draws))
