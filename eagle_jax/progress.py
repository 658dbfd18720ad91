"""How long work says where it is: what library functions are given to call."""

import contextlib
from collections.abc import Callable

Report = Callable[[str], None]
"""Called with a line for a log."""

Progress = Callable[..., contextlib.AbstractContextManager[Callable[..., None]]]
"""Called with a label, a total and what is done already, as `tqdm` is.

Yields what is called with the number done by now and, if there is something to say of
it, with a note. `eagle_jax.cli.progress.progress` is one.
"""


def say_nothing(line: str) -> None:
    """Is the `Report` of whoever gives none."""


def show_nothing(
    *_: object, **__: object
) -> contextlib.AbstractContextManager[Callable[..., None]]:
    """Is the `Progress` of whoever gives none."""
    return contextlib.nullcontext(lambda *_: None)
