"""Evaluations: one target answers questions by several methods, and all is recorded."""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from eagle_jax import assets
from eagle_jax.checkpoints import check_max_length
from eagle_jax.config import DecodingConfig
from eagle_jax.errors import InputError
from eagle_jax.evaluation.answers import Answerer
from eagle_jax.evaluation.plan import (
    RunPlan,
    open_models,
    open_run,
    run_settings,
)
from eagle_jax.evaluation.questions import Question
from eagle_jax.evaluation.record_files import read_records
from eagle_jax.evaluation.records import Record, versions
from eagle_jax.evaluation.runs import Run
from eagle_jax.evaluation.templates import Template, check_template
from eagle_jax.generation.pairs import PairSource, open_pair, with_features
from eagle_jax.generation.vocabulary import narrow
from eagle_jax.interface import Params
from eagle_jax.logs import JsonLines
from eagle_jax.methods import METHODS, PLAIN, Weights
from eagle_jax.progress import Progress, Report, say_nothing, show_nothing

_EMBEDDED = {
    str(assets.TARGET): "embedded target",
    str(assets.HEAD): "embedded head",
    str(assets.SMALL): "embedded small model",
}
"""The names of the embedded models in records, wherever the package lies."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The models that answer the questions, and the folder of their answers.

    Attributes:
        target: A Hugging Face folder or hub name.
        draft: The Hugging Face folder or hub name of the target's EAGLE head; `None` if
            no run drafts with one.
        medusa: The folder or hub name of the target's Medusa heads, likewise.
        hydra: The folder or hub name of the target's Hydra heads, likewise.
        small_model: The Hugging Face folder or hub name of a smaller model with the
            target's tokenizer; `None` if no run drafts with one.
        output: The folder of the records, a file per run, see `record_files`; it need
            not exist.
        template: The form in which turns become prompts.
        system_prompt: The system prompt; `None` for the template's own.
        with_nodes: Whether to record the drafted nodes.
    """

    target: str
    draft: str | None = None
    medusa: str | None = None
    hydra: str | None = None
    small_model: str | None = None
    output: Path
    template: Template = "none"
    system_prompt: str | None = None
    with_nodes: bool = False

    def draft_of(self, weights: Weights) -> str | None:
        """Returns the name of the weights of a kind, if any are given."""
        return getattr(self, weights.option)

    def path(self, plan: RunPlan) -> Path:
        """Returns the file of a run's records."""
        return self.output / f"{plan.model_id}.jsonl"


def check_weights(evaluation: Evaluation, runs: Sequence[RunPlan]) -> None:
    """Refuses methods that lack their weights, and heads that lack their method.

    Nothing is read. An EAGLE head and a small model, which the embedded pair always
    has, may be left unread.

    Raises:
        InputError: If a run drafts with a model that was not given, or none with the
            Medusa or Hydra heads that were.
    """
    for run in runs:
        weights = run.method.weights
        if weights is not None and evaluation.draft_of(weights) is None:
            raise InputError(
                f"method {run.method.name} needs `{weights.option}`, "
                f"{weights.description}"
            )
    read = {run.method.weights for run in runs}
    for method in METHODS.values():
        weights = method.weights
        if weights is None or weights.embedded is not None or weights in read:
            continue
        if (given := evaluation.draft_of(weights)) is not None:
            raise InputError(
                f"no method reads `{weights.option}` {given}; leave it out, or add the "
                f"method {method.name}"
            )


def evaluate(
    evaluation: Evaluation,
    runs: Sequence[RunPlan],
    questions: Sequence[Question],
    *,
    report: Report = say_nothing,
    progress: Progress = show_nothing,
) -> dict[str, Run]:
    """Lets every run answer the questions that are not on record yet.

    Weights are loaded once for all runs, after every file of records was checked.

    Args:
        evaluation: The models and the folder, see `Evaluation`.
        runs: The runs of `make_runs`, which share their `DecodingConfig` but for method
            and batch size.
        questions: All questions that shall be on record in the end.
        report: Called with lines for a log.
        progress: Called to show how far a run is.

    Returns:
        The runs by their `model_id`, with all records.

    Raises:
        InputError: If models or settings are missing or do not fit, a file of records
            is refused (see `read_records`), or a batch is (see `Answerer.answer`).
        KeyboardInterrupt: After Ctrl-C; the records so far stay.
    """
    check_weights(evaluation, runs)
    decoding = runs[0].config.decoding
    source = open_pair(
        evaluation.target,
        None,
        runs[0].config.with_method(PLAIN.name),
    )
    max_length = _max_length(decoding, source)
    answerers = _open(evaluation, runs, source, max_length, questions, report)
    return {
        answerer.plan.model_id: _answer(
            answerer, questions, evaluation.path(answerer.plan), report, progress
        )
        for answerer in answerers
    }


