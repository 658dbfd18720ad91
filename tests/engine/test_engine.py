"""Prompts of all lengths through few rows: the texts, and what is done when."""

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from eagle_jax.config import TreeConfig
from eagle_jax.decoding import growth
from eagle_jax.decoding.chunked_prefill import PrefillState
from eagle_jax.decoding.state import DecodeState
from eagle_jax.drafting import (
    LookaheadDrafter,
    LookupDrafter,
    RecyclingDrafter,
    SmallModel,
    SwitchDrafter,
    TreeDrafter,
)
from eagle_jax.engine import Engine, Pair, PairConfig, Request, Text, engine, programs
from eagle_jax.engine import prefill as reading
from eagle_jax.engine.prefill import is_one_prefill
from eagle_jax.engine.programs import Programs, Store
from eagle_jax.interface import Params, prefill
from eagle_jax.interface.prefill import PREFILL_CHUNK
from eagle_jax.testing import assert_same_tokens
from tests import tiny
from tests.helpers import refused

TREE = TreeConfig(num_nodes=4, depth=2, width=2)
TARGET, DRAFTER, PARAMS = tiny.pair(tiny.TARGET, tiny.HEAD, TREE)
CHUNK = 16
STORE = Store()  # Of programs that are traced with these sizes.

MakeEngine = Callable[..., Engine]


@pytest.fixture
def make_engine(monkeypatch: pytest.MonkeyPatch) -> MakeEngine:
    """Makes engines of short chunks, whose caches begin with 64 slots."""
    monkeypatch.setattr(growth, "FIRST_LENGTH", 48)
    for module in (prefill, reading, engine):
        monkeypatch.setattr(module, "PREFILL_CHUNK", CHUNK)
    monkeypatch.setattr(programs, "PROGRAMS", STORE)

    def make(**settings: Any) -> Engine:
        request = Request(
            max_new_tokens=settings.pop("new_tokens", 30),
            ignore_eos=settings.pop("ignore_eos", False),
            temperature=settings.pop("temperature", 1.0),
        )
        pair = Pair.of(
            TARGET,
            settings.pop("params", PARAMS),
            max_positions=TARGET.config.max_positions,
            drafter=settings.pop("drafter", DRAFTER),
            stop_tokens=settings.pop("stop_tokens", (7, 9)),
            config=PairConfig(request=request),
        )
        sizes: Any = {"batch_size": 3, "max_length": 150} | settings
        return pair.engine(**sizes)

    return make


def text_of(queue: Engine, prompt: list[int], seed: int, **settings: Any) -> Text:
    """A text whose number is its seed."""
    request = queue.pair.request(seed=seed, **settings)
    return queue.pair.text(prompt, request, index=seed)


def again(queue: Engine, **other: Any) -> Engine:
    """Another engine of the same pair."""
    shape: Any = {"batch_size": queue.batch_size, "max_length": queue.max_length}
    return queue.pair.engine(**(shape | other))


def prompts_of(*lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(10, 60, length).tolist() for length in lengths]


PROMPTS = prompts_of(1, 16, 17, 100, 3, 40, 2, 5, 64, 1, 9, 33)


def serve(queue: Engine, prompts: list[list[int]]) -> list[Text]:
    """The texts in the order in which they end."""
    for number, prompt in enumerate(prompts):
        queue.add(text_of(queue, prompt, number))
    found: list[Text] = []
    while not queue.is_idle:
        found += queue.step()
    return found


def alone(queue: Engine, prompts: list[list[int]]) -> list[list[int]]:
    """Each text as the only one of its batch, in one program."""
    texts = [text_of(queue, prompt, seed) for seed, prompt in enumerate(prompts)]
    for text in texts:
        one = again(queue, batch_size=1)
        one.add(text)
        assert [*one.run()] == [text]
    return [text.token_ids for text in texts]


