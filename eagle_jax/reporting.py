"""What long work reports: lines, progress, and tables of markdown."""

import contextlib
from collections.abc import Callable, Iterable, Sequence

Report = Callable[[str], None]
"""A function that takes a line for a log."""

Progress = Callable[..., contextlib.AbstractContextManager[Callable[..., None]]]
"""A function that takes a label, a total and the number done already, as `tqdm` does.

Its context yields a function that takes the number done by now and, where there is
something to say, a note. `eagle_jax.cli.progress.progress` is one.
"""


def say_nothing(line: str) -> None:
    """Does nothing: the `Report` of a caller that gives none."""


def show_nothing(
    *_: object, **__: object
) -> contextlib.AbstractContextManager[Callable[..., None]]:
    """Shows nothing: the `Progress` of a caller that gives none."""
    return contextlib.nullcontext(lambda *_: None)


NOTHING = "-"


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table with padded columns, the first one to the left."""
    lines = [[cell.replace("|", "\\|") for cell in row] for row in (header, *rows)]
    widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    cells = [
        [row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in lines
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in (cells[0], rule, *cells[1:]))


def ratio(value: float | None) -> str:
    """Returns a speedup as a cell, such as "1.50x"."""
    return NOTHING if value is None else f"{value:.2f}x"


def decimals(value: float | None, digits: int = 2) -> str:
    """Returns a number with `digits` digits after the point; none and NaN are "-"."""
    return NOTHING if value is None or value != value else f"{value:.{digits}f}"
