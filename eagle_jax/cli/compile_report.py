"""Compiles generation and training for TPUs that are not at hand, and reports on it.

    pip install ".[tpu-compile]"
    eagle-jax compile-report --output docs/compile.md
    eagle-jax compile-report --only "Llama-3-8B v5e:2x2" --layers 3
    eagle-jax compile-report --predict h200-1 v5e-4 --contexts 512 4096 --tau 4.5

With --predict it compiles nothing and prints what published peaks allow a round to take
on these machines, from the bytes and operations of its model calls.

A case takes minutes, as the layers of a model are compiled one by one. So a report can
be made in pieces: rows of an earlier one that are not compiled now stay in it.
"""

import argparse
import importlib.util
import itertools
import os
from pathlib import Path

import jax

from eagle_jax.benchmarks.cases import (
    every_case,
    label,
    with_draft_vocabulary,
    with_layers,
)
from eagle_jax.benchmarks.compilation import PROGRAMS, Case, compile_case
from eagle_jax.benchmarks.compile_table import CompileTable
from eagle_jax.benchmarks.peaks import parse_machine
from eagle_jax.benchmarks.predictions import prediction_table
from eagle_jax.cli.command import Parser, run_command, say
from eagle_jax.cli.files import check_writable
from eagle_jax.config import require
from eagle_jax.errors import InputError
from eagle_jax.tuning.prediction import parse_grid

_ENVIRONMENT = {
    # The compiler alone is needed, and it asks for no TPU's metadata.
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    # Several processes may compile at once, as none holds a TPU.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    unwritable = "cannot write the report: {error}"
    return run_command(lambda: _report(_parse(argv)), unwritable=unwritable)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        description="Compile generation and training for TPUs that are not at hand."
    )
    add = parser.add_argument
    names = ", ".join(label(case) for case in every_case())
    add("--only", metavar="CASE", help=f"those that begin so: {names}")
    add("--programs", nargs="+", choices=PROGRAMS, default=PROGRAMS)
    add("--layers", type=int, help="compile as many layers only, to have it quickly")
    add("--draft-vocabulary", type=int, metavar="N", help="draft as many tokens only")
    add("--output", type=Path, metavar="FILE", help="markdown; without one, print it")
    add("--predict", nargs="+", metavar="MACHINE", help="such as v5e-4 or h200-1")
    add("--contexts", type=int, nargs="+", default=[512, 4096, 16384], metavar="SLOTS")
    add(
        "--trees", default="60/6/10", help='predict for these, such as "60/6/10 26/6/4"'
    )
    add("--tau", type=float, help="tokens per round; default EAGLE-2's on MT-bench")
    return parser.parse_args(argv)


def _predict(arguments: argparse.Namespace) -> int:
    machines = [parse_machine(name) for name in arguments.predict]
    require(
        min(arguments.contexts) >= 1, "--contexts", arguments.contexts, "at least 1"
    )
    if arguments.tau is not None:
        require(arguments.tau >= 1, "--tau", arguments.tau, "at least 1")
    if arguments.draft_vocabulary is not None:
        size = arguments.draft_vocabulary
        require(size >= 1, "--draft-vocabulary", size, "at least 1")
    table = prediction_table(
        machines,
        arguments.contexts,
        parse_grid(arguments.trees),
        tokens_per_round=arguments.tau,
        draft_vocabulary=arguments.draft_vocabulary,
    )
    print(f"PREDICTION from published peaks; nothing was measured\n\n{table}")
    return 0


def _report(arguments: argparse.Namespace) -> int:
    if arguments.predict is not None:
        return _predict(arguments)
    if arguments.layers is not None:
        # Three of them are what an EAGLE-3 head reads.
        require(arguments.layers >= 3, "--layers", arguments.layers, "at least 3")
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if "JAX_PLATFORMS" not in os.environ:
        jax.config.update("jax_platforms", "cpu")
    if "JAX_ENABLE_COMPILATION_CACHE" not in os.environ:
        # What is compiled for a chip that is not there cannot be read back.
        jax.config.update("jax_enable_compilation_cache", False)
    cases = _chosen(arguments)
    if arguments.output is not None:
        check_writable(arguments.output)
    table = CompileTable(arguments.output)
    if importlib.util.find_spec("libtpu") is None:
        raise InputError(
            "the TPU compiler is not installed; pip install '.[tpu-compile]' brings it"
        )
    refused, wanted = 0, list[str](arguments.programs)
    for case, program in itertools.product(cases, wanted):
        name = f"{label(case)}: {program}"
        try:
            (report,) = compile_case(case, (program,))
        except jax.errors.JaxRuntimeError as error:
            say(f"{name}: the compiler refuses it: {str(error).splitlines()[0]}")
            refused += 1
            continue
        say(f"{name}, {report.seconds:.0f} s")
        table.add(case, report)
        if arguments.output is not None:
            table.write(arguments.output)
    if arguments.output is None:
        print(table.markdown())
    else:
        print(f"wrote {arguments.output}")
    return 1 if refused else 0


def _chosen(arguments: argparse.Namespace) -> list[Case]:
    """Returns the cases to compile.

    Raises:
        InputError: If no case begins with the name that was asked for.
    """
    cases = every_case()
    if arguments.only is not None:
        cases = [case for case in cases if label(case).startswith(arguments.only)]
    if not cases:
        names = ", ".join(label(case) for case in every_case())
        raise InputError(f"--only {arguments.only!r}: no case begins so; see {names}")
    if arguments.layers is not None:
        cases = [with_layers(case, arguments.layers) for case in cases]
    if arguments.draft_vocabulary is not None:
        size = arguments.draft_vocabulary
        cases = [with_draft_vocabulary(case, size) for case in cases]
    return cases