def test_programs_return_states_alone(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the texts gained stands in them: a result beside it would be unread."""
    kinds, call = set[type](), Programs.call

    def noted(*arguments: Any, **static: Any) -> Any:
        result = call(*arguments, **static)
        kinds.add(type(result))
        return result

    monkeypatch.setattr(Programs, "call", noted)
    serve(make_engine(), PROMPTS[:4])
    assert kinds == {DecodeState, PrefillState}


@pytest.mark.parametrize(
    ("drafter", "temperature"), [(DRAFTER, 1.0), (None, 0.0)], ids=["drafts", "plain"]
)
def test_texts_in_shared_rows_are_those_of_each_alone(
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    drafter: Any,
    temperature: float,
) -> None:
    """And nothing as large as a cache leaves the devices."""
    queue = make_engine(drafter=drafter, temperature=temperature)
    fetched: list[Any] = []
    fetch = Programs.fetch

    def noted(programs: Programs, arrays: Any) -> Any:
        fetched.append(arrays)
        return fetch(programs, arrays)

    with monkeypatch.context() as patch:
        patch.setattr(Programs, "fetch", noted)
        found = serve(queue, PROMPTS)
    found.sort(key=lambda text: text.index)
    assert all(array.ndim <= 2 for array in jax.tree.leaves(fetched))
    texts = [text.token_ids for text in found]
    assert_same_tokens(texts, alone(queue, PROMPTS))
    for text in found:
        rounds = text.accept_lengths
        assert len(text.token_ids) <= 1 + sum(rounds) + len(rounds)
        assert text.prefill_seconds > 0


def test_a_prompt_whose_padding_outgrows_every_text_gets_in(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "PREFILL_CHUNK", PREFILL_CHUNK)
    queue = make_engine(max_length=300, drafter=None, ignore_eos=True)
    (text,) = serve(queue, prompts_of(260))
    assert len(text.token_ids) == 30


def test_running_rows_go_on_after_every_chunk_of_a_long_prompt(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, called = make_engine(new_tokens=40, drafter=None), []
    call = Programs.call

    def noted(programs: Programs, function: Any, *arguments: Any, **static: Any) -> Any:
        name, rounds = function.__name__, None
        if name == "decode_until":
            rounds = int(arguments[1].most_rounds)
        if name not in ("take_rows", "put_rows"):
            called.append((name, rounds))
        return call(programs, function, *arguments, **static)

    monkeypatch.setattr(Programs, "call", noted)
    assert len(serve(queue, prompts_of(2, 100))) == 2
    first = called.index(("prefill_chunk", None))
    chunks = -(-100 // CHUNK)
    # The last chunk's row runs with the others: nothing is left to be read.
    expected = [("prefill_chunk", None), ("decode_until", 1)] * (chunks - 1)
    assert called[first : first + len(expected)] == expected
    assert called[first + len(expected)][0] == "prefill_chunk"


def test_short_prompts_pass_by_the_chunks_of_long_ones(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one that is being read, and of one that waits."""
    queue = make_engine(new_tokens=30, drafter=None, ignore_eos=True)
    prompts = prompts_of(2, 100, 80, 3)
    found, steps = {}, 0
    for number, prompt in enumerate(prompts[:3]):
        queue.add(text_of(queue, prompt, number))
    queue.step(rounds=1)
    queue.add(text_of(queue, prompts[3], 3))
    while not queue.is_idle:
        found |= {text.index: text.token_ids for text in queue.step(rounds=1)}
        steps += 1
        # One step for the row's last prompt, one for a chunk, 29 rounds.
        assert (3 in found) >= (steps >= 31)
    assert_same_tokens([found[n] for n in range(4)], alone(queue, prompts))


def test_long_prompts_are_read_however_many_short_ones_come(
    make_engine: MakeEngine,
) -> None:
    queue = make_engine(new_tokens=2, drafter=None, ignore_eos=True)
    prompt, short = prompts_of(100, 3)
    long = queue.add(text_of(queue, prompt, 0))
    for number in range(40):
        queue.add(text_of(queue, short, number))
        if long in queue.step():
            return
    raise AssertionError("the long prompt waits")


def test_a_prompt_that_fills_a_cache_has_room_for_its_first_token(
    make_engine: MakeEngine,
) -> None:
    queue, prompts = make_engine(new_tokens=2, drafter=None), prompts_of(64)
    (text,) = serve(queue, prompts)
    assert_same_tokens([text.token_ids], alone(queue, prompts))


def test_caches_may_grow_while_a_long_prompt_is_read(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = make_engine(new_tokens=80, drafter=None, ignore_eos=True)
    prompts = prompts_of(16, 20)
    texts = [text_of(queue, prompt, n) for n, prompt in enumerate(prompts)]
    queue.add(texts[0])
    for _ in range(47):  # One token of the prefill, one per round: 64 slots are full.
        assert queue.step(rounds=1) == []
    queue.add(texts[1])
    while not queue.is_idle:
        queue.step(rounds=1)
    assert_same_tokens([text.token_ids for text in texts], alone(queue, prompts))


SMALL = SmallModel(target=TARGET, vocab_size=TARGET.config.vocab_size)


@pytest.mark.parametrize(
    ("drafter", "params"),
    [
        (DRAFTER, PARAMS),
        (None, PARAMS),
        (LookupDrafter(), PARAMS),
        (LookaheadDrafter(vocab_size=TARGET.config.vocab_size, level=3), PARAMS),
        (RecyclingDrafter(vocab_size=TARGET.config.vocab_size), PARAMS),
        (
            TreeDrafter(model=SMALL, tree=TREE),
            Params(target=PARAMS.target, drafter=PARAMS.target),
        ),
        (SwitchDrafter(first=LookupDrafter(max_ngram=8), second=DRAFTER), PARAMS),
    ],
    ids=["eagle", "plain", "lookup", "lookahead", "recycling", "small model", "switch"],
)
def test_what_a_prompt_shares_with_a_text_is_not_read_again(
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    drafter: Any,
    params: Params,
) -> None:
    """Tokens and what is accepted are those of a prompt that is read as a whole."""
    monkeypatch.setattr(reading, "SMALL_CHUNK", 4)
    settings = {"batch_size": 2, "new_tokens": 12, "ignore_eos": True}
    queue = make_engine(drafter=drafter, params=params, **settings)

    def written(queue: Engine, seed: int, prompt: list[int]) -> Text:
        text = queue.add(text_of(queue, prompt, seed))
        while not queue.step():
            pass
        return text

    prompt = prompts_of(15)[0]
    first = written(queue, 0, prompt)
    # A chat's next turn, and another question after the same system prompt.
    text = prompt + first.token_ids
    longest, reused = [*text, 11, 12, 13], []
    for seed, other in enumerate((longest, [*prompt[:13], 50, 51, 52, 53]), 1):
        found, fresh = written(queue, seed, other), written(again(queue), seed, other)
        assert found.token_ids == fresh.token_ids
        assert found.accept_lengths == fresh.accept_lengths
        reused.append(found.reused)
        assert fresh.reused == 0
    waiting = (0 if drafter is None else drafter.depth) + 2
    assert reused[1] == 12 and 0 <= len(text) - waiting - reused[0] < 4


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        ([], ["has no token"]),
        ([5] * 150, ["150 tokens", "may have 150", "shorten the prompt"]),
        ([5, 64], ["the id 64", "0 to 63"]),
    ],
    ids=["empty", "long", "id"],
)
def test_what_cannot_be_decoded_is_refused_before_anything_is(
    make_engine: MakeEngine, prompt: list[int], named: list[str]
) -> None:
    queue = make_engine()
    refused(lambda: queue.add(text_of(queue, prompt, 0)), *named)
    assert queue.is_idle


