"""The entry point of all commands, by their names."""

import importlib
import sys
from typing import NoReturn

from eagle_jax.cli.command import EXIT_INPUT, keep_compiled_programs, run_script, say
from eagle_jax.cli.removed import REMOVED, instead_of

COMMANDS = (
    "generate",
    "serve",
    "evaluate",
    "report",
    "calibrate",
    "tune",
    "train",
    "regenerate",
    "export",
    "benchmark",
    "compile-report",
)


def run(command: str | None = None) -> NoReturn:
    """Runs a command on the flags in `sys.argv` and ends the process.

    Args:
        command: The name of a module beside this one; `None` for the one that the first
            argument names.
    """
    if command is None:
        name = sys.argv[1] if len(sys.argv) > 1 else ""
        known = f"eagle-jax COMMAND, where COMMAND is one of {', '.join(COMMANDS)}"
        if name in ("-h", "--help"):
            print(known)
            sys.exit()
        if name not in COMMANDS:
            hint = instead_of(name) if name in REMOVED else f"give {known}"
            say(f"error: {name!r} is no command; {hint}")
            sys.exit(EXIT_INPUT)
        sys.argv[:2] = [f"eagle-jax {name}"]
        command = name.replace("-", "_")
    main = importlib.import_module(f"eagle_jax.cli.{command}").main
    keep_compiled_programs()
    run_script(main)
