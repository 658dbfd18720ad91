# What breaks the protocols is the subject here, so types may not forbid it.
# pyright: reportIncompatibleMethodOverride=false, reportArgumentType=false
"""Mistakes of drafters are found, and named."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from eagle_jax.config import TreeConfig
from eagle_jax.drafting import (
    LookaheadDrafter,
    LookupDrafter,
    RecyclingDrafter,
    TreeDrafter,
)
from eagle_jax.interface import Drafter
from eagle_jax.testing import ToyDrafter, ToyTarget, assert_valid_drafter
from eagle_jax.tree import chain, from_paths
from tests.drafting.toy_model import ToyModel

pytestmark = pytest.mark.usefixtures("quick_compilation")

VOCABULARY = 5
TARGET = ToyTarget(vocab_size=VOCABULARY)
TOY = ToyDrafter(target=TARGET, tree=TreeConfig(num_nodes=6, depth=2, width=2))


BUSH = from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (2, 0)])
MODEL = ToyModel(vocab_size=VOCABULARY, sharpness=2.0, seed=7)
DRAWN = TreeDrafter(model=MODEL, tree=BUSH, sampled=True)


@pytest.mark.parametrize(
    "drafter",
    [
        TOY,
        DRAWN,
        LookupDrafter(depth=3, num_matches=2),
        LookaheadDrafter(vocab_size=VOCABULARY, level=3, window=2, guesses=2),
        RecyclingDrafter(vocab_size=VOCABULARY, tree=chain(2)),
    ],
    ids=lambda drafter: type(drafter).__name__,
)
def test_right_drafters_pass(drafter: Drafter) -> None:
    params = jnp.float32(0.8) if drafter is TOY else ()
    assert_valid_drafter(drafter, params, TARGET, (), VOCABULARY)


class TooDeep(ToyDrafter):
    @property
    def depth(self) -> int:
        return 1

    def _propose_row(self, *arguments: Any) -> Any:
        return TOY._propose_row(*arguments)


class RowZerosState(ToyDrafter):
    def propose(self, params: Any, state: Any, root: Any, draws: Any) -> Any:
        first = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[0], leaf.shape), state)
        return super().propose(params, first, root, draws)[0], state


class Altered(ToyDrafter):
    field = "tokens"

    def altered(self, values: jax.Array) -> jax.Array:
        return values.at[:, 1].add(VOCABULARY)

    def propose(self, params: Any, state: Any, root: Any, draws: Any) -> Any:
        tree, state = super().propose(params, state, root, draws)
        values = self.altered(getattr(tree, self.field))
        return dataclasses.replace(tree, **{self.field: values}), state


class UnknownToken(Altered):
    pass


class RisingValues(Altered):
    field = "log_values"

    def altered(self, values: jax.Array) -> jax.Array:
        return values.at[:, -1].set(0.0)


class OtherState(ToyDrafter):
    def advance(self, *arguments: Any) -> Any:
        state = super().advance(*arguments)
        return dataclasses.replace(state, length=state.length.astype(jnp.float32))


class TokensFirst(LookupDrafter):
    def init_state(self, batch: int, capacity: int) -> Any:
        state = super().init_state(batch, capacity)
        return dataclasses.replace(state, tokens=state.tokens.T)


class TextAtTheEnd(ToyDrafter):
    """Its drafts depend on how large its state is."""

    def init_state(self, batch: int, capacity: int) -> Any:
        return super().init_state(batch, capacity), jnp.zeros((batch, capacity))

    def prefill_chunk(self, params: Any, state: Any, chunk: Any) -> Any:
        return super().prefill_chunk(params, state[0], chunk), state[1]

    def propose(self, params: Any, state: Any, root: Any, draws: Any) -> Any:
        seen = dataclasses.replace(state[0], length=state[0].length + state[1].shape[1])
        return super().propose(params, seen, root, draws)[0], state

    def advance(self, params: Any, state: Any, verified: Any) -> Any:
        return super().advance(params, state[0], verified), state[1]


@pytest.mark.parametrize(
    ("mutant", "named"),
    [
        (TooDeep, r"TooDeep.propose, round 0, row 0: node 3 has depth 2, .* is 1"),
        (RowZerosState, r"RowZerosState.propose: .* depends on its place in the batch"),
        (UnknownToken, r"UnknownToken.propose, .* must lie in 0 \.\. 4"),
        (RisingValues, r"RisingValues.propose, round 0, row 0: node 5 .* above the"),
        (OtherState, r"OtherState.advance returns .length of shape \[4\] float32"),
        (TextAtTheEnd, r"TextAtTheEnd.init_state: a larger state"),
    ],
)
def test_a_mistake_of_a_drafter_is_found_and_named(mutant: Any, named: str) -> None:
    drafter = mutant(target=TARGET, tree=TOY.tree)
    with pytest.raises(AssertionError, match=named):
        assert_valid_drafter(drafter, jnp.float32(0.8), TARGET, (), VOCABULARY)


def test_a_state_without_the_batch_first_is_named() -> None:
    with pytest.raises(AssertionError, match=r"init_state returns .tokens .* batch of"):
        assert_valid_drafter(TokensFirst(), (), TARGET, (), VOCABULARY)


class Lying(TreeDrafter):
    """Says that its children are drawn from other logits."""

    def propose(self, params: Any, state: Any, root: Any, draws: Any) -> Any:
        tree, state = super().propose(params, state, root, draws)
        if tree.draft_logits is not None:
            said = self.said(tree.draft_logits, tree.parents)
            tree = dataclasses.replace(tree, draft_logits=said)
        return tree, state

    def said(self, logits: jax.Array, parents: jax.Array) -> jax.Array:
        raise NotImplementedError


class Tempered(Lying):
    def said(self, logits: jax.Array, parents: jax.Array) -> jax.Array:
        return 0.8 * logits


class OfAnotherNode(Lying):
    def said(self, logits: jax.Array, parents: jax.Array) -> jax.Array:
        return logits[:, jnp.array([0, 3, 2, 1, 4, 5, 6])]


class OfTheParent(Lying):
    def said(self, logits: jax.Array, parents: jax.Array) -> jax.Array:
        above = jnp.maximum(parents, 0)[..., None]
        return jnp.take_along_axis(logits, above, axis=1)


class BeforeFilters(Lying):
    def said(self, logits: jax.Array, parents: jax.Array) -> jax.Array:
        return jnp.maximum(logits, -3.0)  # What is filtered has -inf.


class LikeliestSecond(TreeDrafter):
    """Its first child is drawn, and those after it are the likeliest."""

    def propose(self, params: Any, state: Any, root: Any, draws: Any) -> Any:
        tree, state = super().propose(params, state, root, draws)
        if tree.draft_logits is None:
            return tree, state
        first = jax.nn.one_hot(tree.tokens[:, 1], VOCABULARY)
        rest = jnp.where(first > 0, -jnp.inf, tree.draft_logits[:, 0])
        _, best = jax.lax.top_k(rest, 2)
        tokens = tree.tokens.at[:, 2:4].set(best)
        return dataclasses.replace(tree, tokens=tokens), state


class WithReplacement(TreeDrafter):
    def propose(self, params: Any, state: Any, root: Any, draws: Any) -> Any:
        tree, state = super().propose(params, state, root, draws)
        if tree.draft_logits is None:
            return tree, state
        second = jax.vmap(jax.random.categorical)(draws.keys, tree.draft_logits[:, 0])
        tokens = tree.tokens.at[:, 2].set(second)
        return dataclasses.replace(tree, tokens=tokens), state


class OneNoiseForAll(TreeDrafter):
    """Draws with a key of its own, the same in all rounds and rows."""

    def propose(self, params: Any, state: Any, root: Any, draws: Any) -> Any:
        keys = jax.random.split(jax.random.key(0), len(root))
        draws = dataclasses.replace(draws, keys=keys)
        return super().propose(params, state, root, draws)


@pytest.mark.parametrize(
    ("mutant", "named"),
    [
        (Tempered, "node 6 is not drawn .* in 4096 trees likely tokens came"),
        (OfAnotherNode, "node [46] is not drawn from the draft_logits of its parent"),
        (OfTheParent, "node [456] is not drawn from the draft_logits of its parent"),
        (BeforeFilters, "after temperature and filters"),
        (LikeliestSecond, "node 2 is not drawn"),
        (WithReplacement, "node 2 is not drawn .* never twice"),
        (OneNoiseForAll, "with draws.keys"),
    ],
)
def test_a_drafter_that_draws_from_other_logits_than_it_says_is_named(
    mutant: Any, named: str
) -> None:
    drafter = mutant(model=MODEL, tree=BUSH, sampled=True)
    with pytest.raises(AssertionError, match=rf"{mutant.__name__}.propose: .*{named}"):
        assert_valid_drafter(drafter, (), TARGET, (), VOCABULARY)
