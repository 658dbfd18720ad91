"""Two ways of decoding in turns, whose speeds a clock of the test's own tells."""

import dataclasses
import time
from collections.abc import Iterator
from typing import Any, cast

import pytest

from eagle_jax.cli import results
from eagle_jax.cli.comparison import compare
from eagle_jax.cli.session import Session


@dataclasses.dataclass
class Clock:
    """Seconds since the test began."""

    now: float = 0.0


@dataclasses.dataclass
class Timed:
    """A session of a text of 13 tokens that takes as long as it is told."""

    clock: Clock
    seconds: Iterator[float]
    taken: float = 1.0
    ids: tuple[int, ...] = (1, 2)

    def again(self, plain: "Timed | None" = None) -> "Timed":
        return dataclasses.replace(plain or self)

    def warm_up(self) -> None:
        """Compiles nothing."""

    def decode_all(self, *, has_progress: bool = True) -> bool:
        self.taken = next(self.seconds)
        self.clock.now += abs(self.taken)
        return self.taken > 0

    @property
    def speed(self) -> float:
        return 12 / self.taken


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    return clock


def compared(
    clock: Clock, drafted: list[float], plain: list[float], **other: Any
) -> dict[str, Any] | None:
    """Compares sessions; the first drafted one has ended."""
    ours = Timed(clock, iter(drafted[1:]), drafted[0])
    theirs: Any = Timed(clock, iter(plain), **other)
    return compare(cast(Session, ours), theirs, is_other=False)


def told(found: dict[str, Any] | None) -> str:
    totals = {"tokens": 13, "rounds": 6, "tokens_per_round": 2.0, "compile_seconds": 0}
    return results.summary(totals | (found or {}))


def test_near_turns_are_three_and_the_median_one_counts(clock: Clock) -> None:
    found = compared(clock, [0.2, 0.25, 0.22], [0.5, 0.6, 0.55])
    assert found is not None
    assert found["speedups"] == pytest.approx([2.5, 2.4, 2.5])
    assert found["speedup"] == pytest.approx(2.5)
    ours, theirs = found["tokens_per_second"], found["autoregressive_tokens_per_second"]
    assert ours / theirs == found["speedup"]
    end = "speedup 2.50 (2.40 to 2.50 in 3 turns) | identical tokens"
    assert told(found).endswith(end)


def test_turns_that_disagree_are_called_not_stable(clock: Clock) -> None:
    drafted = [0.2] * 9
    plain = [0.3, 0.15, 0.3, 0.4, 0.3, 0.1, 0.3, 0.3, 0.3]
    line = told(compared(clock, drafted, plain))
    assert "speedup 1.50 (0.50 to 2.00 in 9 turns, not stable) |" in line


@pytest.mark.parametrize(("seconds", "turns"), [(0.4, 9), (2.0, 4), (4.0, 2), (6.0, 1)])
def test_turns_add_a_few_seconds_at_most(
    clock: Clock, seconds: float, turns: int
) -> None:
    drafted = [seconds / 2, seconds / 4] * 5  # Never near each other.
    found = compared(clock, drafted, [seconds] * 9)
    assert found is not None and len(found["speedups"]) == turns
    assert clock.now <= 10
    assert ("turns" in told(found)) == (turns > 1)


def test_several_processes_take_one_turn_as_their_clocks_differ(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jax.process_count", lambda: 2)
    found = compared(clock, [0.2], [0.5])
    assert found is not None and found["speedups"] == [2.5]


def test_ctrl_c_in_any_turn_ends_the_comparison(clock: Clock) -> None:
    assert compared(clock, [0.2], [-0.1]) is None
    assert compared(clock, [0.2, -0.1], [0.5]) is None
    assert compared(clock, [0.2, 0.2], [0.5, -0.1]) is None


def test_other_tokens_in_any_turn_are_told(clock: Clock) -> None:
    found = compared(clock, [0.2] * 3, [0.5] * 3, ids=(1, 3))
    assert found is not None and found["identical"] is False
