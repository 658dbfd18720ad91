"""Multi-round speculative sampling of drawn siblings: the emitted distribution."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax import tree as trees
from tests import reference
from tests.observed import FOREST, VOCAB_SIZE, forest, observed_step

reject_drawn = jax.jit(jax.vmap(trees.reject_drawn))
many_steps = jax.jit(
    jax.vmap(trees.reject_drawn_siblings, in_axes=(None, None, None, 0, 0))
)
draw_children = jax.jit(trees.draw_children, static_argnames="width")


def random_distribution(
    source: np.random.Generator, size: int, num_zeros: int
) -> np.ndarray:
    """Impossible tokens, and some tokens far more likely than others."""
    weights = np.exp(2.0 * source.normal(size=size))
    weights[source.permutation(size)[:num_zeros]] = 0.0
    return weights / weights.sum()


def emitted_distribution(
    target: np.ndarray, draft: np.ndarray, stated: np.ndarray, num_siblings: int
) -> np.ndarray:
    """The distribution of the emitted token over all draws of siblings and of coins.

    Args:
        target: Of the text, `[V]`.
        draft: What siblings are drawn from, without replacement.
        stated: What the rule is told that they were drawn from.
        num_siblings: Siblings per draw.
    """
    possible = np.flatnonzero(draft)
    draws = np.array(list(itertools.permutations(possible, num_siblings)))
    chance_of_draw, mass = np.ones(len(draws)), np.ones(len(draws))
    for column in draws.T:
        chance_of_draw *= draft[column] / mass
        mass = mass - draft[column]
    with np.errstate(divide="ignore"):
        logits = jnp.log(jnp.array(stated, jnp.float32))
    rest = jnp.tile(jnp.array(target, jnp.float32), (len(draws), 1))
    logits = jnp.tile(logits, (len(draws), 1))
    probs, arrives = np.zeros(len(target)), chance_of_draw
    for column in draws.T:
        chance, rest, logits = reject_drawn(rest, logits, jnp.array(column))
        np.add.at(probs, column, arrives * np.asarray(chance, np.float64))
        arrives = arrives * (1.0 - np.asarray(chance, np.float64))
    return probs + arrives @ np.asarray(rest, np.float64)


SIZES = [(2, 1), (3, 2), (4, 1), (4, 3), (5, 2), (6, 4)]


@pytest.mark.parametrize("size, num_siblings", SIZES)
@pytest.mark.parametrize("seed", range(4))
def test_the_emitted_token_has_the_targets_distribution(
    size: int, num_siblings: int, seed: int
) -> None:
    source = np.random.default_rng(seed)
    num_zeros = min(seed % 3, size - num_siblings)
    target = random_distribution(source, size, seed // 2)
    draft = random_distribution(source, size, num_zeros)
    probs = emitted_distribution(target, draft, draft, num_siblings)
    np.testing.assert_allclose(probs, target, atol=1e-6)


@pytest.mark.parametrize("num_siblings", [1, 2, 3])
def test_equal_distributions_accept_the_first_sibling(num_siblings: int) -> None:
    probs = random_distribution(np.random.default_rng(5), 5, 1)
    np.testing.assert_allclose(
        emitted_distribution(probs, probs, probs, num_siblings), probs, atol=1e-6
    )
    chance, _, _ = trees.reject_drawn(
        jnp.array(probs), jnp.log(jnp.array(probs)), jnp.argmax(probs)
    )
    np.testing.assert_allclose(chance, 1.0, atol=1e-6)


@pytest.mark.parametrize("num_siblings", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_a_wrong_draft_distribution_shows(num_siblings: int, seed: int) -> None:
    source = np.random.default_rng(seed)
    target, draft = random_distribution(source, 4, 0), random_distribution(source, 4, 0)
    wrong = 0.7 * draft + 0.3 * random_distribution(source, 4, 0)
    probs = emitted_distribution(target, draft, wrong, num_siblings)
    assert np.abs(probs - target).max() > 1e-3


def test_a_distribution_with_replacement_shows() -> None:
    """Later siblings must be tried against the rest of the distribution."""
    target, draft = np.array([0.1, 0.2, 0.3, 0.4]), np.array([0.4, 0.3, 0.2, 0.1])
    probs = np.zeros(4)
    for first, second in itertools.permutations(range(4), 2):
        arrives = draft[first] * draft[second] / (1.0 - draft[first])
        logits = jnp.log(jnp.array(draft, jnp.float32))
        chance, rest, _ = trees.reject_drawn(
            jnp.array(target), logits, jnp.array(first)
        )
        again, last, _ = trees.reject_drawn(rest, logits, jnp.array(second))
        chance, again = float(chance), float(again)
        probs[first] += arrives * chance
        probs[second] += arrives * (1 - chance) * again
        probs += arrives * (1 - chance) * (1 - again) * np.asarray(last)
    assert np.abs(probs - target).max() > 1e-3


@pytest.mark.parametrize("node", [0, 1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_the_walk_tries_siblings_at_these_chances(node: int, seed: int) -> None:
    source = np.random.default_rng([node, seed])
    target = random_distribution(source, VOCAB_SIZE, seed % 3).astype(np.float32)
    draft = random_distribution(source, VOCAB_SIZE, seed // 3).astype(np.float32)
    tokens = np.zeros(len(FOREST), np.int32)
    for parent in range(3):
        children = np.flatnonzero(np.array(FOREST) == parent)
        drawn = source.choice(
            VOCAB_SIZE, len(children), replace=False, p=draft / draft.sum()
        )
        tokens[children] = drawn
    with np.errstate(divide="ignore"):
        logits = np.log(draft)
    # Other nodes have other distributions: reading a wrong row shows.
    logits_of = source.normal(size=(len(FOREST), VOCAB_SIZE)).astype(np.float32)
    logits_of[node] = logits
    tree = dataclasses.replace(
        forest(tokens.tolist()), draft_logits=jnp.array(logits_of)
    )
    found = observed_step(many_steps, tree, node, jnp.array(target))
    siblings = tokens[np.array(FOREST) == node].tolist()
    expected = reference.drawn_step(target.tolist(), draft.tolist(), siblings)
    np.testing.assert_allclose(found.accepted, expected.accepted, atol=2e-6)
    np.testing.assert_allclose(found.drawn, expected.drawn, atol=2e-6)


def test_a_coin_of_zero_accepts_no_impossible_child() -> None:
    tree = dataclasses.replace(
        forest([9, 1, 2, 3, 0, 0, 0, 0]), draft_logits=jnp.zeros((8, VOCAB_SIZE))
    )
    probs = jnp.array([0.5, 0.0, 0.0, 0.0, 0.25, 0.25])
    step = trees.reject_drawn_siblings(
        tree, jnp.array(0), probs, jnp.zeros(8), jnp.zeros(VOCAB_SIZE)
    )
    assert not step.is_accepted
    assert step.token == 0


def test_a_distribution_that_underflows_is_still_told_apart() -> None:
    """After a sibling of nearly all mass, float32 probabilities would be zeros."""
    logits = jnp.array([0.0, -200.0, -201.0, -300.0])
    probs = jnp.array([0.25, 0.5, 0.125, 0.125])
    _, rest, next_logits = trees.reject_drawn(probs, logits, jnp.array(0))
    chance, _, _ = trees.reject_drawn(rest, next_logits, jnp.array(1))
    expected = (2 / 3) / (1 / (1 + np.exp(-1.0)))
    np.testing.assert_allclose(chance, expected, rtol=1e-5)