def test_rows_are_rounded_up_to_the_parts_of_a_mesh(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pair, "num_parts", 2)
    assert make_engine(batch_size=3).batch_size == 4


def test_stop_tokens_may_be_many_and_ignored(make_engine: MakeEngine) -> None:
    stops = tuple(range(20, 29))
    queue = make_engine(new_tokens=9, ignore_eos=True, stop_tokens=stops)
    (text,) = serve(queue, [[5]])
    assert len(text.token_ids) == 9


def test_texts_of_a_single_row_are_read_and_written_by_two_programs(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other; so are those of a batch that is full at once."""
    monkeypatch.setattr(programs, "PROGRAMS", Store())
    queue = make_engine(batch_size=1, new_tokens=5)
    for batch_size in (1, 2):
        one = again(queue, batch_size=batch_size)
        for number, prompt in enumerate(prompts_of(2, 3)):
            one.add(text_of(one, prompt, number))
        assert [text.index for text in one.run()] == [0, 1]
        assert programs.PROGRAMS.num_kept == 2 * batch_size


@pytest.mark.parametrize(
    ("rows", "lengths", "expected"),
    [
        (8, [16000] + 7 * [10], False),
        (8, 9 * [10], False),
        (8, 8 * [16000], True),
        (8, [2000] + 7 * [10], True),
        (8, 5 * [10], True),
        (8, 4 * [10], False),
    ],
)
def test_prompts_are_read_at_once_unless_most_would_be_padding(
    rows: int, lengths: list[int], expected: bool
) -> None:
    assert is_one_prefill(lengths, rows) == expected


def test_threads_compile_what_running_texts_will_need(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New lengths, parts of prompts that are there, larger caches, fewer rows."""
    monkeypatch.setattr(reading, "SMALL_CHUNK", 4)
    monkeypatch.setattr(programs, "PROGRAMS", Store())
    queue = make_engine(
        new_tokens=60, batch_size=4, ignore_eos=True, compiles_beside=True
    )
    prompts = prompts_of(3, 2, 40, 5, 50)
    prompts.append(prompts[2] + prompts[4][:20])
    texts = [text_of(queue, prompt, seed) for seed, prompt in enumerate(prompts)]
    queue.add(texts[0])
    queue.step(rounds=1)
    waited = programs.PROGRAMS.compile_seconds
    for text in texts[1:]:
        queue.add(text)
        for _ in range(3):
            queue.step(rounds=1)
            while queue.is_compiling:
                time.sleep(0.01)
    while not queue.is_idle:
        queue.step(rounds=4)
        while queue.is_compiling:
            time.sleep(0.01)
    assert texts[-1].reused > 0
    assert programs.PROGRAMS.compile_seconds == waited
    found = [text.token_ids for text in texts]
    assert_same_tokens(found, alone(queue, prompts))
