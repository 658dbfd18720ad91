"""Prompts of all lengths through few rows: the texts, and what is done when."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from eagle_jax.engine.batches import decode_all, is_queue
from eagle_jax.engine.pairs import LoadedPair
from eagle_jax.engine.runner import Runner
from eagle_jax.engine.scheduler import Scheduler
from eagle_jax.engine.served import Served

from eagle_jax.config import TreeConfig
from eagle_jax.decoding import growth, slots
from eagle_jax.decoding.chunked_prefill import PrefillState
from eagle_jax.decoding.state import DecodeState
from eagle_jax.drafting import (
    LookupDrafter,
    RecyclingDrafter,
    SmallModel,
    SwitchDrafter,
    TreeDrafter,
)
from eagle_jax.engine import prefixes, scheduler
from eagle_jax.engine.config import PairConfig
from eagle_jax.engine.programs import Programs
from eagle_jax.interface import Params, prefill
from eagle_jax.interface.prefill import PREFILL_CHUNK
from eagle_jax.testing import assert_same_tokens
from tests import tiny
from tests.helpers import refused

TREE = TreeConfig(num_nodes=4, depth=2, width=2)
TARGET, DRAFTER, PARAMS = tiny.pair(tiny.TARGET, tiny.HEAD, TREE)
PAIR = LoadedPair(
    target=TARGET,
    drafter=DRAFTER,
    params=PARAMS,
    tokenizer=None,
    stop_tokens=(7, 9),
)
CHUNK = 16

MakeRunner = Callable[..., Runner]


@pytest.fixture
def make_runner(monkeypatch: pytest.MonkeyPatch) -> MakeRunner:
    """Makes runners of short chunks, whose caches begin with 64 slots."""
    monkeypatch.setattr(growth, "FIRST_LENGTH", 48)
    for module in (prefill, prefixes, scheduler):
        monkeypatch.setattr(module, "PREFILL_CHUNK", CHUNK)

    def make(**settings: Any) -> Runner:
        config = PairConfig().with_(
            max_new_tokens=settings.pop("new_tokens", 30),
            ignore_eos=settings.pop("ignore_eos", False),
            temperature=settings.pop("temperature", 1.0),
        )
        defaults: dict[str, Any] = {"drafter": DRAFTER, "max_length": 150}
        defaults |= {"prompt_bucket": 0, "batch_size": 3}
        defaults |= {"programs": Programs()}
        return Runner(pair=PAIR, config=config, **(defaults | settings))

    return make


def prompts_of(*lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(10, 60, length).tolist() for length in lengths]


PROMPTS = prompts_of(1, 16, 17, 100, 3, 40, 2, 5, 64, 1, 9, 33)


def serve(runner: Runner, prompts: list[list[int]]) -> list[Served]:
    """The texts in the order in which they end."""
    queue = Scheduler(runner)
    for number, prompt in enumerate(prompts):
        queue.add(number, prompt, queue.request(number))
    found: list[Served] = []
    while not queue.is_idle:
        found += queue.step()
    return found


def alone(runner: Runner, prompts: list[list[int]]) -> list[list[int]]:
    """Each text as the only one of its batch, with a cache of one size."""
    one = dataclasses.replace(runner, batch_size=1, prompt_bucket=112)
    return [
        one.run([prompt], [one.request(seed)])[0][0].generated_ids
        for seed, prompt in enumerate(prompts)
    ]


def test_programs_return_states_alone(
    make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the texts gained stands in them: a result beside it would be unread."""
    kinds, call = set[type](), Runner.call

    def noted(*arguments: Any, **static: Any) -> Any:
        result = call(*arguments, **static)
        kinds.add(type(result))
        return result

    monkeypatch.setattr(Runner, "call", noted)
    serve(make_runner(), PROMPTS[:4])
    assert kinds == {DecodeState, PrefillState}


