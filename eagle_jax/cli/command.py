"""Messages, bad input and Ctrl-C, handled alike by every command."""

import argparse
import contextlib
import functools
import io
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from eagle_jax.errors import InputError, did_you_mean, one_line
from eagle_jax.models.devices import leave_out_tpus

EXIT_INPUT = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


class _Help(argparse.RawDescriptionHelpFormatter):
    """Help that says of each flag whether it is required, or what holds without it."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text, usual = with_flags(action.help or ""), action.default
        if action.required and action.option_strings:
            return f"{text} (required)"
        is_off = usual is None or usual is False or usual in ([], "", argparse.SUPPRESS)
        if is_off or "default" in text:
            return text
        many = usual if isinstance(usual, list | tuple) else [usual]
        shown = " ".join(map(str, many)).replace("%", "%%")
        return f"{text} (default: {shown})"

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        kinds: dict[Any, str] = {int: "N", float: "X", Path: "PATH"}
        usual = super()._get_default_metavar_for_optional(action)
        return kinds.get(action.type, usual)


class Parser(argparse.ArgumentParser):
    """A parser whose refusals of flags are one line, like those of other bad input."""

    latest: ClassVar["Parser | None"] = None  # Of the command that runs.

    def __init__(self, description: str | None = None) -> None:
        """Takes the text above the flags in the help."""
        super().__init__(description=description, formatter_class=_Help)
        # A shell leaves the `~` of `--output=~/x` as it is.
        self.register("type", Path, lambda text: Path(os.path.expanduser(text)))
        Parser.latest = self

    def format_help(self) -> str:
        """Returns the help, whose first line names only what is required."""
        usual = self._get_formatter()._get_default_metavar_for_optional
        needed = [
            " ".join([*action.option_strings[:1], f"{action.metavar or usual(action)}"])
            for action in self._actions
            if action.required
        ]
        self.usage = " ".join(["%(prog)s", *needed, "[FLAGS]"])
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        """Refuses flags that do not parse.

        Raises:
            InputError: Always.
        """
        choices = re.findall(r"[\w.+-]+", message.partition("(choose from")[2])
        known = choices or self._option_string_actions
        wrong = re.search(r"choice: '(.*?)'|unrecognized .*?(--[\w-]+)", message)
        name = (wrong[1] or wrong[2]) if wrong else ""
        name = {"--model": "--target"}.get(name, name)  # As other programs call it.
        near = did_you_mean(name, known)
        raise InputError(message + (near or "; --help tells what there is"))

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """Refuses `--flag=--`, which Python 3.11 reads as a flag with an empty list."""
        if action.option_strings and arg_strings == ["--"]:
            self.error(f"argument {action.option_strings[0]}: '--' is no value")
        return super()._get_values(action, arg_strings)


def with_flags(message: str) -> str:
    """Returns a message in which settings in backticks are flags of the command."""
    known = {} if Parser.latest is None else Parser.latest._option_string_actions

    def shown(setting: re.Match[str]) -> str:
        flag = "--" + setting[1].replace("_", "-")
        return flag if flag in known else setting[0]

    return re.sub("`([a-z_]+)`", shown, message)


def run_command(
    action: Callable[[], int | None],
    *,
    unwritable: str = "{error}",
    interrupted: str = "interrupted",
) -> int:
    """Runs a command; errors that its user can mend are one line, not a traceback.

    Characters that standard output and error cannot show, as in ASCII, are escaped.

    Args:
        action: The command, which returns its exit code; `None` is 0.
        unwritable: The line for an `OSError`, which `{error}` stands for.
        interrupted: The line for Ctrl-C.

    Returns:
        The exit code.
    """
    warnings.showwarning = lambda message, *_: say(
        one_line(with_flags(f"warning: {message}"))
    )
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        return action() or 0
    except InputError as error:
        say(f"error: {with_flags(str(error))}")
        return EXIT_INPUT
    except BrokenPipeError:  # The reader has stopped, as `| head` does.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except OSError as error:
        say("error: " + one_line(unwritable.format(error=error)))
        return EXIT_INPUT
    except KeyboardInterrupt:
        say(interrupted)
        return EXIT_INTERRUPTED


def command(**lines: str) -> Callable[[Callable[..., int | None]], Callable[..., int]]:
    """Makes a function of flags the `main` of a command, which `run_command` runs.

    Args:
        **lines: The lines for errors, see `run_command`.
    """

    def decorate(main: Callable[..., int | None]) -> Callable[..., int]:
        @functools.wraps(main)
        def run(argv: list[str] | None = None) -> int:
            return run_command(lambda: main(argv), **lines)

        return run

    return decorate


def run_script(main: Callable[[], int]) -> NoReturn:
    """Runs the command of a script and ends the process with its exit code.

    Until then Ctrl-C raises `KeyboardInterrupt`.

    Args:
        main: The command, which calls `run_command`.
    """
    leave_out_tpus()
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code = main()
    except KeyboardInterrupt:  # Before `run_command` or, once more, after it.
        say("interrupted")
        code = EXIT_INTERRUPTED
    except ModuleNotFoundError as error:  # Some are imported as late as needed.
        say(f"error: {error}; pip install '.[cli]' in the clone brings it")
        code = EXIT_INPUT
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # It ends already.
    if code == EXIT_INTERRUPTED:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        # Threads of JAX may still run: Python's own end would crash in them.
        os._exit(code)
    sys.exit(code)


def say(message: str) -> None:
    """Prints a message to standard error, where it does not mix with texts."""
    print(message, file=sys.stderr, flush=True)
