"""Few rows run where few hold a text; the others come back as they were."""

import math
from typing import Any

import numpy as np
import pytest

from eagle_jax.engine import prefill as reading
from eagle_jax.engine.programs import Programs
from eagle_jax.engine.rows import Rows
from eagle_jax.testing import assert_same_tokens
from tests.engine.test_engine import (
    DRAFTER,
    MakeEngine,
    again,
    alone,
    make_engine,
    prompts_of,
    text_of,
)

__all__ = ["make_engine"]


def noted_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets the rows of each program of rounds that runs."""
    seen, call = list[int](), Programs.call

    def noted(
        programs: Programs, function: Any, rows: Any, *rest: Any, **how: Any
    ) -> Any:
        if function.__name__ == "decode_until":
            seen.append(len(rows.lengths))
        return call(programs, function, rows, *rest, **how)

    monkeypatch.setattr(Programs, "call", noted)
    return seen


@pytest.mark.parametrize("drafter", [DRAFTER, None], ids=["drafts", "plain"])
def test_rows_without_texts_are_left_out(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, drafter: Any
) -> None:
    """Texts come and go, caches grow, and one begins as a text that has ended did."""
    queue, call = make_engine(drafter=drafter, batch_size=8), Programs.call
    prompts = [*prompts_of(3, 5, 2, 40), *prompts_of(40)]
    prompts[4] = prompts[3] + prompts[4][:9]
    seen = noted_rows(monkeypatch)
    monkeypatch.setattr(reading, "SMALL_CHUNK", 4)
    # What compiling takes is nothing here.
    monkeypatch.setattr(Programs, "compile_seconds", lambda *_: [0.0])
    texts = [text_of(queue, prompt, seed) for seed, prompt in enumerate(prompts)]

    def write() -> None:
        while not queue.is_idle:
            before = [text.length for text in texts]
            queue.step(rounds=4)
            # A row that came back as it was parked would write its tokens once more.
            assert all(x.length >= n for x, n in zip(texts, before, strict=True))

    queue.add(texts[0])
    queue.step(rounds=2)
    for text in texts[1:4]:
        queue.add(text)
    write()
    queue.add(texts[4])
    write()
    found = [text.token_ids for text in texts]
    monkeypatch.setattr(Programs, "call", call)
    assert_same_tokens(found, alone(queue, prompts))
    assert seen[0] == seen[-1] == 1
    assert {*seen} == {1, 2, 4}
    assert texts[4].reused > 0


@pytest.mark.parametrize("drafter", [DRAFTER, None], ids=["drafts", "plain"])
def test_texts_of_the_last_rows_run_among_few_as_those_before_them_end(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, drafter: Any
) -> None:
    """And go back to their rows as others come, in whatever order they end."""
    queue = make_engine(drafter=drafter, batch_size=8, ignore_eos=True, new_tokens=40)
    monkeypatch.setattr(Programs, "compile_seconds", lambda *_: [0.0])
    rng, seen = np.random.default_rng(3), set[int]()
    prompts = prompts_of(*rng.integers(1, 60, 24))
    lengths = [int(x) for x in rng.choice([2, 6, 14, 40], 24)]
    texts = [
        text_of(queue, prompt, seed, max_new_tokens=length)
        for seed, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]
    waiting, rows = [*texts], queue._rows
    while waiting or not queue.is_idle:
        for _ in range(min(len(waiting), rng.choice([0, 0, 0, 4, 8]))):
            queue.add(waiting.pop(0))
        queue.step(rounds=2)
        if rows._parked is not None:
            seen.add(sum(row >= len(rows.running) for row in rows._order[:2]))
    # Some were the last rows, both, or one beside another.
    assert seen >= {0, 1, 2}
    found = [text.token_ids for text in texts]
    expected = alone(queue, prompts)
    assert_same_tokens(found, [x[:n] for x, n in zip(expected, lengths, strict=True)])


def test_short_calls_pay_together_for_programs_of_few_rows(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each runs two rows for one text at its end, which none alone would pay for."""
    queue, costs = make_engine(batch_size=2, ignore_eos=True), [math.inf]
    seen = noted_rows(monkeypatch)
    monkeypatch.setattr(Programs, "compile_seconds", lambda *_: costs)

    def rows_of_a_call() -> set[int]:
        seen.clear()
        lengths = enumerate((4, 30))
        texts = [text_of(queue, [5, 6], seed, max_new_tokens=n) for seed, n in lengths]
        again(queue).write(texts)
        return {*seen}

    assert rows_of_a_call() == {2}
    lost = queue.pair.kept[Rows][1]
    assert lost > 0
    # Another tree's program would pay, but it is not what runs.
    costs[:] = [lost, 1000 * lost]
    assert rows_of_a_call() == {2}
    costs[:] = [lost]
    assert rows_of_a_call() == {1, 2}


def test_what_compiles_ahead_spends_nothing_of_what_was_lost(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would compile few rows where more of them are about to run."""
    queue = make_engine(batch_size=2, ignore_eos=True)
    queue.add(text_of(queue, [5, 6], 0))
    queue.step(rounds=2)
    monkeypatch.setattr(Programs, "compile_seconds", lambda *_: [1.0])
    queue.pair.kept[Rows][1] = 100.0
    dry = queue._rows._dry()
    dry._run(1, 0)
    assert dry._parked is None
    assert queue.pair.kept[Rows][1] == 100


def test_a_prompt_begins_as_a_text_of_a_parked_row(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows have other numbers while few run."""
    queue = make_engine(batch_size=8, ignore_eos=True, new_tokens=40)
    monkeypatch.setattr(Programs, "compile_seconds", lambda *_: [0.0])
    monkeypatch.setattr(reading, "SMALL_CHUNK", 4)
    prompts = prompts_of(*[12] * 8, 24)
    # All begin together, and those of the last two rows go on.
    for seed, length in enumerate([4] * 6 + [40] * 2):
        queue.add(text_of(queue, prompts[seed], seed, max_new_tokens=length))
    queue.step(rounds=None, until_one_ends=True)
    while len(queue._rows.running) > 2 or queue._rows._parked is None:
        queue.step(rounds=1)
    order = queue._rows._order.tolist()
    assert order != sorted(order)
    longer = prompts[3] + prompts[8]
    text = text_of(queue, longer, 0)
    queue.add(text)
    assert text in [*queue.run()]
    assert text.reused == 8
    assert_same_tokens([text.token_ids], alone(queue, [longer]))