@pytest.mark.parametrize(
    ("drafter", "temperature"), [(DRAFTER, 1.0), (None, 0.0)], ids=["drafts", "plain"]
)
def test_texts_in_shared_rows_are_those_of_each_alone(
    make_runner: MakeRunner,
    monkeypatch: pytest.MonkeyPatch,
    drafter: Any,
    temperature: float,
) -> None:
    """And nothing as large as a cache leaves the devices."""
    runner = make_runner(drafter=drafter, temperature=temperature)
    fetched: list[Any] = []
    fetch = Runner.fetch

    def noted(runner: Runner, arrays: Any) -> Any:
        fetched.append(arrays)
        return fetch(runner, arrays)

    with monkeypatch.context() as patch:
        patch.setattr(Runner, "fetch", noted)
        found = list(
            decode_all(
                runner, PROMPTS, [runner.request(n) for n in range(len(PROMPTS))]
            )
        )
    assert [served.key for served in found] == list(range(len(PROMPTS)))
    assert all(array.ndim <= 2 for array in jax.tree.leaves(fetched))
    texts = [served.row.generated_ids for served in found]
    assert_same_tokens(texts, alone(runner, PROMPTS))
    for served in found:
        rounds = served.row.accept_lengths
        assert len(served.row.generated_ids) <= 1 + sum(rounds) + len(rounds)
        assert served.prefill_seconds > 0


def test_a_prompt_whose_padding_outgrows_every_text_gets_in(
    make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "PREFILL_CHUNK", PREFILL_CHUNK)
    runner = make_runner(max_length=300, drafter=None, ignore_eos=True)
    (served,) = serve(runner, prompts_of(260))
    assert len(served.row.generated_ids) == 30


