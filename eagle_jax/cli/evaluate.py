r"""Records the answers of methods, temperatures and batch sizes to question files.

    eagle-jax evaluate --questions question.jsonl --per-category 2 \
        --methods eagle2 chain lookup autoregressive --output results
    eagle-jax evaluate --target FOLDER --draft FOLDER --template vicuna \
        --questions mt_bench/question.jsonl --methods eagle2 eagle2:rerank=false \
        autoregressive --temperatures 0 1 --output results

Without a target the embedded pair and its small model answer. The folder gets a file
per run: a line of its settings, then a line per question, in Spec-Bench's layout. The
same command, run again, goes on where it was stopped.
"""

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

from eagle_jax import assets
from eagle_jax.cli.command import Parser, command, say
from eagle_jax.cli.files import check_folder, read_prompts
from eagle_jax.cli.pair_flags import add_flags
from eagle_jax.cli.progress import progress
from eagle_jax.cli.settings import add_groups, join_settings
from eagle_jax.config import CONFIGS
from eagle_jax.engine.config import PairConfig
from eagle_jax.evaluation.evaluate import evaluate
from eagle_jax.evaluation.plan import EvaluationConfig, make_runs, parse_method
from eagle_jax.evaluation.questions import (
    TEMPLATES,
    Question,
    choose,
    join_files,
    plain_questions,
    read_questions,
)
from eagle_jax.evaluation.records import speed
from eagle_jax.evaluation.runs import EvaluatedRun, find_baseline, identical
from eagle_jax.methods import WEIGHTS, find_method
from eagle_jax.reporting import decimals

_TARGET = (
    "target: a Hugging Face folder or hub name; without one the embedded pair, with "
    "the settings of configs/embedded.toml"
)
_METHODS = (
    "names as in eagle-jax generate, with settings of their own after a colon, such as "
    "eagle2:num_nodes=48,rerank=false or chain:acceptance=rejection"
)
_GROUPS = {
    "answers": "max_new_tokens top_p top_k min_p seed ignore_eos",
    "memory and arithmetic": "max_length dtype quantization draft_vocabulary",
}


@command(
    unwritable="cannot write the records: {error}",
    interrupted="interrupted; the same command goes on from here",
)
def main(argv: list[str] | None = None) -> None:
    """Runs the command."""
    arguments = _parse(argv)
    settings = join_settings(arguments.config, arguments)
    check_folder(arguments.output)
    runs = make_runs(
        [parse_method(text, settings) for text in arguments.methods],
        arguments.temperatures or [settings.request.temperature],
        arguments.batch_sizes or [settings.batch_size],
    )
    given = {one.option: getattr(arguments, one.option) for one in WEIGHTS}
    config = EvaluationConfig(
        target=arguments.target,
        drafts={option: folder for option, folder in given.items() if folder},
        output=arguments.output,
        template=arguments.template,
        with_nodes=arguments.with_nodes,
    )
    for run in runs:
        config.draft_of(run.config.method_row)  # Before question files are read.
    questions = _read_questions(arguments)
    _print_table(evaluate(config, runs, questions, report=say, progress=progress))


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add_flags(parser, "config")
    add_flags(parser, "target", metavar="FOLDER", help=_TARGET)
    for weights in WEIGHTS:
        flag = f"--{weights.option.replace('_', '-')}"
        add(flag, metavar="FOLDER", help=weights.description)
    paths = "Spec-Bench's .jsonl, or prompts: .txt (a line each), .json list"
    wanted = {"nargs": "+", "required": True}
    add("--questions", type=Path, metavar="FILE", help=paths, **wanted)
    add("--output", type=Path, required=True, metavar="FOLDER", help="of the records")
    add("--methods", metavar="METHOD", help=_METHODS, **wanted)
    heat, size = "default that of --config, or 0", "default that of --config, or 1"
    add("--temperatures", type=float, nargs="+", metavar="T", help=heat)
    add("--batch-sizes", type=int, nargs="+", metavar="B", help=size)
    form = "how turns become prompts; tokenizer is the target's own chat template"
    add("--template", choices=TEMPLATES, default="none", help=form)
    add("--per-category", type=int, metavar="N", help="ask N of each, always the same")
    became = "record what became of drafted nodes"
    add("--nodes", action="store_true", dest="with_nodes", help=became)
    add_groups(parser, PairConfig, _GROUPS)
    arguments = parser.parse_args(argv)
    for one in arguments.methods:
        find_method(one.partition(":")[0])
    if arguments.target is None:
        arguments.target = str(assets.TARGET)
        for weights in WEIGHTS:
            if weights.embedded and getattr(arguments, weights.option) is None:
                setattr(arguments, weights.option, str(weights.embedded))
        arguments.config = arguments.config or CONFIGS / "embedded.toml"
    return arguments


def _read_questions(arguments: argparse.Namespace) -> list[Question]:
    files = []
    for path in arguments.questions:
        is_plain = path.suffix in (".txt", ".json")
        read = plain_questions(path, read_prompts(path)) if is_plain else None
        files.append((path, read or read_questions(path)))
    return choose(join_files(files), arguments.per_category)


def _print_table(runs: dict[str, EvaluatedRun]) -> None:
    """Prints the figures of runs.

    The last column says how many texts differ from plain decoding's.
    """
    figures = ("questions", "tau", "tokens/s", "other text")
    table = Table("file", *(Column(name, justify="right") for name in figures))
    for run in runs.values():
        records = run.answers.values()
        found = identical(run, find_baseline(run, runs.values()))
        same, compared = found or (0, 0)
        other = "-" if found is None else f"{compared - same} of {compared}"
        table.add_row(
            run.path.name,
            str(len(records)),
            decimals(run.tau()),
            decimals(speed(records), 1),
            other,
        )
    # In a file or a pipe no terminal's width may cut a column.
    Console(width=None if sys.stdout.isatty() else 120).print(table)
