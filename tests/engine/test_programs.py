"""What is compiled, when, and for how long it is kept."""

import dataclasses
import gc
import sys
from pathlib import Path
from threading import Thread
from typing import Any

import jax
import numpy as np
import pytest

from eagle_jax.decoding import growth
from eagle_jax.decoding.growth import bucket_sizes
from eagle_jax.decoding.requests import bucket_length, bucket_rows
from eagle_jax.engine import Engine, Text, engine, programs
from eagle_jax.engine.programs import Programs, Store
from eagle_jax.models.quantized import quantize_layers
from eagle_jax.models.transformer import Transformer
from tests.engine.test_engine import DRAFTER, PARAMS, MakeEngine, again
from tests.engine.test_engine import make_engine as make_small_engine

__all__ = ["make_small_engine"]

LONG, SHORT = 150, 3


@pytest.fixture
def make_engine(
    make_small_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> MakeEngine:
    """Makes engines of texts whose cache begins with 128 slots and ends with 320."""
    monkeypatch.setattr(growth, "FIRST_LENGTH", 100)
    monkeypatch.setattr(programs, "PROGRAMS", Store())

    def make(**settings: Any) -> Engine:
        defaults = {"new_tokens": LONG, "ignore_eos": True, "temperature": 0.0}
        shape = {"max_length": 180, "batch_size": 1}
        return make_small_engine(**(defaults | shape | settings))

    return make


def ask(queue: Engine, prompt: list[int], seed: int = 0, **settings: Any) -> Text:
    request = queue.pair.request(seed=seed, **settings)
    return queue.pair.text(prompt, request, index=seed)


def run(queue: Engine, *texts: Text) -> list[Text]:
    for text in texts:
        queue.add(text)
    assert {text for text in queue.run() if text.has_ended} == {*texts}
    return [*texts]


def let_compiling_take(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stops the clock but for programs, each of which takes so long to compile."""
    now, bind = 0.0, Programs._bind

    def slow(*arguments: Any) -> Any:
        nonlocal now
        now += seconds
        return bind(*arguments)

    monkeypatch.setattr(Programs, "_bind", slow)
    monkeypatch.setattr("time.perf_counter", lambda: now)


@pytest.mark.parametrize("drafter", [DRAFTER, None], ids=["drafts", "plain"])
@pytest.mark.parametrize("keeps_rounds", [False, True])
def test_warming_up_makes_the_first_cache_alone(
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    drafter: Any,
    keeps_rounds: bool,
) -> None:
    jax.clear_caches()  # What was traced before is not traced again.
    made: set[int] = set()
    init_cache = Transformer.init_cache

    def noted(target: Transformer, batch: int, capacity: int) -> Any:
        made.add(capacity)
        return init_cache(target, batch, capacity)

    monkeypatch.setattr(Transformer, "init_cache", noted)
    queue = make_engine(drafter=drafter)
    short, long = ask(queue, [1, 2], max_new_tokens=SHORT), ask(queue, [1, 2])
    short.keeps_rounds = long.keeps_rounds = keeps_rounds
    queue.warm_up([short])
    assert made == {128}
    compiled = programs.PROGRAMS.compile_seconds
    run(queue, short)
    assert programs.PROGRAMS.compile_seconds == compiled
    run(again(queue), long)
    assert made == {128, 320}


def test_compiling_for_a_larger_cache_is_counted_once(make_engine: MakeEngine) -> None:
    queue = make_engine()
    queue.warm_up([ask(queue, [1, 2])])
    taken, texts = [programs.PROGRAMS.compile_seconds], []
    for _ in range(2):
        texts += run(again(queue), ask(queue, [1, 2]))
        taken.append(programs.PROGRAMS.compile_seconds)
    assert taken[0] < taken[1] == taken[2]
    assert texts[0].result() == texts[1].result()
    assert len(texts[0].token_ids) == LONG


def test_what_is_compiled_in_a_run_is_no_part_of_its_decoding(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_compiling_take(1000.0, monkeypatch)
    queue = make_engine()
    (text,) = run(queue, ask(queue, [1, 2]))
    assert (text.prefill_seconds, text.decode_seconds) == (0, 0)
    # Prefill, rounds, a larger cache, rounds.
    assert programs.PROGRAMS.compile_seconds == 4000


def test_rounds_seen_one_by_one_give_the_same_text(make_engine: MakeEngine) -> None:
    queue = make_engine(batch_size=2)
    asked = [([1, 2, 3], 0), ([7], 1)]
    texts = [ask(queue, prompt, seed) for prompt, seed in asked]
    for text in texts:
        text.keeps_rounds = True
    seen = run(queue, *texts)
    whole = run(again(queue), *(ask(queue, prompt, seed) for prompt, seed in asked))
    assert [text.result() for text in seen] == [text.result() for text in whole]
    for text in seen:
        accepted = [int(done.acceptance.num_accepted) for done, _ in text.rounds]
        assert accepted == text.accept_lengths


@pytest.mark.parametrize("drafter", [DRAFTER, None], ids=["drafts", "plain"])
def test_texts_hold_the_log_probabilities_of_all_their_tokens(
    make_engine: MakeEngine, drafter: Any
) -> None:
    queue = make_engine(drafter=drafter, batch_size=2)
    told = {"logprobs": 2, "prompt_logprobs": 2}
    asked = [([1, 2, 3], 0), ([7], 1)]
    texts = run(queue, *(ask(queue, prompt, seed, **told) for prompt, seed in asked))
    for text in texts:
        assert text.logprobs is not None and text.prompt_logprobs is not None
        ids = [
            [one.token_id for one in x] for x in (text.prompt_logprobs, text.logprobs)
        ]
        assert ids == [text.prompt_ids[1:], text.token_ids]
        for one in [*text.logprobs, *text.prompt_logprobs]:
            assert len(one.top) == 2
        # At temperature 0 each is the first of the likeliest.
        for one in text.logprobs:
            assert next(iter(one.top.items())) == (one.token_id, one.logprob)
            assert one.logprob < 0
    # A queue reads its rows in the same way; who asks for none gets none.
    other, silent = again(queue), ask(queue, [7], 1)
    queued = [other.add(ask(queue, prompt, seed, **told)) for prompt, seed in asked]
    while not other.is_idle:
        other.step()
    for text, found in zip(texts, queued, strict=True):
        assert found.logprobs is not None and text.logprobs is not None
        np.testing.assert_allclose(
            [one.logprob for one in found.logprobs],
            [one.logprob for one in text.logprobs],
            atol=1e-4,
        )
    assert run(again(queue), silent)[0].logprobs is None


@pytest.mark.parametrize("prompt", [[1, 2, 3], [1, 2, 3] * 25], ids=["short", "long"])
def test_samples_of_one_prompt_are_those_of_separate_prompts(
    prompt: list[int], make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The long one is read by all rows together, in chunks.
    monkeypatch.setattr(engine, "PREFILL_CHUNK", 512)
    queue = make_engine(batch_size=2, temperature=1.0, new_tokens=SHORT)
    found, expected = (
        [
            text.token_ids
            for text in run(again(queue), *(ask(queue, prompt, x, n=n) for x in (4, 5)))
        ]
        for n in (2, 1)
    )
    assert found == expected
    assert found[0] != found[1]


@pytest.mark.skipif(sys.platform != "linux", reason="memory maps are Linux's")
def test_programs_that_are_dropped_free_their_memory_maps(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def num_maps() -> int:
        gc.collect()
        return len(Path("/proc/self/maps").read_text().splitlines())

    store = Store(most=2)
    monkeypatch.setattr(programs, "PROGRAMS", store)
    queue = make_engine(max_length=40, new_tokens=SHORT)
    maps = []
    for rows in (1, 2, 3):
        one = again(queue, batch_size=rows)
        run(one, *(ask(one, [1, 2], seed) for seed in range(rows)))
        maps.append(num_maps())
    assert store.num_kept == 2
    assert maps[-1] - maps[0] < 100, maps  # A program has hundreds.


def test_compiling_that_is_interrupted_counts_as_compiling(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = iter((5.0, 12.0))
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    programs = Store()

    def interrupted() -> jax.stages.Compiled:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        programs.get("a", interrupted)
    assert (programs.compile_seconds, programs.num_kept) == (7, 0)


def test_the_program_unused_longest_is_dropped() -> None:
    programs, compiled = Store(most=2), []

    def get(name: str) -> None:
        def compile_it() -> jax.stages.Compiled:
            compiled.append(name)
            return jax.jit(lambda x: x + 1).lower(1).compile()

        programs.get(name, compile_it)

    for name in "abacab":
        get(name)
    assert compiled == ["a", "b", "c", "b"]


def test_pairs_share_programs_if_their_weights_are_of_the_same_types(
    make_engine: MakeEngine,
) -> None:
    small = dataclasses.replace(PARAMS, target=quantize_layers(PARAMS.target, bits=8))
    counts = []
    for params in (PARAMS, small, jax.tree.map(lambda leaf: leaf + 0, PARAMS)):
        queue = make_engine(params=params, new_tokens=8)
        (text,) = run(queue, ask(queue, [1, 2, 3]))
        assert len(text.token_ids) == 8
        counts.append(programs.PROGRAMS.num_kept)
    assert counts[0] < counts[1] == counts[2]


def test_threads_may_drop_what_others_look_up() -> None:
    programs, threads = Store(most=1), []
    program = jax.jit(lambda x: x + 1).lower(1).compile()

    class Key:
        def __hash__(self) -> int:
            """Lets another thread drop it, at every look into the store."""
            other = Thread(target=programs.get, args=(object(), lambda: program))
            threads.append(other)
            other.start()
            other.join(0.05)
            return 0

    key = Key()
    for _ in range(2):
        assert programs.get(key, lambda: program) is program
    for other in threads:
        other.join()
    assert programs.num_kept == 1


def test_calls_of_any_shape_share_few_programs() -> None:
    rng, found = np.random.default_rng(0), set()
    for _ in range(200):
        lengths = rng.integers(1, 2001, rng.integers(1, 9))
        limit, rows = rng.integers(16, 513), bucket_rows(len(lengths))
        prompt = bucket_length(lengths.max())
        longest = int(lengths.max() + limit)
        sizes = bucket_sizes(longest, prompt=prompt, depth=7)
        found |= {(rows, prompt, sizes[0]), *((rows, size) for size in sizes)}
    assert len(found) <= 26
