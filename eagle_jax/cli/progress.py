"""The progress of a long run: a bar on a terminal, lines in a log."""

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
