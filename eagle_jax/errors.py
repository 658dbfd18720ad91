"""The one error that means: the input is wrong, not the program."""

import re

_LONGEST = 290  # Three hundred with what stands before: "error: " or "warning: ".
_GAP = " ... "
_ARGUMENTS = (
    *("cache_features", "categories", "chat", "coordinator", "data", "draft", "dtype"),
    *("draft_vocabulary", "grid", "hydra", "json_schema", "limit", "max_length"),
    *("medusa", "methods", "num_processes", "output", "overwrite", "per_category"),
    *("process_id", "quantization", "random", "regex", "resume", "samples"),
    *("small_model", "target", "template"),
)
_ARGUMENT = re.compile(f"`({'|'.join(_ARGUMENTS)})`")


class InputError(ValueError):
    """The error of an input that cannot be used.

    The message is one line that names what was given, what was expected and what
    to do. Scripts print it without a traceback and exit with code 2. Since it may
    repeat what a file says, it passes through `one_line`.
    """

    def __init__(self, message: object) -> None:
        """Takes the message.

        Args:
            message: The text, or an error whose text is taken.
        """
        super().__init__(one_line(str(message)))


def with_flags(message: str) -> str:
    """Returns a message in which arguments of Python are those of a command.

    >>> with_flags("give `max_length`, or another `dtype`")
    'give --max-length, or another --dtype'
    """
    return _ARGUMENT.sub(lambda name: "--" + name[1].replace("_", "-"), message)


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


def first_line(error: BaseException) -> str:
    """Returns an error's message in one line, or its type if it has no message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
