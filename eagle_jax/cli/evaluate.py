"""Methods, temperatures and batch sizes against question files, on record.

    eagle-jax evaluate --questions question.jsonl --per-category 2 \
        --methods eagle2 chain lookup autoregressive --output results
    eagle-jax evaluate --target FOLDER --draft FOLDER --template vicuna \
        --questions mt_bench/question.jsonl --methods eagle2 eagle2:rerank=false \
        autoregressive --temperatures 0 1 --output results

Without a target the embedded pair and its small model answer. The folder gets a file
of JSON lines per run, in Spec-Bench's layout; the same command, run again, goes on
where it was stopped.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from eagle_jax import assets
from eagle_jax.checkpoints import check_max_length, fingerprint_folder
from eagle_jax.cli import results
from eagle_jax.cli.command import Parser, run_command, say
from eagle_jax.cli.files import check_folder, read_prompts
from eagle_jax.cli.progress import progress
from eagle_jax.cli.settings import add_settings, join_settings
from eagle_jax.config import CONFIGS, GenerateConfig, Method
from eagle_jax.errors import InputError
from eagle_jax.evaluation.answers import Answerer
from eagle_jax.evaluation.markdown import decimals
from eagle_jax.evaluation.plan import (
    RunPlan,
    make_drafter,
    make_runs,
    model_kind,
    open_models,
    parse_method,
    run_settings,
)
from eagle_jax.evaluation.questions import (
    Question,
    choose,
    join_files,
    plain_questions,
    read_questions,
)
from eagle_jax.evaluation.record_files import RecordFile, check_records, recorded_date
from eagle_jax.evaluation.records import Record, speed
from eagle_jax.evaluation.runs import Run, find_baseline, identical
from eagle_jax.evaluation.templates import TEMPLATES, check_template
from eagle_jax.generation.methods import HEAD_METHODS, check_draft
from eagle_jax.generation.pairs import PairSource, open_pair, with_features
from eagle_jax.generation.programs import Programs
from eagle_jax.generation.room import check_depth
from eagle_jax.interface import Drafter, Params

_EMBEDDED = {
    str(assets.TARGET): "embedded target",
    str(assets.HEAD): "embedded head",
    str(assets.SMALL): "embedded small model",
}
"""What records call the embedded models, wherever the package lies."""


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
        help="names as in scripts/generate.py, with settings of their own behind a "
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
    for run in runs:
        _check_weights(run, arguments)
    questions = _read_questions(arguments)
    source = open_pair(
        arguments.target,
        None,
        tree=config.tree,
        dtype=config.decoding.dtype,
        method="autoregressive",
        bits=config.decoding.bits,
        date=recorded_date(arguments.output),
    )
    for run in runs:
        check_depth(run.config.tree, source.config)
    max_length = config.decoding.max_length or source.config.max_positions
    check_max_length(source.config, max_length)
    if config.decoding.max_new_tokens >= max_length:
        raise InputError(
            f"max_new_tokens = {config.decoding.max_new_tokens} leaves no room for a "
            f"prompt in max_length = {max_length}; give fewer"
        )
    finished = {}
    for run in _open_runs(arguments, runs, source, max_length, questions):
        path = _path(arguments, run.plan)
        finished[run.plan.model_id] = Run.of(_answer(run, questions, path), path)
    _print_table(finished)
    return 0


def _path(arguments: argparse.Namespace, plan: RunPlan) -> Path:
    return arguments.output / f"{plan.model_id}.jsonl"


def _check_weights(run: RunPlan, arguments: argparse.Namespace) -> None:
    """Refuses a method that lacks its weights, before anything is loaded."""
    if run.method == "small-model" and arguments.small_model is None:
        raise InputError(
            "--methods small-model needs --small-model FOLDER, a smaller model with "
            "the target's tokenizer"
        )
    if run.method in HEAD_METHODS:
        check_draft(run.method, arguments.draft)


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


def _open_runs(
    arguments: argparse.Namespace,
    runs: Sequence[RunPlan],
    source: PairSource,
    max_length: int,
    questions: Sequence[Question],
) -> list[Answerer]:
    """Loads the target and every draft model once, if no file of records is refused."""
    models = open_models(
        runs,
        source.config,
        head=arguments.draft,
        small_model=arguments.small_model,
        dtype=source.dtype,
    )
    drafters = [make_drafter(run, models) for run in runs]
    for run, drafter in zip(runs, drafters, strict=True):
        decoding = run.config.decoding
        dataclasses.replace(source, drafter=drafter).check_room(
            batch_size=decoding.batch_size,
            max_length=min(max_length, 1 + decoding.max_new_tokens),
        )
    check_template(source.tokenizer, arguments.template)
    folders: dict[Method | None, Path | None] = {None: source.folder}
    folders |= {kind: model.folder for kind, model in models.items()}
    prints: dict[Method | None, str] = {
        kind: fingerprint_folder(folder) for kind, folder in folders.items() if folder
    }
    settings = [
        _settings(run, drafter, arguments, source, max_length, prints)
        for run, drafter in zip(runs, drafters, strict=True)
    ]
    for run, wanted in zip(runs, settings, strict=True):
        check_records(_path(arguments, run), wanted, questions)
    arguments.output.mkdir(parents=True, exist_ok=True)
    say(f"loading {arguments.target}")
    pair = source.load()
    params: dict[Method | None, Any] = {
        kind: source.load(pair.params.target) for kind, source in models.items()
    }
    programs = Programs()
    return [
        Answerer(
            plan=run,
            pair=dataclasses.replace(
                pair,
                target=with_features(pair.target, drafter),
                drafter=drafter,
                params=Params(
                    target=pair.params.target,
                    drafter=params.get(model_kind(run.method), ()),
                ),
            ),
            settings=wanted,
            template=arguments.template,
            system=arguments.system_prompt,
            max_length=max_length,
            with_nodes=arguments.nodes,
            programs=programs,
        )
        for run, drafter, wanted in zip(runs, drafters, settings, strict=True)
    ]


def _settings(
    run: RunPlan,
    drafter: Drafter | None,
    arguments: argparse.Namespace,
    source: PairSource,
    max_length: int,
    prints: dict[Method | None, str],
) -> dict[str, Any]:
    """Returns the field `run` of a run's records; `None` names the target's print."""
    kind = model_kind(run.method)
    draft = arguments.small_model if kind == "small-model" else arguments.draft
    draft = None if kind is None else draft
    settings = run_settings(run, drafter) | {
        "max_length": max_length,
        "template": arguments.template,
        "system_prompt": arguments.system_prompt,
        "target": _EMBEDDED.get(arguments.target, arguments.target),
        "target_fingerprint": prints[None],
        "vocab_size": source.config.vocab_size,
        "draft": None if draft is None else _EMBEDDED.get(draft, draft),
        "draft_fingerprint": None if kind is None else prints[kind],
        "dtype": source.dtype + ("" if source.bits is None else f"+int{source.bits}"),
        "device": jax.devices()[0].device_kind,
        "versions": results.versions(),
    }
    if arguments.template == "tokenizer" and source.date is not None:
        settings["date"] = source.date
    return settings


def _answer(answerer: Answerer, questions: list[Question], path: Path) -> list[Record]:
    """Answers what is not on record yet.

    Args:
        answerer: The run.
        questions: All that shall be on record in the end.
        path: Of the run's file.

    Returns:
        All records of the run's file.

    Raises:
        InputError: If the file is refused, see `RecordFile`, or as of `Answerer`.
        KeyboardInterrupt: After Ctrl-C; what is on record stays.
    """
    with RecordFile(path, answerer.settings, questions) as file:
        known = {record.question_id for record in file.records}
        missing = [q for q in questions if q.question_id not in known]
        total, done = len(questions), len(questions) - len(missing)
        name = answerer.plan.model_id
        if done:
            say(f"{name}: {done} of {total} questions are on record already")
        measured = (r.step_seconds for r in file.records if r.step_seconds)
        answerer.step_seconds = next(measured, None)
        if missing:
            with progress(name, total, done) as update:
                for record in answerer.answer(missing):
                    file.add(record)
                    done += 1
                    update(done)
        without = sum(record.nodes is None for record in file.records)
        if answerer.has_nodes and without:
            say(
                f"warning: {path.name}: {without} records were written without "
                "--nodes and stay so"
            )
        if answerer.num_cut:
            say(
                f"warning: {path.name}: {answerer.num_cut} prompts were longer than "
                f"max_length - max_new_tokens = {answerer.room} tokens and lost their "
                "beginning"
            )
        return file.records


def _print_table(runs: dict[str, Run]) -> None:
    """Prints what runs came to, by name, and how many texts differ from plain ones."""
    table = Table()
    table.add_column("run")
    for name in ("questions", "tau", "tokens/s", "without prefill", "other text"):
        table.add_column(name, justify="right")
    for name, run in runs.items():
        records = run.answers.values()
        speeds = [speed(records, with_prefill=flag) for flag in (True, False)]
        found = identical(run, find_baseline(run, runs.values()))
        same, compared = found or (0, 0)
        table.add_row(
            name,
            str(len(records)),
            decimals(run.tau()),
            *(decimals(mean, 1) for mean in speeds),
            "-" if found is None else f"{compared - same} of {compared}",
        )
    # Where nobody looks, no column is cut.
    Console(width=None if sys.stdout.isatty() else 120).print(table)
