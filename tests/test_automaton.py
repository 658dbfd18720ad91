"""A small automaton in every loop: constrained text is plain constrained text."""

from typing import Any

import numpy as np
import pytest

from eagle_jax.automaton import DEAD, START, TokenAutomaton, make_tables
from eagle_jax.config import TreeConfig
from eagle_jax.decoding import autoregressive, speculative
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.requests import make_requests
from eagle_jax.drafting import (
    LookaheadDrafter,
    LookupDrafter,
    RecyclingDrafter,
    TreeDrafter,
)
from eagle_jax.interface import Drafter, Params
from eagle_jax.testing import ToyTarget, assert_same_tokens
from eagle_jax.tree import chain, from_paths
from tests.drafting.toy_model import BlindToyModel, NarrowToyModel, ToyModel
from tests.helpers import texts

pytestmark = pytest.mark.usefixtures("quick_compilation")

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
EAGLE2 = TreeConfig(num_nodes=12, depth=4, width=3)
DRAFTERS: dict[str, Drafter] = {
    "eagle2": TreeDrafter(model=MODEL, tree=EAGLE2),
    "eagle2, fewer tokens": TreeDrafter(model=NARROW, tree=EAGLE2),
    "eagle2, one output per level": TreeDrafter(model=BLIND, tree=EAGLE2),
    "bush": TreeDrafter(model=MODEL, tree=BUSH),
    "bush, fewer tokens": TreeDrafter(model=NARROW, tree=BUSH),
    "bush, drawn": TreeDrafter(model=MODEL, tree=BUSH, sampled=True),
    "nothing": TreeDrafter(model=MODEL, tree=chain(0)),
    "lookup": LookupDrafter(depth=4, num_matches=2),
    "lookahead": LookaheadDrafter(vocab_size=VOCABULARY),
    "recycling": RecyclingDrafter(vocab_size=VOCABULARY),
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


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("rule", ["greedy", "coupled", "rejection"])
def test_constrained_text_is_plain_constrained_text(name: str, rule: Any) -> None:
    temperature = [0.0] * 4 if rule == "greedy" else [1.0, 0.0, 0.7, 3.0]
    requests = make_requests(
        [[1, 2], [3], [0, 0, 1], [2]],
        max_new_tokens=[30, 1, 17, 29],
        temperature=temperature,
        top_k=[0, 0, 2, 0],
        seeds=range(4),
        stop_tokens=[STOP] if rule == "coupled" else (),
    )
    state = speculative.generate(constrained(DRAFTERS[name], rule), PARAMS, requests)
    plain = autoregressive.generate(constrained(None, rule), PARAMS, requests)
    found, expected = texts(requests, state), texts(requests, plain)
    if rule == "rejection":
        found, expected = found[1:2], expected[1:2]
        assert all(follows(text) for text in texts(requests, state))
    assert_same_tokens(found, expected)
    assert all(follows(text) for text in expected)
