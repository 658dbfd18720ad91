# What breaks the protocols is the subject here, so types may not forbid it.
# pyright: reportIncompatibleMethodOverride=false, reportArgumentType=false
"""Mistakes of drafters are found, and named."""

import dataclasses
from collections.abc import Callable
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
from eagle_jax.testing import ToyModel, ToyTarget, assert_valid_drafter
from eagle_jax.tree import chain, from_paths

VOCABULARY = 5
TARGET = ToyTarget(vocab_size=VOCABULARY)
MODEL = ToyModel(vocab_size=VOCABULARY, seed=7)
TREE = TreeConfig(num_nodes=6, depth=2, width=2)
BUSH = from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (2, 0)])
# Right about most tokens: few of its drafts are the target's otherwise.
AGREEMENT = jnp.float32(0.8)
NEAR = TreeDrafter(model=ToyModel(vocab_size=VOCABULARY), tree=TREE)
DRAWN = TreeDrafter(model=MODEL, tree=BUSH, sampled=True)


@pytest.mark.parametrize(
    "drafter",
    [
        NEAR,
        DRAWN,
        LookupDrafter(depth=3, num_matches=2),
        LookaheadDrafter(vocab_size=VOCABULARY, level=3, window=2, guesses=2),
        RecyclingDrafter(vocab_size=VOCABULARY, tree=chain(2)),
    ],
    ids=["near", "drawn", "lookup", "lookahead", "recycling"],
)
def test_right_drafters_pass(drafter: Drafter) -> None:
    params = AGREEMENT if drafter is NEAR else ()
    assert_valid_drafter(drafter, params, TARGET, (), VOCABULARY)


def altered(field: str, change: Callable[[Any], Any]) -> Callable[..., Any]:
    """A `propose` that changes one field of its trees."""

    def propose(self: Any, *arguments: Any) -> Any:
        tree, state = TreeDrafter.propose(self, *arguments)
        values = change(getattr(tree, field))
        return dataclasses.replace(tree, **{field: values}), state

    return propose


def with_row_zeros_state(
    self: Any, params: Any, state: Any, root: Any, draws: Any
) -> Any:
    first = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[0], leaf.shape), state)
    return TreeDrafter.propose(self, params, first, root, draws)[0], state


def with_lengths_as_floats(self: Any, *arguments: Any) -> Any:
    state = TreeDrafter.advance(self, *arguments)
    return dataclasses.replace(state, length=state.length.astype(jnp.float32))


class TextAtTheEnd(TreeDrafter):
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


def drawing(change: Callable[[Any, Any], dict[str, Any]]) -> Callable[..., Any]:
    """A `propose` that changes drawn trees."""

    def propose(self: Any, params: Any, state: Any, root: Any, draws: Any) -> Any:
        tree, state = TreeDrafter.propose(self, params, state, root, draws)
        if tree.draft_logits is not None:
            tree = dataclasses.replace(tree, **change(tree, draws))
        return tree, state

    return propose


def lying(said: Callable[[Any], jax.Array]) -> Callable[..., Any]:
    """A `propose` that says that its children are drawn from other logits."""
    return drawing(lambda tree, draws: {"draft_logits": said(tree)})


def likeliest_second(tree: Any, draws: Any) -> dict[str, Any]:
    """Its first child is drawn, and those after it are the likeliest."""
    first = jax.nn.one_hot(tree.tokens[:, 1], VOCABULARY)
    rest = jnp.where(first > 0, -jnp.inf, tree.draft_logits[:, 0])
    return {"tokens": tree.tokens.at[:, 2:4].set(jax.lax.top_k(rest, 2)[1])}


def with_replacement(tree: Any, draws: Any) -> dict[str, Any]:
    second = jax.vmap(jax.random.categorical)(draws.keys, tree.draft_logits[:, 0])
    return {"tokens": tree.tokens.at[:, 2].set(second.astype(jnp.int32))}


def of_the_parent(tree: Any) -> jax.Array:
    above = jnp.maximum(tree.parents, 0)[..., None]
    return jnp.take_along_axis(tree.draft_logits, above, axis=1)


def with_one_noise_for_all(
    self: Any, params: Any, state: Any, root: Any, draws: Any
) -> Any:
    """Draws with a key of its own, the same in all rounds and rows."""
    keys = jax.random.split(jax.random.key(0), len(root))
    draws = dataclasses.replace(draws, keys=keys)
    return TreeDrafter.propose(self, params, state, root, draws)


OTHER_ORDER = jnp.array([0, 3, 2, 1, 4, 5, 6])
MISTAKES: list[tuple[dict[str, Any], str]] = [
    (
        {
            "depth": property(lambda self: 1),
            "propose": lambda self, *given: NEAR.propose(*given),
        },
        r"propose, round 0, row 0: node 3 has depth 2, .* is 1",
    ),
    ({"propose": with_row_zeros_state}, "propose: .* depends on its place in the"),
    (
        {"propose": altered("tokens", lambda x: x.at[:, 1].add(VOCABULARY))},
        r"propose, .* must lie in 0 \.\. 4",
    ),
    (
        {"propose": altered("log_values", lambda x: x.at[:, -1].set(0.0))},
        "propose, round 0, row 0: node 5 .* above the",
    ),
    (
        {"advance": with_lengths_as_floats},
        r"advance returns length of shape \[\d+\] float32",
    ),
    (
        {"init_state": lambda self, batch, capacity: {"x": jnp.zeros((capacity, 4))}},
        r"init_state .* returns x of shape",
    ),
]
LIES: list[tuple[Any, str]] = [
    (lying(lambda tree: 0.8 * tree.draft_logits), "node 6 .* 4096 trees likely tokens"),
    (lying(lambda tree: tree.draft_logits[:, OTHER_ORDER]), "node [46] is not drawn"),
    (
        lying(of_the_parent),
        "node [456] is not drawn from the draft_logits of",
    ),
    # What is filtered has -inf.
    (lying(lambda tree: jnp.maximum(tree.draft_logits, -3.0)), "after temperature and"),
    (drawing(likeliest_second), "node 2 is not drawn"),
    (drawing(with_replacement), "node 2 is not drawn .* never twice"),
    (with_one_noise_for_all, "with draws.keys"),
]


CASES = [(methods, NEAR, named) for methods, named in MISTAKES]
CASES += [({"propose": propose}, DRAWN, named) for propose, named in LIES]


@pytest.mark.parametrize(("methods", "drafter", "named"), CASES)
def test_a_mistake_of_a_drafter_is_found_and_named(
    methods: dict[str, Any], drafter: TreeDrafter, named: str
) -> None:
    mutant = type("Mutant", (TreeDrafter,), methods)(**vars(drafter))
    params = AGREEMENT if drafter is NEAR else ()
    with pytest.raises(AssertionError, match=f"Mutant.*{named}"):
        assert_valid_drafter(mutant, params, TARGET, (), VOCABULARY)


def test_drafts_that_depend_on_the_size_of_the_state_are_named() -> None:
    drafter = TextAtTheEnd(model=NEAR.model, tree=TREE)
    with pytest.raises(AssertionError, match=r"TextAtTheEnd.init_state: a larger"):
        assert_valid_drafter(drafter, AGREEMENT, TARGET, (), VOCABULARY)
