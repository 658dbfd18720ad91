"""Errors and Ctrl-C inside a step, in a serving loop that goes on: no text is lost."""

import contextlib
import inspect
import itertools
import linecache
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from eagle_jax.engine.runner import Runner
from eagle_jax.engine.scheduler import Scheduler

from eagle_jax.decoding import slots
from eagle_jax.engine import scheduler
from tests.engine.test_scheduler import MakeRunner, make_runner, prompts_of
from tests.helpers import refused

__all__ = ["make_runner"]

PROMPTS = prompts_of(2, 40, 5, 1)
MOST_STEPS = 500
MOST_CALLS = 4 * MOST_STEPS


def serve(queue: Scheduler) -> dict[int, list[int]]:
    """The texts of all prompts, from a loop that outlives what a step raises.

    A scheduler that is wrong may loop within a step, or double what waits, too.
    """
    call, calls = Runner.call, itertools.count()

    def counted(*arguments: Any, **static: Any) -> Any:
        assert next(calls) < MOST_CALLS, "the queue has no end"
        return call(*arguments, **static)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "call", counted)
        found = _serve(queue)
    assert found.keys() == {*range(len(PROMPTS))}
    return found


def _serve(queue: Scheduler) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for number, prompt in enumerate(PROMPTS):
        queue.add(number, prompt, queue.request(number))
    for _ in range(MOST_STEPS):
        if queue.is_idle:
            return found
        assert queue.num_waiting <= len(PROMPTS), "a text waits twice"
        try:
            done = queue.step()
        except (RuntimeError, KeyboardInterrupt):
            if queue.is_broken:
                queue.add_again(queue.reset())
            continue
        for served in done:
            assert served.key not in found, "served twice"
            found[served.key] = served.row.generated_ids
    raise AssertionError("the queue has no end")


@pytest.mark.parametrize("name", ["call", "fetch", "insert"])
@pytest.mark.parametrize("is_late", [False, True], ids=["before", "after"])
def test_texts_outlive_an_error_of_any_call_of_the_devices(
    make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch, name: str, is_late: bool
) -> None:
    """Before it begins, or after it has spent what it was given."""
    runner = make_runner(new_tokens=8, batch_size=2)
    wanted = serve(Scheduler(runner))
    kept, calls = getattr(Runner, name), 0

    def failing(*arguments: Any, **static: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == wrong and not is_late:
            raise RuntimeError
        result = kept(*arguments, **static)
        if calls == wrong:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(Runner, name, failing)
    wrong = calls = 0
    serve(Scheduler(runner))
    for wrong in range(1, calls + 1):
        calls = 0
        assert serve(Scheduler(runner)) == wanted, wrong
        assert calls >= wrong


def test_texts_outlive_ctrl_c_at_any_line(make_runner: MakeRunner) -> None:
    runner = make_runner(new_tokens=8, batch_size=2)
    wanted = serve(Scheduler(runner))
    rng = random.Random(0)
    with interrupting(lambda: rng.random() < 0.01):
        assert serve(Scheduler(runner)) == wanted


@contextlib.contextmanager
def interrupting(is_chosen: Callable[[], bool]) -> Iterator[None]:
    """Raises KeyboardInterrupt at those lines of `step`, and of what it calls."""

    def trace(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != path or frame.f_code.co_name not in names:
            return None
        # CPython looks for signals at calls and jumps: none lies before this line.
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        is_end = line.strip() == "return served"
        if event == "line" and not is_end and is_chosen():
            raise KeyboardInterrupt
        return trace

    path = inspect.getfile(scheduler)
    names = {"step", "_prefill", "_next_texts", "_requests", "_ensure_slots", "_enter"}
    names |= {"_prefill_short", "_start_long", "_prefill_chunk", "_write", "_look"}
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def test_a_broken_scheduler_asks_for_a_reset_and_keeps_what_has_ended(
    make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = Scheduler(make_runner(new_tokens=1, batch_size=2))
    waiting.add("first", [5], waiting.request(0))
    waiting.add("long", PROMPTS[1], waiting.request(1))
    with monkeypatch.context() as patch:
        call = Runner.call

        def failing(runner: Runner, function: Any, *rows: Any, **static: Any) -> Any:
            result = call(runner, function, *rows, **static)
            if function is slots.prefill_chunk:
                raise RuntimeError
            return result

        patch.setattr(Runner, "call", failing)
        with pytest.raises(RuntimeError):
            waiting.step()
    assert waiting.is_broken
    refused(waiting.step, "call `reset()`")
    refused(lambda: waiting.add("next", [5]), "call `reset()`")
    (left,) = waiting.reset()
    assert (left.key, left.row.prompt_ids, left.settings.seed) == (
        "long",
        PROMPTS[1],
        1,
    )
    waiting.add("next", [5])
    assert [text.key for text in waiting.step()] == ["first", "next"]
    assert waiting.is_idle
