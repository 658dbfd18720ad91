"""The entry point of all commands, by their names."""

import ast
import importlib
import sys
from pathlib import Path
from typing import NoReturn

import eagle_jax
from eagle_jax.cli.command import EXIT_INPUT, run_script, say
from eagle_jax.errors import did_you_mean
from eagle_jax.files import keep_compiled_programs

COMMANDS = (
    "generate",
    "chat",
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
        if name in ("", "-h", "--help"):
            print("eagle-jax COMMAND [FLAGS] | eagle-jax COMMAND --help | --version\n")
            for one in COMMANDS:
                print(f"  {one:<16}{_summary(one)}")
            sys.exit()
        if name == "--version":
            print(f"eagle-jax {eagle_jax.__version__}")
            sys.exit()
        if name not in COMMANDS:
            known = f"known are {', '.join(COMMANDS)}{did_you_mean(name, COMMANDS)}"
            say(f"error: {name!r} is no command; {known}")
            sys.exit(EXIT_INPUT)
        sys.argv[:2] = [f"eagle-jax {name}"]
        command = _module(name)
    keep_compiled_programs()
    run_script(lambda: importlib.import_module(f"eagle_jax.cli.{command}").main())


def _module(name: str) -> str:
    return name.replace("-", "_")


def _summary(name: str) -> str:
    """Returns what a command does; to import them all would take seconds."""
    source = Path(__file__).with_name(f"{_module(name)}.py").read_text("utf-8")
    return (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
