"""What every command does with messages, bad input and Ctrl-C."""

import argparse
import io
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import jax

from eagle_jax.errors import InputError

EXIT_INPUT = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


class Parser(argparse.ArgumentParser):
    """Reads flags; what is wrong with them is bad input like any other, in one line."""

    def error(self, message: str) -> NoReturn:
        """Refuses flags that do not parse.

        Raises:
            InputError: Always.
        """
        raise InputError(f"{message}; --help tells what there is")


def run_command(
    action: Callable[[], int],
    *,
    unwritable: str = "{error}",
    interrupted: str = "interrupted",
) -> int:
    """Runs a command; what its user can mend ends in one line, not in a traceback.

    What standard output and error cannot show, in ASCII for example, is escaped.

    Args:
        action: The command; returns its exit code.
        unwritable: The line for an `OSError`, which `{error}` stands for.
        interrupted: The line for Ctrl-C.

    Returns:
        The exit code.
    """
    warnings.showwarning = lambda message, *_: say(f"warning: {message}")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        return action()
    except InputError as error:
        say(f"error: {error}")
        return EXIT_INPUT
    except BrokenPipeError:  # As with `| head`: nobody reads on.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except OSError as error:
        say("error: " + unwritable.format(error=error))
        return EXIT_INPUT
    except KeyboardInterrupt:
        say(interrupted)
        return EXIT_INTERRUPTED


def keep_compiled_programs() -> None:
    """Keeps compiled programs on disk between runs.

    In `JAX_COMPILATION_CACHE_DIR`, or else in the user's cache folder; who has neither
    that nor a home keeps none.
    """
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        if not os.path.isabs(folder):
            return
        jax.config.update("jax_compilation_cache_dir", str(Path(folder) / "eagle_jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def say(message: str) -> None:
    """Prints to standard error, where it mixes with no text."""
    print(message, file=sys.stderr, flush=True)
