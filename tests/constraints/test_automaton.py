"""A small automaton in every loop: constrained text is plain constrained text."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.config import TreeConfig
from eagle_jax.constraints import Guide, process_nodes, prune
from eagle_jax.constraints.automaton import DEAD, START, TokenAutomaton, make_tables
from eagle_jax.decoding import autoregressive, slots, speculative
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.requests import make_requests
from eagle_jax.decoding.state import StopReason
from eagle_jax.drafting import LookupDrafter, TreeDrafter
from eagle_jax.interface import Drafter, Params
from eagle_jax.testing import ToyModel, ToyTarget, assert_same_tokens, assert_valid_tree
from eagle_jax.tree import DraftTree, from_paths
from tests.drafting.toy_model import BlindToyModel, NarrowToyModel
from tests.helpers import make_draws, texts
from tests.joint_distribution import (
    DRAWN_TARGET,
    check_joint_distribution,
    distribution_of,
)

VOCABULARY = 8
TARGET = ToyTarget(vocab_size=VOCABULARY, sharpness=1.0)
MODEL = ToyModel(vocab_size=VOCABULARY, sharpness=1.0, seed=7)
STOP = 7

# (1 2* 3 | 4 5)+ STOP: states are dead, before a word, in its middle, after one, end.
NEXT = np.zeros((6, VOCABULARY), np.int32)
NEXT[START, [1, 4]] = 2, 3
NEXT[2, [2, 3]] = 2, 4
NEXT[3, 5] = 4
NEXT[4, [1, 4, STOP]] = 2, 3, 5
NEXT[5, STOP] = 5
AUTOMATON = TokenAutomaton(vocab_size=VOCABULARY)
TABLES = make_tables(NEXT, np.arange(VOCABULARY))

BUSH = from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (2, 0)])
# None of its tokens is allowed after 4.
NARROW = NarrowToyModel(
    vocab_size=VOCABULARY, sharpness=1.0, seed=7, known=(0, 1, 3, 4, 7)
)
BLIND = BlindToyModel(vocab_size=VOCABULARY, sharpness=1.0, seed=7)
EAGLE2 = TreeConfig(num_nodes=9, depth=3, width=3)
DRAFTERS: dict[str, Drafter] = {
    "eagle2": TreeDrafter(model=MODEL, tree=EAGLE2),
    "eagle2, fewer tokens": TreeDrafter(model=NARROW, tree=EAGLE2),
    "eagle2, one output per level": TreeDrafter(model=BLIND, tree=EAGLE2),
    "bush": TreeDrafter(model=MODEL, tree=BUSH),
    "bush, fewer tokens": TreeDrafter(model=NARROW, tree=BUSH),
    "bush, drawn": TreeDrafter(model=MODEL, tree=BUSH, sampled=True),
    "lookup": LookupDrafter(depth=4, num_matches=2),
}


def constrained(drafter: Drafter | None, rule: Any) -> Decoder:
    return Decoder(
        target=TARGET, drafter=drafter, acceptance=rule, constraint=AUTOMATON
    )


def follows(tokens: list[int]) -> bool:
    state = START
    for token in tokens:
        state = NEXT[state, token]
    return bool(state != DEAD)


PARAMS = Params(target=(), constraint=TABLES)


@pytest.mark.parametrize(
    "name, rule",
    [
        ("eagle2, fewer tokens", "coupled"),
        ("eagle2, one output per level", "coupled"),
        ("lookup", "coupled"),
        ("bush", "greedy"),
        ("eagle2", "rejection"),
        ("bush, drawn", "rejection"),
    ],
)
def test_constrained_text_is_plain_constrained_text(name: str, rule: Any) -> None:
    temperatures = [0.0] * 4 if rule == "greedy" else [1.0, 0.0, 0.7, 3.0]
    requests = make_requests(
        [[1, 2], [3], [0, 0, 1], [2]],
        max_new_tokens=[30, 1, 17, 29],
        temperature=temperatures,
        top_k=[0, 0, 2, 0],
        seeds=range(4),
        stop_tokens=[STOP] if rule == "coupled" else (),
    )
    state = speculative.generate(constrained(DRAFTERS[name], rule), PARAMS, requests)
    plain = autoregressive.generate(constrained(None, rule), PARAMS, requests)
    found, expected = texts(requests, state), texts(requests, plain)
    assert all(follows(text) for text in found)
    if rule == "rejection":  # Other tokens, but where a row takes the most likely.
        found, expected = found[1:2], expected[1:2]
    assert_same_tokens(found, expected)


@pytest.mark.parametrize(
    "name, rule", [("eagle2", "coupled"), ("bush, drawn", "rejection")]
)
def test_a_dead_end_ends_the_text_with_a_reason_of_its_own(
    name: str, rule: Any
) -> None:
    table = NEXT.copy()
    table[4] = DEAD  # 1 2* 3 | 4 5, and nothing after it, not even a stop token.
    params = Params(target=(), constraint=make_tables(table, np.arange(VOCABULARY)))
    requests = make_requests(
        [[1, 2], [3], [0, 0, 1], [2]],
        max_new_tokens=[200, 200, 200, 1],
        temperature=[1.0, 0.0, 0.7, 1.0],
        top_k=[0, 0, 3, 0],
        stop_tokens=[STOP, 0],  # 0 is what an empty mask leaves.
        seeds=range(4),
    )
    ended = [StopReason.DEAD_END] * 3 + [StopReason.MAX_TOKENS]
    plain = autoregressive.generate(constrained(None, rule), params, requests)
    assert plain.stop_reason.tolist() == ended
    assert all(text[-1] in (3, 5) for text in texts(requests, plain)[:3])
    decoder = constrained(DRAFTERS[name], rule)
    drafted = speculative.generate(decoder, params, requests)
    assert drafted.stop_reason.tolist() == ended
    found, expected = texts(requests, drafted), texts(requests, plain)
    assert all(follows(text) for text in found)
    if rule == "coupled":
        assert_same_tokens(found, expected)
    state = slots.init_decode_state(
        decoder, params, batch=4, num_slots=256, num_stop_tokens=2
    )
    prefix, first = slots.prefill(decoder, params, requests, num_slots=256)
    for row in range(4):
        state = slots.insert(prefix, state, row, row)
    while not (state.stop_reason == jnp.array(ended)).all():
        before = state.lengths.sum()
        state, _ = slots.generate(decoder, params, state)
        assert state.lengths.sum() > before or (state.stop_reason != 0).any()
    served = dataclasses.replace(state, rows=requests.settings())
    assert_same_tokens(texts(requests, served), found)

    nothing = dataclasses.replace(params, constraint=make_tables(NEXT * 0, NEXT[0]))
    state, first = slots.prefill(decoder, nothing, requests, num_slots=256)
    assert first.stop_reason.tolist() == [StopReason.DEAD_END] * 4
    assert first.counts.tolist() == [0] * 4


def guide_at(states: list[int], depth: int) -> Guide:
    return Guide(
        constraint=AUTOMATON, params=TABLES, state=jnp.array(states), depth=depth
    )


@jax.jit
def pruned(guide: Guide, trees: DraftTree) -> DraftTree:
    free = jnp.zeros((*trees.tokens.shape, VOCABULARY))
    return prune(guide, trees, process_nodes(guide, free, trees))


@pytest.mark.parametrize("name", ["eagle2", "eagle2, one output per level", "bush"])
def test_forbidden_drafts_are_not_drafted(name: str) -> None:
    drafter = DRAFTERS[name]
    guide = guide_at([START, 3, 4], drafter.depth)
    draws = dataclasses.replace(make_draws(3, temperature=0.0), guide=guide)
    state, roots = drafter.init_state(3, 64), jnp.zeros(3, jnp.int32)
    trees, _ = jax.jit(drafter.propose)((), state, roots, draws)
    kept = pruned(guide, trees)
    np.testing.assert_array_equal(trees.is_node, kept.is_node)
    # After 4 comes 5 alone, and drafting goes on below it.
    assert trees.tokens[1][trees.parents[1] == 0].tolist() == [5]
    assert trees.is_node[1].sum() > 2


@pytest.mark.parametrize("name", ["eagle2, fewer tokens", "bush, fewer tokens"])
def test_nothing_is_drafted_where_no_allowed_token_is_known(name: str) -> None:
    drafter = DRAFTERS[name]
    guide = guide_at([3, START], drafter.depth)
    draws = dataclasses.replace(make_draws(2, temperature=0.0), guide=guide)
    state, roots = drafter.init_state(2, 64), jnp.zeros(2, jnp.int32)
    with jax.debug_nans(True):  # It would rank before every score.
        trees, _ = jax.jit(drafter.propose)((), state, roots, draws)
        trees = pruned(guide, trees)
    for row in range(2):
        assert_valid_tree(jax.tree.map(lambda x, row=row: np.asarray(x)[row], trees))
    assert trees.is_node.sum(axis=1).tolist()[0] == 1
    assert sorted(trees.tokens[1][trees.parents[1] == 0].tolist()) == [1, 4]


def test_what_hangs_below_a_forbidden_draft_is_dropped() -> None:
    guide = guide_at([START], 3)
    tree = DraftTree(
        tokens=jnp.array([[0, 1, 2, 3, 5, 3, 1, 0]]),
        parents=jnp.array([[-1, 0, 0, 1, 1, 2, 3, -1]]),
        log_values=jnp.zeros((1, 8)),
        is_node=jnp.array([[True] * 7 + [False]]),
    )
    kept = jax.tree.map(lambda x: x[0], pruned(guide, tree))
    assert_valid_tree(kept)
    assert np.flatnonzero(kept.is_node).tolist() == [0, 1, 3, 6]


@pytest.mark.parametrize("is_drawn", [False, True])
def test_rejection_keeps_the_constrained_distribution(is_drawn: bool) -> None:
    table = np.zeros((5, 4), np.int32)
    table[START] = 0, 2, 3, 4
    table[2:] = [[0, 2, 0, 0], [3, 0, 4, 2], [2, 3, 4, 0]]
    prompt, num_draws = [1, 2, 3], 6000
    probs = distribution_of(prompt, 1.0, 0)
    expected = np.zeros_like(probs)
    for a, b, c in np.ndindex(4, 4, 4):
        first, second = table[START, a], table[table[START, a], b]
        chances = (
            (probs.sum((1, 2)), START, a),
            (probs[a].sum(1), first, b),
            (probs[a, b], second, c),
        )
        expected[a, b, c] = np.prod(
            [
                p[token]
                * bool(table[at, token])
                / max(p[table[at] != DEAD].sum(), 1e-9)
                for p, at, token in chances
            ]
        )
    requests = make_requests(
        [prompt] * num_draws, max_new_tokens=3, temperature=1.0, seeds=range(num_draws)
    )
    model = ToyModel(vocab_size=4, sharpness=1.0, seed=7)
    decoder = Decoder(
        target=DRAWN_TARGET,
        drafter=TreeDrafter(model=model, tree=BUSH, sampled=is_drawn),
        acceptance="rejection",
        constraint=TokenAutomaton(vocab_size=4),
    )
    params = Params(target=(), constraint=make_tables(table, np.arange(4)))
    state = speculative.generate(decoder, params, requests)
    check_joint_distribution(texts(requests, state), expected)
