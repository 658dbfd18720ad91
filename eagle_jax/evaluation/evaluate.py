"""Evaluations: one target answers questions by several methods, and all is recorded."""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from eagle_jax import assets
from eagle_jax.checkpoints import check_max_length
from eagle_jax.engine import Pair
from eagle_jax.engine.calls import check_memory
from eagle_jax.engine.open import open_pair, with_target
from eagle_jax.errors import InputError
from eagle_jax.evaluation.answers import QuestionAnswerer
from eagle_jax.evaluation.plan import EvaluationConfig, RunPlan, run_settings
from eagle_jax.evaluation.questions import Question, encode
from eagle_jax.evaluation.records import Record, versions
from eagle_jax.evaluation.runs import EvaluatedRun, read_run
from eagle_jax.logs import JsonLines, check_log, read_log
from eagle_jax.models.transformer import TransformerParams
from eagle_jax.reporting import Progress, Report, say_nothing, show_nothing

_EMBEDDED = {
    str(assets.TARGET): "embedded target",
    str(assets.HEAD): "embedded head",
    str(assets.SMALL): "embedded small model",
}
"""The names of the embedded models in records, wherever the package lies."""


def evaluate(
    config: EvaluationConfig,
    runs: Sequence[RunPlan],
    questions: Sequence[Question],
    *,
    report: Report = say_nothing,
    progress: Progress = show_nothing,
) -> dict[str, EvaluatedRun]:
    """Lets every run answer the questions that are not on record yet.

    Runs that decode alike, as all rules of acceptance do at temperature 0, are decoded
    once. The target is loaded once, after every file of records was checked, and a
    draft model when its run begins.

    Args:
        config: The models and the folder.
        runs: The runs of `make_runs`, which differ in method, its settings, temperature
            and batch size alone.
        questions: All questions that shall be on record in the end.
        report: Called with lines for a log.
        progress: Called to show how far a run is.

    Returns:
        The runs by their `model_id`, with all records. After Ctrl-C, too, the records
        so far stay.
    """
    sources = [
        open_pair(config.target, config.draft_of(run.method), run.config)
        for run in runs
    ]
    first, shared = sources[0], runs[0].config
    max_length = shared.max_length or first.max_positions
    check_max_length(first.sizes, max_length)
    new_tokens = shared.request.max_new_tokens
    if new_tokens >= max_length:
        raise InputError(
            f"max_new_tokens = {new_tokens} leaves no room for a "
            f"prompt in max_length = {max_length}; give fewer"
        )
    # Says what the template refuses before anything is loaded.
    encode(first.tokenizer, config.template, ["Hi"], [])
    opened: dict[str, tuple[RunPlan, Pair, dict[str, Any]]] = {}
    for run, source in zip(runs, sources, strict=True):
        source = dataclasses.replace(source, read_tokenizer=first.read_tokenizer)
        check_memory(
            source,
            batch_size=run.config.batch_size,
            max_length=min(max_length, 1 + new_tokens),
        )
        settings = _settings(config, run, source) | {"max_length": max_length}
        read_records(config.path(run), settings, questions)  # Refuses others.
        key = json.dumps(settings | {"label": None}, sort_keys=True)
        opened.setdefault(key, (run, source, settings))
    config.output.mkdir(parents=True, exist_ok=True)
    report(f"loading {config.target}")
    found: dict[str, EvaluatedRun] = {}
    target: TransformerParams | None = None
    for run, source, settings in opened.values():
        pair = (source if target is None else with_target(source, target)).load()
        target = pair.params.target
        answerer = QuestionAnswerer(
            plan=run, pair=pair, config=config, max_length=max_length
        )
        path = config.path(run)
        with JsonLines(path, settings) as log:
            known = read_records(path, settings, questions)
            _answer(answerer, log, known, questions, report, progress)
        found[run.model_id] = read_run(path)
    return found


def read_records(
    path: Path, settings: Mapping[str, Any], questions: Iterable[Question]
) -> list[Record]:
    """Reads the records that a run can go on with, from a file that need not exist.

    It may hold other questions, too, but none of the same ids, and no other settings.
    """
    check_log(path, settings)
    if not path.exists() or not any(read_log(path)):
        return []
    records = [*read_run(path).answers.values()]
    asked = {q.question_id: (q.fingerprint, q.number) for q in questions}
    for record in records:
        answered = record.question, record.number
        if asked.get(record.question_id, answered) != answered:
            raise InputError(
                f"{path} answers another question {record.question_id!r}: choose "
                "another `output`"
            )
    return records


def _settings(config: EvaluationConfig, run: RunPlan, source: Pair) -> dict[str, Any]:
    """Returns all settings of a run but its limit of tokens, as JSON can hold them."""
    bits = "" if source.bits is None else f"+int{source.bits}"
    draft = config.draft_of(run.method)
    return run_settings(run, source.drafter) | {
        "template": config.template,
        "target": _EMBEDDED.get(config.target, config.target),
        "draft": draft and _EMBEDDED.get(draft, draft),
        "vocab_size": source.vocab_size,
        "dtype": source.dtype + bits,
        "device": jax.devices()[0].device_kind,
        "versions": versions(),
    }


def _answer(
    answerer: QuestionAnswerer,
    log: JsonLines,
    records: Sequence[Record],
    questions: Sequence[Question],
    report: Report,
    progress: Progress,
) -> None:
    """Answers the questions that are not on record yet, and adds their records."""
    known = {record.question_id for record in records}
    missing = [q for q in questions if q.question_id not in known]
    total, done = len(questions), len(questions) - len(missing)
    name = answerer.plan.model_id
    if done:
        report(f"{name}: {done} of {total} questions are on record already")
    if missing:
        with progress(name, total, done) as update:
            for record in answerer.answer(missing):
                log.append(dataclasses.replace(record, asked=total).to_json())
                done += 1
                update(done)
    if answerer.num_cut:
        report(
            f"warning: {name}: {answerer.num_cut} prompts were longer than max_length "
            f"- max_new_tokens = {answerer.room} tokens and lost their beginning"
        )