def _draft_of(evaluation: Evaluation, run: RunPlan) -> str | None:
    weights = run.method.weights
    return None if weights is None else evaluation.draft_of(weights)


def _max_length(decoding: DecodingConfig, source: PairSource) -> int:
    max_length = decoding.max_length or source.config.max_positions
    check_max_length(source.config, max_length)
    if decoding.max_new_tokens >= max_length:
        raise InputError(
            f"max_new_tokens = {decoding.max_new_tokens} leaves no room for a "
            f"prompt in max_length = {max_length}; give fewer"
        )
    return max_length


def _open(
    evaluation: Evaluation,
    runs: Sequence[RunPlan],
    source: PairSource,
    max_length: int,
    questions: Sequence[Question],
    report: Report,
) -> list[Answerer]:
    """Loads the target and every draft model once, if no file of records is refused."""
    models = open_models(
        runs,
        source.config,
        draft_of=evaluation.draft_of,
        dtype=source.dtype,
    )
    sources = [open_run(run, models, source) for run in runs]
    for run, own in zip(runs, sources, strict=True):
        decoding = run.config.decoding
        own.check_memory(
            batch_size=decoding.batch_size,
            max_length=min(max_length, 1 + decoding.max_new_tokens),
        )
    check_template(source.tokenizer, evaluation.template)
    shared = _target_settings(evaluation, source) | {"max_length": max_length}
    settings = [
        run_settings(run, own.drafter)
        | shared
        | {"draft": _name(_draft_of(evaluation, run))}
        for run, own in zip(runs, sources, strict=True)
    ]
    for run, wanted in zip(runs, settings, strict=True):
        read_records(evaluation.path(run), wanted, questions)  # Refuses others.
    evaluation.output.mkdir(parents=True, exist_ok=True)
    report(f"loading {evaluation.target}")
    pair = source.load()
    weights = {kind: model.load(pair.params.target) for kind, model in models.items()}

    @functools.cache
    def params(kind: Weights | None, tokens: tuple[int, ...] | None) -> Any:
        return () if kind is None else narrow(models[kind].model, weights[kind], tokens)

    return [
        Answerer(
            plan=run,
            pair=dataclasses.replace(
                pair,
                target=with_features(pair.target, own.drafter),
                drafter=own.drafter,
                params=Params(
                    target=pair.params.target,
                    drafter=params(run.method.weights, own.draft and own.draft.tokens),
                ),
            ),
            settings=wanted,
            template=evaluation.template,
            system=evaluation.system_prompt,
            max_length=max_length,
            with_nodes=evaluation.with_nodes,
        )
        for run, own, wanted in zip(runs, sources, settings, strict=True)
    ]


def _target_settings(evaluation: Evaluation, source: PairSource) -> dict[str, Any]:
    """Returns the settings that all runs share."""
    return {
        "template": evaluation.template,
        "system_prompt": evaluation.system_prompt,
        "target": _name(evaluation.target),
        "vocab_size": source.config.vocab_size,
        "dtype": source.dtype + ("" if source.bits is None else f"+int{source.bits}"),
        "device": jax.devices()[0].device_kind,
        "versions": versions(),
    }


def _name(model: str | None) -> str | None:
    """Returns the name of a model in settings."""
    return None if model is None else _EMBEDDED.get(model, model)


def _answer(
    answerer: Answerer,
    questions: Sequence[Question],
    path: Path,
    report: Report,
    progress: Progress,
) -> Run:
    """Answers questions not on record yet, and returns the run with all records."""
    with JsonLines(path, answerer.settings) as file:
        records = read_records(path, answerer.settings, questions)
        known = {record.question_id for record in records}
        missing = [q for q in questions if q.question_id not in known]
        total, done = len(questions), len(questions) - len(missing)
        name = answerer.plan.model_id
        if done:
            report(f"{name}: {done} of {total} questions are on record already")
        if missing:
            with progress(name, total, done) as update:
                for record in answerer.answer(missing):
                    file.append(record.to_json())
                    records.append(record)
                    done += 1
                    update(done)
        for warning in _warnings(answerer, records):
            report(f"warning: {path.name}: {warning}")
        answers = {record.key: record for record in records}
        return Run(paths=(path,), settings=answerer.settings, answers=answers)


def _warnings(answerer: Answerer, records: Sequence[Record]) -> list[str]:
    """Returns warnings that a reader of the records should know."""
    without = sum(record.nodes is None for record in records)
    warnings = []
    if answerer.has_nodes and without:
        warnings.append(f"{without} records were written without nodes and stay so")
    if answerer.num_cut:
        warnings.append(
            f"{answerer.num_cut} prompts were longer than max_length - max_new_tokens "
            f"= {answerer.room} tokens and lost their beginning"
        )
    return warnings
