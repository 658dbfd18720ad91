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

from eagle_jax.decoding import slots
from eagle_jax.engine import Engine, engine, rows
from eagle_jax.engine.programs import Programs
from tests.engine.test_engine import (
    MakeEngine,
    again,
    make_engine,
    prompts_of,
    text_of,
)
from tests.helpers import refused

__all__ = ["make_engine"]

PROMPTS = prompts_of(2, 40, 5, 1)
WAYS = {"one by one": (16, 2), "all at once": (None, len(PROMPTS))}
"""The most rounds of a step, and the rows, by how prompts are read."""
MOST_STEPS = 500
MOST_CALLS = 4 * MOST_STEPS


def serve(queue: Engine, num_rounds: int | None = 16) -> dict[int, list[int]]:
    """The texts of all prompts, from a loop that outlives what a step raises.

    An engine that is wrong may loop within a step, or double what waits, too.
    """
    call, calls = Programs.call, itertools.count()

    def counted(*arguments: Any, **static: Any) -> Any:
        assert next(calls) < MOST_CALLS, "the queue has no end"
        return call(*arguments, **static)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Programs, "call", counted)
        found = _serve(queue, num_rounds)
    assert found.keys() == {*range(len(PROMPTS))}
    return found


def _serve(queue: Engine, num_rounds: int | None) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for number, prompt in enumerate(PROMPTS):
        queue.add(text_of(queue, prompt, number))
    for _ in range(MOST_STEPS):
        if queue.is_idle:
            return found
        assert queue.num_waiting <= len(PROMPTS), "a text waits twice"
        try:
            done = queue.step(num_rounds)
        except (RuntimeError, KeyboardInterrupt):
            if queue.is_broken:
                for text in queue.reset():
                    queue.add(text)
            continue
        for text in done:
            assert text.index not in found, "returned twice"
            found[text.index] = text.token_ids
    raise AssertionError("the queue has no end")


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("call", "one by one"),
        ("fetch", "one by one"),
        ("call", "all at once"),
    ],
)
@pytest.mark.parametrize("is_late", [False, True], ids=["before", "after"])
def test_texts_outlive_an_error_of_any_call_of_the_devices(
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    way: str,
    is_late: bool,
) -> None:
    """Before it begins, or after it has spent what it was given."""
    num_rounds, rows = WAYS[way]
    queue = make_engine(new_tokens=8, batch_size=rows)
    wanted = serve(queue, num_rounds)
    kept, calls = getattr(Programs, name), 0

    def failing(*arguments: Any, **static: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == wrong and not is_late:
            raise RuntimeError
        result = kept(*arguments, **static)
        if calls == wrong:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(Programs, name, failing)
    wrong = calls = 0
    serve(again(queue), num_rounds)
    for wrong in range(1, calls + 1):
        calls = 0
        assert serve(again(queue), num_rounds) == wanted, wrong
        assert calls >= wrong


@pytest.mark.parametrize("way", WAYS)
def test_texts_outlive_ctrl_c_at_any_line(make_engine: MakeEngine, way: str) -> None:
    num_rounds, rows = WAYS[way]
    queue = make_engine(new_tokens=8, batch_size=rows)
    wanted = serve(queue, num_rounds)
    rng = random.Random(0)
    with interrupting(lambda: rng.random() < 0.01):
        assert serve(again(queue), num_rounds) == wanted


@contextlib.contextmanager
def interrupting(is_chosen: Callable[[], bool]) -> Iterator[None]:
    """Raises KeyboardInterrupt at those lines of `step`, and of what it calls."""

    def trace(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in paths or frame.f_code.co_name not in names:
            return None
        # CPython looks for signals at calls and jumps: none lies before this line.
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        is_end = line.strip() == "return found"
        if event == "line" and not is_end and is_chosen():
            raise KeyboardInterrupt
        return trace

    paths = {inspect.getfile(engine), inspect.getfile(rows)}
    names = {"step", "_prefill", "_next_texts", "_requests", "_ensure_slots", "_enter"}
    names |= {"_read_at_once", "_read_chunk", "_write", "look", "enter", "write"}
    names |= {"read_as_all", "read", "start_reading", "finish_reading", "free"}
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def test_a_broken_engine_asks_for_a_reset_and_keeps_what_has_ended(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = make_engine(new_tokens=1, batch_size=2)
    first = waiting.add(text_of(waiting, [5], 0))
    long = waiting.add(text_of(waiting, PROMPTS[1], 1))
    with monkeypatch.context() as patch:
        call = Programs.call

        def failing(
            programs: Programs, function: Any, *rows: Any, **static: Any
        ) -> Any:
            result = call(programs, function, *rows, **static)
            if function is slots.prefill_chunk:
                raise RuntimeError
            return result

        patch.setattr(Programs, "call", failing)
        with pytest.raises(RuntimeError):
            waiting.step()
    assert waiting.is_broken
    refused(waiting.step, "call `reset()`")
    other = text_of(waiting, [5], 2)
    refused(lambda: waiting.add(other), "call `reset()`")
    assert waiting.reset() == [long]
    waiting.add(other)
    assert waiting.step() == [first, other]
    assert waiting.is_idle
