"""What is compiled, when, and for how long it is kept."""

import collections
import dataclasses
import gc
import sys
from pathlib import Path
from threading import Thread
from typing import Any

import jax
import numpy as np
import pytest
from eagle_jax.engine.runner import Runner
from eagle_jax.engine.shared import Shared

from eagle_jax.decoding.growth import bucket_sizes
from eagle_jax.decoding.requests import bucket_length, bucket_rows
from eagle_jax.engine.programs import Programs
from eagle_jax.models.transformer import Transformer
from tests.engine.test_scheduler import DRAFTER, MakeRunner, serve
from tests.engine.test_scheduler import make_runner as make_small_runner

__all__ = ["make_small_runner"]

LONG, SHORT = 100, 3


@pytest.fixture
def make_runner(make_small_runner: MakeRunner) -> MakeRunner:
    """Makes runners of texts whose cache begins with 64 slots and ends with 320."""

    def make(**settings: Any) -> Runner:
        defaults = {"new_tokens": LONG, "ignore_eos": True, "temperature": 0.0}
        shape = {"max_length": 180, "prompt_bucket": 16, "batch_size": 1}
        return make_small_runner(**(defaults | shape | settings))

    return make


@pytest.mark.parametrize("drafter", [DRAFTER, None], ids=["drafts", "plain"])
@pytest.mark.parametrize("by_round", [False, True])
def test_warming_up_makes_the_first_cache_alone(
    make_runner: MakeRunner,
    monkeypatch: pytest.MonkeyPatch,
    drafter: Any,
    by_round: bool,
) -> None:
    jax.clear_caches()  # What was traced before is not traced again.
    made: set[int] = set()
    init_cache = Transformer.init_cache

    def noted(target: Transformer, batch: int, capacity: int) -> Any:
        made.add(capacity)
        return init_cache(target, batch, capacity)

    monkeypatch.setattr(Transformer, "init_cache", noted)
    runner = make_runner(drafter=drafter)
    runner.warm_up(by_round=by_round)
    assert made == {0, 64}  # 0: nothing is cached when a prompt is read.
    if by_round:
        collections.deque(runner.rounds([[1, 2]], [runner.request(0)]), maxlen=0)
    else:
        runner.run([[1, 2]], [runner.request(0)])
    assert made == {0, 64, 320}


def test_compiling_for_a_larger_cache_is_counted_once(make_runner: MakeRunner) -> None:
    runner = make_runner()
    runner.warm_up(by_round=False)
    taken, texts = [runner.programs.compile_seconds], []
    for _ in range(2):
        texts.append(runner.run([[1, 2]], [runner.request(0)])[0])
        taken.append(runner.programs.compile_seconds)
    assert taken[0] < taken[1] == taken[2]
    assert texts[0] == texts[1]
    assert len(texts[0][0].generated_ids) == LONG


def test_what_is_compiled_in_a_run_is_no_part_of_its_decoding(
    make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, bind = 0.0, Runner._bind

    def slow(*arguments: Any) -> Any:
        nonlocal now
        now += 1000
        return bind(*arguments)

    monkeypatch.setattr(Runner, "_bind", slow)
    monkeypatch.setattr("time.perf_counter", lambda: now)
    runner = make_runner()
    assert runner.run([[1, 2]], [runner.request(0)])[1:] == (0, 0)
    # Prefill, rounds, a larger cache, rounds.
    assert runner.programs.compile_seconds == 4000


def test_rounds_seen_one_by_one_give_the_same_text(make_runner: MakeRunner) -> None:
    runner = make_runner(batch_size=2)
    prompts = [[1, 2, 3], [7]]
    seen = list(runner.rounds(prompts, [runner.request(0), runner.request(1)]))
    texts, _ = seen[-1]
    assert texts == runner.run(prompts, [runner.request(0), runner.request(1)])[0]
    assert len(seen) == max(len(row.accept_lengths) for row in texts) + 1


@pytest.mark.parametrize("drafter", [DRAFTER, None], ids=["drafts", "plain"])
def test_rows_hold_the_log_probabilities_of_all_their_tokens(
    make_runner: MakeRunner, drafter: Any
) -> None:
    shared = Shared(num_top=2, has_prompt=True)
    runner = make_runner(drafter=drafter, batch_size=2, shared=shared)
    rows, *_ = runner.run([[1, 2, 3], [7]], [runner.request(0), runner.request(1)])
    for row in rows:
        assert row.logprobs is not None and row.logprobs.prompt is not None
        counts = len(row.generated_ids), len(row.prompt_ids) - 1
        parts = row.logprobs, row.logprobs.prompt
        for count, part in zip(counts, parts, strict=True):
            assert len(part.own) == len(part.top) == count
            assert all(len(best) == 2 for best in part.top)
        # At temperature 0 each is the first of the likeliest.
        for token, own, best in zip(
            row.generated_ids, row.logprobs.own, row.logprobs.top, strict=True
        ):
            assert next(iter(best.items())) == (token, own) and own < 0
    # A queue reads its rows in the same way; who asks for none gets none.
    queued = {served.key: served.row for served in serve(runner, [[1, 2, 3], [7]])}
    for number, row in enumerate(rows):
        found = queued[number].logprobs
        assert found is not None and row.logprobs is not None
        np.testing.assert_allclose(found.own, row.logprobs.own, atol=1e-4)
    silent = make_runner(drafter=drafter, batch_size=2)
    assert silent.run([[7]], [silent.request(1)])[0][0].logprobs is None


def test_samples_of_one_prompt_are_those_of_separate_prompts(
    make_runner: MakeRunner,
) -> None:
    runner = make_runner(batch_size=4, temperature=1.0, new_tokens=SHORT)
    prompts, asked = [[1, 2, 3]] * 2, [runner.request(4), runner.request(5)]
    found, expected = (
        [row.generated_ids for row in runner.run(prompts, asked, num_samples=count)[0]]
        for count in (2, 1)
    )
    assert found == expected
    assert found[0] != found[1]


@pytest.mark.skipif(sys.platform != "linux", reason="memory maps are Linux's")
def test_programs_that_are_dropped_free_their_memory_maps(
    make_runner: MakeRunner,
) -> None:
    def num_maps() -> int:
        gc.collect()
        return len(Path("/proc/self/maps").read_text().splitlines())

    programs = Programs(most=2)
    runner = make_runner(programs=programs, max_length=40, new_tokens=SHORT)
    maps = []
    for rows in (1, 2, 3):
        dataclasses.replace(runner, batch_size=rows).run([[1, 2]], [runner.request(0)])
        maps.append(num_maps())
    assert programs.num_kept == 2
    assert maps[-1] - maps[0] < 100, maps  # A program has hundreds.


def test_compiling_that_is_interrupted_counts_as_compiling(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = iter((5.0, 12.0))
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    programs = Programs()

    def interrupted() -> jax.stages.Compiled:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        programs.get("a", interrupted)
    assert (programs.compile_seconds, programs.num_kept) == (7, 0)


def test_the_program_unused_longest_is_dropped() -> None:
    programs, compiled = Programs(most=2), []

    def get(name: str) -> None:
        def compile_it() -> jax.stages.Compiled:
            compiled.append(name)
            return jax.jit(lambda x: x + 1).lower(1).compile()

        programs.get(name, compile_it)

    for name in "abacab":
        get(name)
    assert compiled == ["a", "b", "c", "b"]


def test_threads_may_drop_what_others_look_up() -> None:
    programs, threads = Programs(most=1), []
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
