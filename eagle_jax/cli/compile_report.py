"""Checks what generation and training become on TPUs and GPUs that you do not have.

    pip install ".[tpu-compile]"  # or gpu-compile, or both
    eagle-jax compile-report
    eagle-jax compile-report --only "Llama-3-8B v5e:2x2" --layers 3 --programs round
    eagle-jax compile-report --only "Llama-3-8B h100" --layers 3 --programs round token

It compiles every program for a topology, prints what it takes and fails where one
copies a cache, calls the host or does not fit. A case takes minutes, as the layers of a
model are compiled one by one.
"""

import argparse
import os

import jax

from eagle_jax.benchmarks.cases import CASES
from eagle_jax.benchmarks.compilation import (
    ENVIRONMENT,
    PROGRAMS,
    Case,
    compile_case,
    has_compiler,
)
from eagle_jax.cli.command import Parser, command, say
from eagle_jax.config import require
from eagle_jax.errors import InputError


@command()
def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    arguments = _parse(argv)
    cases = [case for case in CASES if str(case).startswith(arguments.only)]
    if not cases:
        names = ", ".join(map(str, CASES))
        raise InputError(f"--only {arguments.only!r}: no case begins so; see {names}")
    if arguments.layers is not None:
        # Three of them are what an EAGLE-3 head reads.
        require(arguments.layers >= 3, "--layers", arguments.layers, "at least 3")
        cases = [case.with_layers(arguments.layers) for case in cases]
    extras = sorted({case.extra for case in cases})
    cases = [case for case in cases if has_compiler(case.extra)]
    if not cases:
        ways = " or ".join(f"pip install '.[{extra}]'" for extra in extras)
        raise InputError(f"their compiler is missing; {ways} in the clone brings it")
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if "JAX_PLATFORMS" not in os.environ:
        jax.config.update("jax_platforms", "cpu")
    if "JAX_ENABLE_COMPILATION_CACHE" not in os.environ:
        # What is compiled for a chip that is not there cannot be read back.
        jax.config.update("jax_enable_compilation_cache", False)
    found = [
        _problems(case, program) for case in cases for program in arguments.programs
    ]
    return 1 if any(found) else 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    names = ", ".join(map(str, CASES))
    add("--only", default="", metavar="CASE", help=f"those that begin so: {names}")
    chosen = "what is compiled of each case"
    add("--programs", nargs="+", choices=PROGRAMS, default=PROGRAMS, help=chosen)
    add("--layers", type=int, help="compile as many layers only, to have it quickly")
    return parser.parse_args(argv)


def _problems(case: Case, program: str) -> list[str]:
    """Compiles a program and prints what it takes; returns what is wrong with it."""
    try:
        (report,) = compile_case(case, (program,))
    except jax.errors.JaxRuntimeError as error:
        problems = [f"the compiler refuses it: {str(error).splitlines()[0]}"]
    else:
        print(f"{case}: {report}", flush=True)
        problems = report.problems
    for problem in problems:
        say(f"{case}: {program}: {problem}")
    return problems
