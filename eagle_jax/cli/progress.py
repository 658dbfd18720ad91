"""How far a long run is: a bar on a terminal, lines in a log."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from eagle_jax.cli.command import say


@contextlib.contextmanager
def progress(
    label: str,
    total: int,
    done: int = 0,
    *,
    pause: float = 10.0,
    is_shown: bool = True,
) -> Iterator[Callable[..., None]]:
    """Shows how much of a known number is done.

    Args:
        label: What is being done.
        total: How much there is.
        done: How much was done before.
        pause: Seconds at least between two lines of a log, the last one excepted.
        is_shown: If false, nothing is shown.

    Yields:
        To be called with the number that is done by now and, if there is something to
        say of it, with a note.
    """
    on_terminal = sys.stderr.isatty()
    first, started = done, time.monotonic()
    printed_at = -pause
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn())
    with Progress(
        *columns,
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=Console(stderr=True),
        disable=not (is_shown and on_terminal),
    ) as bar:
        task = bar.add_task(label, total=total, completed=done, note="")

        def update(done: int, note: str = "") -> None:
            nonlocal printed_at
            bar.update(task, completed=done, note=note)
            now = time.monotonic()
            is_due = done == total or now - printed_at >= pause
            if not is_shown or on_terminal or not is_due:
                return
            printed_at = now
            parts = [f"{label} {done} of {total}", note]
            if first < done < total:
                seconds = (now - started) / (done - first) * (total - done)
                parts.append(f"{seconds / 60:.0f} min left")
            say(" | ".join(filter(None, parts)))

        yield update
