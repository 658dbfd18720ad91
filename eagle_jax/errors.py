"""The one error that means: the input is wrong, not the program."""


class InputError(ValueError):
    """Something the caller gave cannot be used.

    The message is one line that names what was given, what was expected and what
    to do. Scripts print it without a traceback and exit with code 2.
    """
