"""Compiles generation and training for TPUs that are not at hand, and reports on it.

    pip install ".[tpu-compile]"
    eagle-jax compile-report --output docs/compile.md
    eagle-jax compile-report --only "Llama-3-8B v5e:2x2" --layers 3
    eagle-jax compile-report --predict h200-1 v5e-4 --contexts 512 4096 --tau 4.5

With --predict it compiles nothing and prints what published peaks allow a round to take
on these machines, from the bytes and operations of its model calls.

A case takes minutes, as the layers of a model are compiled one by one. So a report can
be made in pieces: rows of an earlier one that are not compiled now stay in it, and so
does all that was written around its tables.
"""

import argparse
import importlib.util
import itertools
import os
from pathlib import Path

import jax

from eagle_jax.benchmarks.cases import (
    MODELS,
    every_case,
    label,
    with_draft_vocabulary,
    with_layers,
)
from eagle_jax.benchmarks.compilation import PROGRAMS, Case, compile_case
from eagle_jax.benchmarks.compile_table import CompileTable
from eagle_jax.benchmarks.peaks import parse_machine
from eagle_jax.benchmarks.predictions import PAPER_TAU, prediction_table
from eagle_jax.cli.command import Parser, run_command, say
from eagle_jax.cli.files import check_writable
from eagle_jax.config import TreeConfig, require, require_int32
from eagle_jax.errors import InputError
from eagle_jax.tuning.prediction import parse_grid

_CONTEXTS = (512, 4096, 16384)
_TREES = "60/6/10"
_COMPILING = ("only", "programs", "layers", "output")  # Only without --predict.
_PREDICTING = ("contexts", "trees", "tau")  # Only with it.
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
    add("--programs", nargs="+", choices=PROGRAMS, help="default all")
    add("--layers", type=int, help="compile as many layers only, to have it quickly")
    add("--draft-vocabulary", type=int, metavar="N", help="draft as many tokens only")
    add("--output", type=Path, metavar="FILE", help="markdown; without one, print it")
    add("--predict", nargs="+", metavar="MACHINE", help="such as v5e-4 or h200-1")
    shown = " ".join(map(str, _CONTEXTS))
    add(
        "--contexts",
        type=int,
        nargs="+",
        metavar="SLOTS",
        help=f"predict for these; default {shown}",
    )
    add("--trees", help=f'predict for these, such as "26/6/4 8/7/1"; default {_TREES}')
    add("--tau", type=float, help="tokens per round; default EAGLE-2's on MT-bench")
    return parser.parse_args(argv)


def _check_flags(arguments: argparse.Namespace) -> None:
    """Refuses flags that would have no effect.

    Raises:
        InputError: If one is for predictions and none are made, or the reverse.
    """
    predicts = arguments.predict is not None
    unread = _COMPILING if predicts else _PREDICTING
    given = [name for name in unread if getattr(arguments, name) is not None]
    flags = ", ".join(f"--{name}" for name in given)
    if given and predicts:
        raise InputError(
            "--predict compiles nothing and prints predictions for all models; leave "
            f"out {flags}"
        )
    if given:
        raise InputError(
            f"only --predict reads {flags}: give --predict MACHINE, or leave them out"
        )


def _trees(text: str) -> list[TreeConfig]:
    """Returns the trees of `--trees`.

    Raises:
        InputError: If one cannot be drafted; it names the flag.
    """
    try:
        return parse_grid(text)
    except InputError as error:
        raise InputError(f"--trees: {error}".replace(": `grid`", "")) from error


def _predict(arguments: argparse.Namespace) -> int:
    """Prints predictions; returns the exit code."""
    machines = [parse_machine(name) for name in arguments.predict]
    contexts = arguments.contexts or _CONTEXTS
    require(min(contexts) >= 1, "--contexts", min(contexts), "at least 1")
    require_int32("--contexts", max(contexts))
    trees = _trees(_TREES if arguments.trees is None else arguments.trees)
    largest = max(tree.num_nodes for tree in trees)
    wanted = f"at most {min(contexts)}, the slots of the least context"
    require(largest <= min(contexts), "nodes of --trees", largest, wanted)
    tau, drafted = arguments.tau, arguments.draft_vocabulary
    if trees != _trees(_TREES) and tau is None:
        raise InputError(
            "--trees needs --tau: the tokens per round that are known are those of the "
            f"paper's own trees, for which {_TREES} stands"
        )
    if tau is not None:
        most = 1 + min(tree.levels for tree in trees)
        wanted = f"1 to {most}, the most that a round gives"
        require(1 <= tau <= most, "--tau", tau, wanted)
    title = "PREDICTION from published peaks; nothing was measured"
    if drafted is not None:
        # A model with fewer tokens drafts all of them.
        most = max(MODELS[name].vocab_size for name in PAPER_TAU) - 1
        wanted = f"1 to {most}"
        require(1 <= drafted <= most, "--draft-vocabulary", drafted, wanted)
        title += f"; heads draft {drafted:,} tokens, or all of a smaller vocabulary"
    table = prediction_table(
        machines, contexts, trees, tokens_per_round=tau, draft_vocabulary=drafted
    )
    print(f"{title}\n\n{table}")
    return 0


def _report(arguments: argparse.Namespace) -> int:
    _check_flags(arguments)
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
    refused = 0
    wanted = list(itertools.product(cases, arguments.programs or PROGRAMS))
    for case, program in wanted:
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
    elif refused < len(wanted):
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
