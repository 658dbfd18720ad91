"""The callbacks by which long work reports its progress to whoever called it."""

import contextlib
from collections.abc import Callable

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
