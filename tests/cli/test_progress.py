"""Progress in a log: what is left, and what compiling took."""

import sys
import time

import jax
import pytest
from rich.progress import Progress

from eagle_jax.cli import progress as module
from eagle_jax.cli.progress import progress


def test_compiling_shows_its_seconds_and_is_no_part_of_what_is_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now, passed = time.monotonic, 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now() + passed)
    with progress("work", 3, pause=0) as update:
        jax.monitoring.record_event_duration_secs(module._COMPILING, 600.0)
        passed = 660.0
        update(1)
        update(3)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "work: compiled in 600 s",
        "work 1 of 3 | 2 min left",
        "work 3 of 3",
    ]


def test_a_bar_says_compiling_from_tracing_to_the_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bars: list[Progress] = []

    class Kept(Progress):
        def start(self) -> None:
            bars.append(self)

    monkeypatch.setattr(module, "Progress", Kept)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress("work", 3) as update:
        update(1, "loss 2.0")
        fields = bars[0].tasks[0].fields
        traced = jax.jit(lambda x: x * 5).trace(1.0)
        assert fields["note"] == "compiling"
        lowered = traced.lower()
        assert fields["note"] == "compiling"
        lowered.compile()
        assert fields["note"] == "loss 2.0"
    assert not module._watching


def test_jax_tells_of_what_it_compiles() -> None:
    before = len(module._compiled)
    jax.jit(lambda x: x * 3 + before)(1.0)
    assert len(module._compiled) > before