def test_running_rows_go_on_after_every_chunk_of_a_long_prompt(
    make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, called = make_runner(new_tokens=40, drafter=None), []
    call = Runner.call

    def noted(runner: Runner, function: Any, *arguments: Any, **static: Any) -> Any:
        called.append((function.__name__, static.get("rounds")))
        return call(runner, function, *arguments, **static)

    monkeypatch.setattr(Runner, "call", noted)
    assert len(serve(runner, prompts_of(2, 100))) == 2
    first = called.index(("prefill_chunk", None))
    chunks = -(-100 // CHUNK)
    # The last chunk's row runs with the others: nothing is left to be read.
    expected = [("prefill_chunk", None), ("run_rounds", 1)] * (chunks - 1)
    assert called[first : first + len(expected)] == expected
    assert called[first + len(expected)][0] == "prefill_chunk"


def test_short_prompts_pass_by_the_chunks_of_long_ones(
    make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one that is being read, and of one that waits."""
    monkeypatch.setattr(scheduler, "ROUNDS", 1)
    runner = make_runner(new_tokens=30, drafter=None, ignore_eos=True)
    prompts = prompts_of(2, 100, 80, 3)
    queue, found, steps = Scheduler(runner), {}, 0
    for number, prompt in enumerate(prompts[:3]):
        queue.add(number, prompt, queue.request(number))
    queue.step()
    queue.add(3, prompts[3], queue.request(3))
    while not queue.is_idle:
        found |= {served.key: served.row.generated_ids for served in queue.step()}
        steps += 1
        # One step for the row's last prompt, one for a chunk, 29 rounds.
        assert (3 in found) >= (steps >= 31)
    assert_same_tokens([found[n] for n in range(4)], alone(runner, prompts))


def test_long_prompts_are_read_however_many_short_ones_come(
    make_runner: MakeRunner,
) -> None:
    runner = make_runner(new_tokens=2, drafter=None, ignore_eos=True)
    queue, (long, short) = Scheduler(runner), prompts_of(100, 3)
    queue.add("long", long, queue.request(0))
    for number in range(40):
        queue.add(number, short, queue.request(number))
        if any(served.key == "long" for served in queue.step()):
            return
    raise AssertionError("the long prompt waits")


def test_a_prompt_that_fills_a_cache_has_room_for_its_first_token(
    make_runner: MakeRunner,
) -> None:
    runner, prompts = make_runner(new_tokens=2, drafter=None), prompts_of(64)
    (served,) = serve(runner, prompts)
    assert_same_tokens([served.row.generated_ids], alone(runner, prompts))


def test_caches_may_grow_while_a_long_prompt_is_read(
    make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "ROUNDS", 1)
    runner = make_runner(new_tokens=80, drafter=None, ignore_eos=True)
    prompts = prompts_of(16, 20)
    queue, found = Scheduler(runner), {}
    queue.add(0, prompts[0], queue.request(0))
    for _ in range(47):  # One token of the prefill, one per round: 64 slots are full.
        assert queue.step() == []
    queue.add(1, prompts[1], queue.request(1))
    while not queue.is_idle:
        found |= {served.key: served.row.generated_ids for served in queue.step()}
    assert_same_tokens([found[0], found[1]], alone(runner, prompts))


SMALL = SmallModel(target=TARGET, vocab_size=TARGET.config.vocab_size)


@pytest.mark.parametrize(
    ("drafter", "params"),
    [
        (DRAFTER, PARAMS),
        (None, PARAMS),
        (LookupDrafter(), PARAMS),
        (RecyclingDrafter(vocab_size=TARGET.config.vocab_size), PARAMS),
        (
            TreeDrafter(model=SMALL, tree=TREE),
            Params(target=PARAMS.target, drafter=PARAMS.target),
        ),
        (SwitchDrafter(first=LookupDrafter(max_ngram=8), second=DRAFTER), PARAMS),
    ],
    ids=["eagle", "plain", "lookup", "recycling", "small model", "switch"],
)
def test_what_a_prompt_shares_with_a_text_is_not_read_again(
    make_runner: MakeRunner,
    monkeypatch: pytest.MonkeyPatch,
    drafter: Any,
    params: Params,
) -> None:
    """Tokens and what is accepted are those of a prompt that is read as a whole."""
    for module in (prefixes, scheduler):
        monkeypatch.setattr(module, "SMALL_CHUNK", 4)
    runner = dataclasses.replace(
        make_runner(drafter=drafter, batch_size=2, ignore_eos=True),
        pair=dataclasses.replace(PAIR, params=params),
    )

    def served(queue: Scheduler, key: int, prompt: list[int]) -> Served:
        queue.add(key, prompt, queue.request(key))
        while not (found := queue.step()):
            pass
        return found[0]

    queue, prompt = Scheduler(runner), prompts_of(15)[0]
    first = served(queue, 0, prompt)
    # A chat's next turn, and another question after the same system prompt.
    text = prompt + first.row.generated_ids
    longest, reused = [*text, 11, 12, 13], []
    for key, again in enumerate((longest, [*prompt[:13], 50, 51, 52, 53]), 1):
        found, fresh = served(queue, key, again), served(Scheduler(runner), key, again)
        assert found.row.generated_ids == fresh.row.generated_ids
        assert found.row.accept_lengths == fresh.row.accept_lengths
        reused.append(found.reused)
        assert fresh.reused == 0
    waiting = runner.decoder.depth + 2
    assert reused[1] == 12 and 0 <= len(text) - waiting - reused[0] < 4


@pytest.mark.parametrize(
    ("prompt", "seed", "named"),
    [
        ([], 0, ["has no token"]),
        ([5] * 150, 0, ["150 tokens", "may have 150", "shorten the prompt"]),
        ([5, 64], 0, ["the id 64", "0 to 63"]),
        ([5], -1, ["seed = -1"]),
    ],
    ids=["empty", "long", "id", "seed"],
)
def test_what_cannot_be_decoded_is_refused_before_anything_is(
    make_runner: MakeRunner, prompt: list[int], seed: int, named: list[str]
) -> None:
    runner = make_runner()
    queue = Scheduler(runner)
    refused(lambda: queue.add("key", prompt, queue.request(seed)), *named)
    assert queue.is_idle
    many = [[5]] * 9
    refused(
        lambda: list(
            decode_all(
                runner,
                [*many, prompt],
                [runner.request(one) for one in [0] * 9 + [seed]],
            )
        ),
        *named,
    )


def test_stop_tokens_may_be_many_and_ignored(make_runner: MakeRunner) -> None:
    runner = make_runner(new_tokens=9, ignore_eos=True)
    pair = dataclasses.replace(runner.pair, stop_tokens=tuple(range(20, 29)))
    (served,) = serve(dataclasses.replace(runner, pair=pair), [[5]])
    assert len(served.row.generated_ids) == 9


def test_a_single_row_is_decoded_prompt_by_prompt(
    make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "insert", None)
    runner = make_runner(batch_size=1, prompt_bucket=16, new_tokens=5)
    served = list(
        decode_all(runner, prompts_of(2, 3), [runner.request(n) for n in (0, 1)])
    )
    assert [one.key for one in served] == [0, 1]


@pytest.mark.parametrize(
    ("rows", "lengths", "expected"),
    [
        (8, [16000] + 7 * [10], True),
        (8, 9 * [10], True),
        (8, 8 * [16000], False),
        (8, [2000] + 7 * [10], False),
        (1, [16000, 10], False),
    ],
)
def test_a_queue_spares_short_prompts_the_padding_of_long_ones(
    make_runner: MakeRunner,
    monkeypatch: pytest.MonkeyPatch,
    rows: int,
    lengths: list[int],
    expected: bool,
) -> None:
    monkeypatch.setattr(scheduler, "PREFILL_CHUNK", PREFILL_CHUNK)
    prompts = [[0] * length for length in lengths]
    assert is_queue(make_runner(batch_size=rows), prompts) == expected
