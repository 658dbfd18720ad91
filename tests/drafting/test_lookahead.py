"""Lookahead beside the published procedure in plain Python, round by round."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.decoding import speculative
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.requests import make_requests
from eagle_jax.decoding.state import DecodeState
from eagle_jax.drafting import LookaheadDrafter, RootOnly
from eagle_jax.drafting.lookahead import LookaheadState
from eagle_jax.interface import Params
from eagle_jax.testing import ToyTarget, assert_valid_tree
from tests.helpers import refused, whole_prompts
from tests.stories import Stories

Rows = list[list[int]]
Pool = dict[int, list[tuple[int, ...]]]
Model = Callable[[list[int], Rows], Rows]
"""From a text and paths after it to the most likely token after each of their tokens,
the first one after the text itself."""

CAPACITY = 512


def model_of(target: Any, params: Any, drafter: LookaheadDrafter) -> Model:
    """A target that reads the whole text anew, and then each path by itself."""
    steps = jnp.arange(drafter.depth + 1)
    most = drafter.first_width + drafter.guesses
    slots = jnp.arange(CAPACITY)[None]
    # Arguments, as constants of this size keep the compiler busy.
    given = params, target.init_cache(1, CAPACITY), slots

    @jax.jit
    def read(
        given: Any, text: jax.Array, length: jax.Array, paths: jax.Array
    ) -> jax.Array:
        params, empty, slots = given
        slots = slots[:, : text.shape[1]]
        before = target.forward(params, text, slots, None, empty)
        cache = target.commit(empty, before.entries, slots, length[None] - 1)
        cache = jax.tree.map(lambda x: jnp.repeat(x, most, axis=0), cache)
        tokens = paths.at[:, 0].set(text[0, length - 1])
        positions = jnp.broadcast_to(length - 1 + steps, tokens.shape)
        output = target.forward(params, tokens, positions, None, cache)
        return jnp.argmax(target.unembed(params, output.hidden), axis=-1)

    def model(text: list[int], paths: Rows) -> Rows:
        # A program for each of a few lengths: attention costs their square.
        whole = np.zeros((1, -(-len(text) // 128) * 128), np.int32)
        whole[0, : len(text)] = text
        padded = np.zeros((most, len(steps)), np.int32)
        for row, path in enumerate(paths):
            padded[row, 1 : len(path) + 1] = path
        found = np.asarray(read(given, whole, np.int32(len(text)), padded)).tolist()
        return [found[row][: len(path) + 1] for row, path in enumerate(paths)]

    return model


class Judge:
    """The published procedure, with lists of tokens and a dict of lists.

    Two rules differ, both of them about what is accepted: some versions of the
    published code accept no more than `level - 2` tokens of an n-gram, and none
    accepts tokens of the window; here as many as the model agrees with.
    """

    def __init__(
        self, model: Model, drafter: LookaheadDrafter, text: list[int], row: list[int]
    ) -> None:
        self.model, self.text, self.rows = model, list(text), [list(row)]
        self.level, self.width = drafter.level, drafter.window
        self.guesses = drafter.guesses
        self.pool: Pool = {}

    def columns(self) -> Rows:
        """What stands after the root in each column: first along row 0, then down."""
        first, *others = self.rows
        return [
            [*first[:column], *(row[column] for row in others)]
            for column in range(len(first) + 1)
        ]

    def round(self) -> None:
        root = self.text[-1]
        paths = self.columns()
        num_columns = len(paths)
        if len(self.rows) == self.level - 1:
            paths += [list(ngram) for ngram in self.pool.get(root, [])]
        answers = self.model(self.text, paths)
        newest = [answer[-1] for answer in answers[:num_columns]]
        emitted: list[int] = []
        for path, answer in zip(paths, answers, strict=True):
            agreed = 0
            while agreed < len(path) and path[agreed] == answer[agreed]:
                agreed += 1
            if agreed >= len(emitted):
                emitted = answer[: agreed + 1]
        if len(self.rows) < self.level - 1:
            self.rows = [row[1:] for row in self.rows] + [newest[1:]]
        else:
            self.push(root, newest)
            self.rows.append(newest)
            self.rows = [self.rows[1][1:], *self.rows[2:]]
        self.text += emitted

    def push(self, root: int, newest: list[int]) -> None:
        first, *others = self.rows
        for column, key in enumerate([root, *first]):
            ngram = (*(row[column] for row in others), newest[column])
            known = self.pool.setdefault(key, [])
            if ngram in known:
                known.remove(ngram)
            elif len(known) == self.guesses:
                known.pop(0)
            known.append(ngram)


def rows_of(drafter: LookaheadDrafter, state: LookaheadState) -> Rows:
    filled = int(state.filled[0])
    width = drafter.first_width + 1 - filled
    first, *others = np.asarray(state.window)[0, :filled, :width].tolist()
    return [first[1:], *others]


def pool_of(drafter: LookaheadDrafter, state: LookaheadState) -> Pool:
    ngrams = np.asarray(state.pool)[0].reshape(
        drafter.vocab_size, drafter.guesses, drafter.level - 1
    )
    found: Pool = {}
    for key, place in np.argwhere(ngrams[..., 0] >= 0).tolist():
        found.setdefault(key, []).append(tuple(ngrams[key, place].tolist()))
    return found


def check_rounds(
    target: Any,
    params: Any,
    drafter: LookaheadDrafter,
    prompt: list[int],
    num_rounds: int,
) -> tuple[Judge, DecodeState]:
    decoder = Decoder(target=target, drafter=drafter, acceptance="greedy")
    requests = make_requests([prompt], max_new_tokens=CAPACITY - len(prompt))
    weights = Params(target=params)
    state = speculative.prefill(
        decoder, weights, requests, num_slots=CAPACITY + drafter.depth + 1
    )
    (row,) = rows_of(drafter, state.drafter_state)
    assert set(row) <= set(prompt)
    begun = state.tokens[0, : len(prompt) + 1].tolist()
    judge = Judge(model_of(target, params, drafter), drafter, begun, row)
    for _ in range(num_rounds):
        state, done = speculative.decode_round(decoder, weights, state)
        judge.round()
        assert_valid_tree(jax.tree.map(lambda x: np.asarray(x)[0], done.tree))
        assert np.asarray(state.tokens)[0, : state.lengths[0]].tolist() == judge.text
        assert rows_of(drafter, state.drafter_state) == judge.rows
        assert pool_of(drafter, state.drafter_state) == judge.pool
    assert int(state.num_rounds[0]) == num_rounds
    return judge, state


def test_30_rounds_of_a_trained_model_are_the_published_procedures(
    stories: Stories,
) -> None:
    drafter = LookaheadDrafter(vocab_size=512)
    assert drafter.num_nodes == 56
    judge, state = check_rounds(
        stories.target, stories.target_params, drafter, stories.openings[0], 30
    )
    assert any(len(known) == drafter.guesses for known in judge.pool.values())
    # An n-gram was accepted to its end, which some published versions cannot.
    assert int(state.accept_lengths.max()) >= drafter.level - 1


@pytest.mark.parametrize(
    ("vocab_size", "level", "window", "guesses"),
    [
        *((8, 5, 7, 7), (8, 4, 6, 2), (3, 3, 2, 3), (2, 5, 7, 7), (1, 3, 2, 2)),
        *((8, 2, 1, 1), (8, 2, 4, 1), (8, 2, 1, 5), (8, 3, 1, 1)),
        (4, 9, 1, 1),  # Its window is larger as it grows than with its n-grams.
    ],
)
def test_rounds_are_the_published_procedures_at_every_size(
    vocab_size: int, level: int, window: int, guesses: int
) -> None:
    drafter = LookaheadDrafter(
        vocab_size=vocab_size, level=level, window=window, guesses=guesses
    )
    prompt = [token % vocab_size for token in (1, 0, 5, 2)]
    check_rounds(ToyTarget(vocab_size=vocab_size), (), drafter, prompt, 40)


def test_a_row_that_ended_learns_nothing() -> None:
    target = ToyTarget(vocab_size=8)
    drafter = LookaheadDrafter(vocab_size=8, level=3, window=3, guesses=2)
    decoder = Decoder(target=target, drafter=drafter, acceptance="greedy")
    requests = make_requests([[1, 2], [3]], max_new_tokens=[9, 40])
    state = speculative.prefill(decoder, Params(target=()), requests, num_slots=64)
    while bool(state.is_running[0]):
        state, _ = speculative.decode_round(decoder, Params(target=()), state)
    learned = [np.asarray(x) for x in pool_and_window(state.drafter_state)]
    state, done = speculative.decode_round(decoder, Params(target=()), state)
    assert done.count.tolist()[0] == 0 and done.count.tolist()[1] > 0
    for before, after in zip(
        learned, pool_and_window(state.drafter_state), strict=True
    ):
        np.testing.assert_array_equal(before[0], after[0])
        assert (before[1] != np.asarray(after[1])).any()


def test_a_round_without_drafts_teaches_nothing() -> None:
    drafter = LookaheadDrafter(vocab_size=8, level=3, window=3, guesses=2)
    one, other = (
        Decoder(target=ToyTarget(vocab_size=8), drafter=drafts, acceptance="greedy")
        for drafts in (drafter, RootOnly(drafter=drafter))
    )
    requests = make_requests([[1, 2]], max_new_tokens=40)
    state = speculative.prefill(one, Params(target=()), requests, num_slots=64)
    for _ in range(4):
        state, _ = speculative.decode_round(one, Params(target=()), state)
    learned = [np.asarray(x) for x in pool_and_window(state.drafter_state)]
    state, done = speculative.decode_round(other, Params(target=()), state)
    assert done.count.tolist() == [1]
    found = pool_and_window(state.drafter_state)
    jax.tree.map(np.testing.assert_array_equal, learned, [*found])


def pool_and_window(state: LookaheadState) -> tuple[jax.Array, jax.Array]:
    return state.pool, state.window


def test_the_first_row_is_the_prompts_alone() -> None:
    drafter = LookaheadDrafter(vocab_size=50, level=6, window=9)
    prompts = jnp.array([[7, 8, 9, 0, 0], [1, 2, 3, 4, 5], [6, 0, 0, 0, 0]])

    def first_rows(rows: list[int], lengths: list[int]) -> Rows:
        empty = drafter.init_state(len(rows), 64)
        given = prompts[jnp.array(rows)]
        chunk = whole_prompts(given, jnp.array(lengths))
        state = drafter.prefill_chunk((), empty, chunk)
        return state.window[:, 0].tolist()

    together = first_rows([0, 1, 2], [3, 5, 1])
    assert together == [*first_rows([0], [3]), *first_rows([1], [5]), [6] * 13]
    assert set(together[0]) == {7, 8, 9} and set(together[1]) == {1, 2, 3, 4, 5}


@pytest.mark.parametrize(
    ("name", "value", "least"),
    [("level", 1, 2), ("window", 0, 1), ("guesses", 0, 1)],
)
def test_sizes_below_their_range_are_refused(name: str, value: int, least: int) -> None:
    sizes = {"vocab_size": 8, name: value}
    refused(lambda: LookaheadDrafter(**sizes), f"{name} = {value}", f"least {least}")
