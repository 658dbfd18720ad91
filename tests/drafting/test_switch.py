"""Copied chains and grown trees in one drafter."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.config import TreeConfig
from eagle_jax.decoding import autoregressive, speculative
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.requests import make_requests
from eagle_jax.decoding.state import DecodeState
from eagle_jax.drafting import LookupDrafter, SwitchDrafter, TreeDrafter
from eagle_jax.heads.eagle import EagleHead
from eagle_jax.interface import Drafter, Params, TargetOutput
from eagle_jax.models.transformer import Transformer
from eagle_jax.testing import ToyModel, ToyTarget, assert_same_tokens
from eagle_jax.tree import EAGLE1_TREE, DraftTree
from tests import tiny
from tests.helpers import make_draws, refused, whole_prompts

VOCABULARY = 40
MODEL = ToyModel(vocab_size=VOCABULARY, sharpness=2.0, seed=1)
TREE = TreeDrafter(model=MODEL, tree=TreeConfig(num_nodes=7, depth=2, width=2))
SWITCH = SwitchDrafter(first=LookupDrafter(depth=9, max_ngram=12), second=TREE)
ONCE = np.random.default_rng(0).permutation(VOCABULARY).tolist()


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnedByHeart(ToyTarget):
    """A target that writes one text, whatever it was given."""

    text: tuple[int, ...]

    def forward(
        self, params: Any, tokens: Any, positions: Any, mask: Any, cache: Any
    ) -> TargetOutput:
        output = super().forward(params, tokens, positions, mask, cache)
        places = positions[..., None].astype(jnp.uint32)
        return TargetOutput(hidden=places, features=places, entries=output.entries)

    def unembed(self, params: Any, hidden: jax.Array) -> jax.Array:
        del params
        following = jnp.array([*self.text[1:], 0])[hidden[..., 0]]
        return 9.0 * jax.nn.one_hot(following, self.vocab_size, dtype=jnp.float32)


def written(text: list[int], drafter: Drafter) -> tuple[DecodeState, list[DraftTree]]:
    """The last state and all trees of a text whose first three tokens are given."""
    target = LearnedByHeart(vocab_size=VOCABULARY, text=tuple(text))
    decoder = Decoder(target=target, drafter=drafter, acceptance="greedy")
    requests = make_requests([text[:3]], max_new_tokens=len(text) - 3)
    params, found = Params(target=()), []
    state = speculative.prefill(decoder, params, requests, num_slots=192)
    while state.is_running.any():
        state, done = speculative.decode_round(decoder, params, state)
        found.append(done.tree)
    plain = autoregressive.generate(decoder, params, requests, num_slots=192)
    assert_same_tokens(state.tokens, plain.tokens)
    assert state.tokens[0, : len(text)].tolist() == text
    return state, found


def padded(tree: DraftTree, num_nodes: int) -> dict[str, np.ndarray]:
    more = ((0, 0), (0, num_nodes - tree.tokens.shape[1]))
    fills = {"tokens": 0, "parents": -1, "log_values": -np.inf, "is_node": False}
    return {
        name: np.pad(getattr(tree, name), more, constant_values=fill)
        for name, fill in fills.items()
    }


def assert_same_trees(found: DraftTree, expected: DraftTree) -> None:
    num_nodes = max(found.tokens.shape[1], expected.tokens.shape[1])
    for name, values in padded(expected, num_nodes).items():
        found_values = padded(found, num_nodes)[name]
        np.testing.assert_allclose(found_values, values, rtol=1e-5)


def test_what_comes_again_is_copied_in_whole_chains() -> None:
    text = [*ONCE, *ONCE, *reversed(ONCE)]
    switched, _ = written(text, SWITCH)
    alone, _ = written(text, TREE)
    # Five tokens must match, then nine more and the target's own come per round.
    copied = (len(ONCE) - 5) // 10
    accepted = switched.accept_lengths[0].tolist()
    assert accepted.count(9) >= copied - 1
    assert int(switched.num_rounds[0]) <= int(alone.num_rounds[0]) - 9 * (copied - 1)


def test_what_never_comes_again_is_drafted_as_by_the_tree_alone() -> None:
    switched, ours = written(ONCE, SWITCH)
    alone, theirs = written(ONCE, TREE)
    assert switched.num_rounds[0] == alone.num_rounds[0]
    for tree, expected in zip(ours, theirs, strict=True):
        assert_same_trees(tree, expected)


@pytest.mark.parametrize("min_match", [1, 4, 5, 12])
def test_every_row_chooses_for_itself(min_match: int) -> None:
    """Row i ends with i tokens that stood before; row 0 repeats nothing."""
    drafter = dataclasses.replace(SWITCH, min_match=min_match)
    matches = range(14)
    rows = [[*ONCE[:20], *ONCE[30:33], *ONCE[15 - n : 15]] for n in matches]
    lengths = jnp.array([len(row) - 1 for row in rows])
    prompts = jnp.array([row[:-1] + [0] * (48 - len(row)) for row in rows], jnp.int32)
    root = jnp.array([row[-1] for row in rows], jnp.int32)

    @functools.partial(jax.jit, static_argnums=0)
    def proposed(some: Drafter) -> DraftTree:
        state = some.init_state(len(rows), 64)
        state = some.prefill_chunk((), state, whole_prompts(prompts, lengths))
        return some.propose((), state, root, make_draws(len(rows)))[0]

    found, copied = proposed(drafter), proposed(drafter.first)
    grown = proposed(drafter.second)
    for row in matches:
        expected = copied if row >= min_match else grown
        found_row, expected_row = (
            jax.tree.map(lambda x, row=row: x[row : row + 1], tree)
            for tree in (found, expected)
        )
        assert_same_trees(found_row, expected_row)
    # What followed, to where the text ends or the chain does.
    assert copied.tokens[12, 1:6].tolist() == ONCE[15:20]


GROWN: list[int] = []


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counted(ToyModel):
    """Notes every level that is grown."""

    def logits(self, params: Any, outputs: jax.Array, *, level: int) -> jax.Array:
        jax.debug.callback(lambda: GROWN.append(level))
        return super().logits(params, outputs, level=level)


def test_no_level_is_grown_where_every_running_row_copies() -> None:
    model = Counted(**dataclasses.asdict(MODEL))
    second = dataclasses.replace(TREE, model=model)
    drafter = dataclasses.replace(SWITCH, second=second)
    state = drafter.init_state(2, 64)
    rows = jnp.array([[*ONCE[:20], *ONCE[:9]], ONCE[:29]], jnp.int32)
    lengths = jnp.array([28, 28])
    state = drafter.prefill_chunk((), state, whole_prompts(rows, lengths))
    propose = jax.jit(drafter.propose)
    for is_running, levels in (([True, False], []), ([True, True], [1, 2])):
        some = dataclasses.replace(state, is_running=jnp.array(is_running))
        GROWN.clear()
        jax.block_until_ready(propose((), some, rows[:, 28], make_draws(2)))
        jax.effects_barrier()
        assert sorted(GROWN) == levels


def test_a_head_has_read_the_text_whoever_drafted_it() -> None:
    """Grown trees are those of a head that reads the whole text anew."""
    config = tiny.target_config(vocab_size=24)
    weights = tiny.target_params(config)
    target, head = Transformer(config=config), tiny.head_config(vocab_size=24)
    second = TreeDrafter(model=EagleHead(config=head), tree=TREE.tree)
    drafter = SwitchDrafter(first=LookupDrafter(depth=6), second=second, min_match=2)
    params = Params(target=weights, drafter=tiny.head_params(head, weights))
    decoder = Decoder(target=target, drafter=drafter, acceptance="greedy")
    requests = make_requests([[5, 6, 7, 0, 5, 6], [4]], max_new_tokens=60)
    state = speculative.prefill(decoder, params, requests, num_slots=128)
    slots = jnp.broadcast_to(jnp.arange(128), (2, 128))

    @jax.jit
    def read_anew(tokens: jax.Array, lengths: jax.Array, root: jax.Array) -> DraftTree:
        nothing = target.init_cache(2, 0)
        output = target.forward(weights, tokens, slots, None, nothing)
        empty = second.init_state(2, 192)
        chunk = whole_prompts(tokens, lengths - 1, output.features)
        read = second.prefill_chunk(params.drafter, empty, chunk)
        return second.propose(params.drafter, read, root, make_draws(2))[0]

    chosen: set[bool] = set()
    while state.is_running.all():
        expected = read_anew(state.tokens, state.lengths, state.root)
        copied = drafter.first.draft(state.drafter_state.lookup, state.root)[1] >= 2
        state, done = speculative.decode_round(decoder, params, state)
        for row in np.flatnonzero(~np.asarray(copied)):
            tokens = expected.tokens[row].tolist()
            assert done.tree.tokens[row].tolist()[: len(tokens)] == tokens
        chosen |= set(copied.tolist())
    assert chosen == {True, False}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"min_match": 0}, "min_match = 0 must be 1 to 12"),
        ({"min_match": 13}, "min_match = 13 must be 1 to 12"),
        ({"second": dataclasses.replace(TREE, tree=TreeConfig(depth=0))}, "depth"),
        (
            {"second": TreeDrafter(model=MODEL, tree=EAGLE1_TREE, sampled=True)},
            "sampled = True",
        ),
    ],
    ids=["no match", "a match too long", "no tree", "drawn"],
)
def test_settings_that_leave_no_choice_are_refused(
    changes: dict[str, Any], named: str
) -> None:
    refused(lambda: dataclasses.replace(SWITCH, **changes), named)
