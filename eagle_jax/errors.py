"""The one error that means: the input is wrong, not the program.

Whatever takes settings, files or a foreign model's answers raises it for what cannot be
used. Messages name settings as Python does, in backticks, which commands show as flags.
"""

import difflib
from collections.abc import Iterable

_LONGEST = 290  # Three hundred with what stands before: "error: " or "warning: ".
_GAP = " ... "


class InputError(ValueError):
    """The error of an input that cannot be used.

    The message is one line that names what was given, what was expected and what
    to do. Scripts print it without a traceback and exit with code 2. Since it may
    repeat what a file says, it passes through `one_line`.

    Attributes:
        setting: The name of the setting that is to blame; `None` if no single one is.
    """

    def __init__(self, message: object, *, setting: str | None = None) -> None:
        """Takes the message: a text, or an error whose text is taken."""
        super().__init__(one_line(str(message)))
        self.setting = setting


def one_line(text: str) -> str:
    r"""Returns a text as a line that any terminal may show.

    Line breaks, control characters and those that turn the direction of writing are
    escaped. Of a text of more than 290 characters the middle is left out: what is wrong
    stands at its beginning, what to do at its end.

    >>> one_line("a\x1b[2J\n\u202eb")
    'a\\x1b[2J\\n\\u202eb'
    """
    return _without_middle(
        "".join(
            character
            if character.isprintable()
            else character.encode("unicode_escape").decode("ascii")
            for character in _without_middle(text)  # A whole file may be repeated.
        )
    )


def _without_middle(text: str) -> str:
    half = (_LONGEST - len(_GAP)) // 2
    is_long = len(text) > _LONGEST
    return f"{text[:half]}{_GAP}{text[-half:]}" if is_long else text


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns the question whether a known name was meant; nothing if none is near.

    >>> did_you_mean("eagel2", ["eagle1", "eagle2", "lookup"])
    "; did you mean 'eagle2'?"
    """
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def shortened(names: Iterable[str], most: int) -> str:
    """Returns the first names of all, sorted, and how many more there are.

    >>> shortened("dacb", 2)
    'a, b and 2 more'
    """
    listed = sorted(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more


def first_line(error: BaseException) -> str:
    """Returns an error's message in one line, or its type if it has no message."""
    lines = (str(error).strip() or type(error).__name__).splitlines()
    # What ends in a colon says nothing without the lines after it.
    is_whole = not lines[0].rstrip().endswith(":")
    return lines[0] if is_whole else " ".join(map(str.strip, lines))
