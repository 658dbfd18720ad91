"""How far a long run is: a bar on a terminal, a line now and then in a log."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

from eagle_jax.cli.command import say

_SECONDS_BETWEEN_LINES = 10.0


@contextlib.contextmanager
def progress(label: str, total: int, done: int = 0) -> Iterator[Callable[[int], None]]:
    """Shows how much of a known number is done.

    Args:
        label: What is being done.
        total: How much there is.
        done: How much was done before.

    Yields:
        To be called with the number that is done by now.
    """
    if not sys.stderr.isatty():
        yield _log_lines(label, total)
        return
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=Console(stderr=True)
    ) as shown:
        task = shown.add_task(label, total=total, completed=done)
        yield lambda done: shown.update(task, completed=done)


def _log_lines(label: str, total: int) -> Callable[[int], None]:
    """Returns what prints a line at the start, at the end and every ten seconds."""
    printed_at = -_SECONDS_BETWEEN_LINES

    def update(done: int) -> None:
        nonlocal printed_at
        now = time.monotonic()
        if done == total or now - printed_at >= _SECONDS_BETWEEN_LINES:
            printed_at = now
            say(f"{label}: {done} of {total}")

    return update
