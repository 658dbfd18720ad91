"""Records the answers of methods, temperatures and batch sizes to question files.

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
from rich.table import Table

from eagle_jax import assets
from eagle_jax.cli.command import Parser, run_command, say
from eagle_jax.cli.files import check_folder, read_prompts
from eagle_jax.cli.progress import progress
from eagle_jax.cli.settings import add_settings, join_settings
from eagle_jax.config import CONFIGS
from eagle_jax.evaluation.evaluate import Evaluation, check_weights, evaluate
from eagle_jax.evaluation.plan import make_runs, parse_method
from eagle_jax.evaluation.questions import (
    Question,
    choose,
    join_files,
    plain_questions,
    read_questions,
)
from eagle_jax.evaluation.records import speed
from eagle_jax.evaluation.runs import Run, find_baseline, identical
from eagle_jax.evaluation.templates import TEMPLATES
from eagle_jax.generation.config import GenerateConfig
from eagle_jax.markdown import decimals


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""

    def run() -> int:
        arguments = _parse(argv)
        config = join_settings(GenerateConfig, arguments.config, arguments)
        return _evaluate(arguments, config)

    return run_command(
        run,
        unwritable="cannot write the records: {error}",
        interrupted="interrupted; the same command goes on from here",
    )


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        description="Let methods answer questions, and keep what they did on record."
    )
    add = parser.add_argument
    add("--config", type=Path, help="settings from a TOML file of configs/; flags win")
    add(
        "--target",
        help="target: a Hugging Face folder or hub name; without one the embedded "
        "pair, with the settings of configs/embedded.toml",
    )
    add("--draft", help="EAGLE head of the target")
    add("--medusa", metavar="FOLDER", help="Medusa heads of the target")
    add("--hydra", metavar="FOLDER", help="Hydra heads of the target")
    add("--small-model", help="smaller model with the target's tokenizer")
    add(
        "--questions",
        type=Path,
        nargs="+",
        required=True,
        metavar="FILE",
        help="Spec-Bench's .jsonl, or prompts: .txt (a line each), .json list",
    )
    add("--output", type=Path, required=True, metavar="FOLDER", help="of the records")
    add(
        "--methods",
        nargs="+",
        required=True,
        metavar="METHOD",
        help="names as in eagle-jax generate, with settings of their own after a "
        "colon, such as eagle2:num_nodes=48,rerank=false or chain:acceptance=rejection",
    )
    add("--temperatures", type=float, nargs="+", metavar="T")
    add("--batch-sizes", type=int, nargs="+", metavar="B")
    add(
        "--template",
        choices=TEMPLATES,
        default="none",
        help="how turns become prompts; tokenizer is the chat template that the "
        "target carries",
    )
    add("--system-prompt", metavar="TEXT", help="instead of the template's own")
    add("--categories", metavar="A,B", help="ask only questions of these")
    add("--per-category", type=int, metavar="N", help="ask N of each, always the same")
    add("--nodes", action="store_true", help="record what became of drafted nodes")
    add_settings(
        parser,
        GenerateConfig,
        *("max_new_tokens", "max_length", "dtype", "quantization", "ignore_eos"),
        "draft_vocabulary",
        *("top_p", "top_k", "min_p", "seed"),
    )
    arguments = parser.parse_args(argv)
    if arguments.target is None:
        arguments.target = str(assets.TARGET)
        arguments.draft = arguments.draft or str(assets.HEAD)
        arguments.small_model = arguments.small_model or str(assets.SMALL)
        arguments.config = arguments.config or CONFIGS / "embedded.toml"
    return arguments


def _evaluate(arguments: argparse.Namespace, config: GenerateConfig) -> int:
    check_folder(arguments.output)
    runs = make_runs(
        [parse_method(text, config) for text in arguments.methods],
        arguments.temperatures or [config.sampling.temperature],
        arguments.batch_sizes or [config.decoding.batch_size],
    )
    evaluation = Evaluation(
        target=arguments.target,
        draft=arguments.draft,
        medusa=arguments.medusa,
        hydra=arguments.hydra,
        small_model=arguments.small_model,
        output=arguments.output,
        template=arguments.template,
        system_prompt=arguments.system_prompt,
        with_nodes=arguments.nodes,
    )
    check_weights(evaluation, runs)  # Before question files are read.
    questions = _read_questions(arguments)
    _print_table(evaluate(evaluation, runs, questions, report=say, progress=progress))
    return 0


def _read_questions(arguments: argparse.Namespace) -> list[Question]:
    files = []
    for path in arguments.questions:
        is_plain = path.suffix in (".txt", ".json")
        read = plain_questions(path, read_prompts(path)) if is_plain else None
        files.append((path, read or read_questions(path)))
    categories = arguments.categories
    return choose(
        join_files(files),
        categories=None if categories is None else categories.split(","),
        per_category=arguments.per_category,
    )


def _print_table(runs: dict[str, Run]) -> None:
    """Prints the figures of runs.

    The last column says how many texts differ from plain decoding's.
    """
    table = Table()
    table.add_column("run")
    for name in ("questions", "tau", "tokens/s", "without prefill", "other text"):
        table.add_column(name, justify="right")
    for name, run in runs.items():
        records = run.answers.values()
        speeds = [speed(records, with_prefill=flag) for flag in (True, False)]
        found = identical(run, find_baseline(run, runs.values()))
        same, compared = found or (0, 0)
        other = "-" if found is None else f"{compared - same} of {compared}"
        table.add_row(
            name,
            str(len(records)),
            decimals(run.tau()),
            *(decimals(mean, 1) for mean in speeds),
            other if run.is_lossless else "not lossless",
        )
    # In a file or a pipe no terminal's width may cut a column.
    Console(width=None if sys.stdout.isatty() else 120).print(table)
