"""The progress of a long run: a bar on a terminal, lines in a log."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

import jax
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from eagle_jax.cli.command import say

_STAGES = "/jax/core/compile/"  # Tracing, lowering and compiling, each at its end.
_COMPILING = f"{_STAGES}backend_compile_duration"
_compiled: list[float] = []
_watching: list[Callable[[bool], None]] = []


def _note(event: str, duration_secs: float, **_: object) -> None:
    if event == _COMPILING:
        _compiled.append(duration_secs)
    if event.startswith(_STAGES):
        for watch in _watching:
            watch(event != _COMPILING)


jax.monitoring.register_event_duration_secs_listener(_note)


def _clock() -> float:
    """Returns a time in seconds that stands still while programs are compiled."""
    return time.monotonic() - sum(_compiled)


@contextlib.contextmanager
def progress(
    label: str, total: int, done: int = 0, *, pause: float = 10.0, is_shown: bool = True
) -> Iterator[Callable[..., None]]:
    """Shows how much of a known number is done, and when programs are compiled.

    What is left is judged by the time without compiling, which is over soon.

    Args:
        label: The name of the work.
        total: The number of parts of the work.
        done: The number of parts that were done before.
        pause: The least time between two lines of a log, in seconds; the last line
            does not wait.
        is_shown: Whether anything is shown.

    Yields:
        A function that takes the number of parts done by now and, if there is
        something to say of it, a note.
    """
    on_terminal = sys.stderr.isatty()
    first, started, compiled = done, _clock(), sum(_compiled)
    printed_at, noted = -pause, ""
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn())
    with Progress(
        *columns,
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=Console(stderr=True),
        get_time=_clock,
        disable=not (is_shown and on_terminal),
    ) as bar:
        task = bar.add_task(label, total=total, completed=done, note="")

        def watch(is_compiling: bool) -> None:
            bar.update(task, note="compiling" if is_compiling else noted)

        def update(done: int, note: str = "") -> None:
            nonlocal printed_at, compiled, noted
            noted = note
            bar.update(task, completed=done, note=note)
            if is_shown and (new := sum(_compiled) - compiled) >= 1:
                bar.console.print(f"{label}: compiled in {new:.0f} s", highlight=False)
                compiled += new
            now = time.monotonic()
            is_due = done == total or now - printed_at >= pause
            if not is_shown or on_terminal or not is_due:
                return
            printed_at = now
            parts = [f"{label} {done} of {total}", note]
            if first < done < total:
                seconds = (_clock() - started) / (done - first) * (total - done)
                parts.append(f"{seconds / 60:.0f} min left")
            say(" | ".join(filter(None, parts)))

        _watching.append(watch)
        try:
            yield update
        finally:
            _watching.remove(watch)
