"""Evaluations: one target answers questions by several methods, and all is recorded."""

import dataclasses
import json
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from eagle_jax import assets
from eagle_jax.checkpoints import check_max_length
from eagle_jax.decoding.requests import bucket_length
from eagle_jax.engine import Engine, Pair, Text
from eagle_jax.engine.calls import check_memory
from eagle_jax.engine.config import AutoTree
from eagle_jax.engine.converse import converse
from eagle_jax.engine.open import open_pair, with_target
from eagle_jax.errors import InputError
from eagle_jax.evaluation.nodes import VerifiedTree
from eagle_jax.evaluation.plan import EvaluationConfig, RunPlan, run_settings
from eagle_jax.evaluation.questions import Question, encode
from eagle_jax.evaluation.records import COLUMNS, Record, versions
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

_TURN_SEEDS = 1 << 24
"""The distance between the seeds of two turns: more than any file has questions."""


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
        open_pair(config.target, config.draft_of(run.config.method_row), run.config)
        for run in runs
    ]
    first, shared = sources[0], runs[0].config
    max_length = shared.max_length or first.max_positions
    check_max_length(first.max_positions, max_length)
    new_tokens = shared.request.max_new_tokens
    if new_tokens >= max_length:
        raise InputError(
            f"max_new_tokens = {new_tokens} leaves no room for a "
            f"prompt in max_length = {max_length}; give fewer"
        )
    for run in runs if config.with_nodes else ():
        if isinstance(run.config.tree, AutoTree):
            raise InputError(
                f"{run.label}: nodes are recorded of trees of one size; leave them "
                "out, or tree=auto"
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
        # Its own weights go with it; what was opened stays to the end.
        pair = dataclasses.replace(source, kept={})
        pair = pair if target is None else with_target(pair, target)
        target = pair.load().params.target
        room, path = max_length - new_tokens, config.path(run)
        answerer = _Answerer(plan=run, pair=pair, config=config, room=room)
        with JsonLines(path, settings) as log:
            known = {one.question_id for one in read_records(path, settings, questions)}
            missing = [one for one in questions if one.question_id not in known]
            answerer.record(log, missing, len(questions), report, progress)
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
    draft = config.draft_of(run.config.method_row)
    return run_settings(run, source.drafter) | {
        "template": config.template,
        "target": _EMBEDDED.get(config.target, config.target),
        "draft": draft and _EMBEDDED.get(draft, draft),
        "vocab_size": source.vocab_size,
        "dtype": source.dtype + bits,
        "device": jax.devices()[0].device_kind,
        "versions": versions(),
    }


@dataclasses.dataclass(kw_only=True)
class _Answerer:
    """A run that is ready to answer questions.

    Attributes:
        plan: The run's method and settings.
        pair: The pair with the run's own drafter.
        config: What is asked for of all runs.
        room: The largest number of tokens of a prompt.
        num_cut: The number of prompts so far that were longer than the room and lost
            their beginning.
    """

    plan: RunPlan
    pair: Pair
    config: EvaluationConfig
    room: int
    num_cut: int = 0

    def record(
        self,
        log: JsonLines,
        missing: Sequence[Question],
        total: int,
        report: Report,
        progress: Progress,
    ) -> None:
        """Answers the questions that are not on record yet, and adds their records."""
        name, done = self.plan.model_id, total - len(missing)
        if done:
            report(f"{name}: {done} of {total} questions are on record already")
        if missing:
            with progress(name, total, done) as update:
                for number, record in enumerate(self.answer(missing), done + 1):
                    log.append(dataclasses.replace(record, asked=total).to_json())
                    update(number)
        if self.num_cut:
            report(
                f"warning: {name}: {self.num_cut} prompts were longer than max_length "
                f"- max_new_tokens = {self.room} tokens and lost their beginning"
            )

    def answer(self, questions: Iterable[Question]) -> Iterator[Record]:
        """Yields a record per question, in the order in which they are finished.

        Each question is begun when a batch has room.
        """
        tasks, size = map(self._answer, questions), self.plan.config.batch_size
        if size > 1:
            engine = self._engine(self.room, size)
            yield from (record for _, record in converse(engine, tasks, ahead=size))
            return
        for task in tasks:  # Each of its turns is one program.
            try:
                text = next(task)
                while True:
                    self._write(text)
                    text = task.send(text)
            except StopIteration as end:
                yield end.value

    def _answer(self, question: Question) -> Generator[Text, Text, Record]:
        """Asks the turns of a question one by one."""
        columns: dict[str, Any] = {name: [] for name in COLUMNS}
        has_nodes = self.config.with_nodes and self.pair.drafter is not None
        trees: list[VerifiedTree] = []
        answers = columns["turns"]
        for turn in range(len(question.turns)):
            asked = question.turns[: turn + 1]
            ids = encode(self.pair.tokenizer, self.config.template, asked, answers)
            # Prompts that are too long lose their beginning.
            self.num_cut += len(ids) > self.room
            # Its own among all questions and turns: prompts that are cut to one length
            # would share their noise otherwise.
            seed = self.plan.config.request.seed + question.number
            request = self.pair.request(seed=(seed + turn * _TURN_SEEDS) % 2**32)
            text = yield self.pair.text(ids[-self.room :], request)
            if has_nodes:
                trees += self._look_at_rounds(text, question)
            answer = {
                "turns": text.text,
                "wall_time": text.prefill_seconds + text.decode_seconds,
                "decoding_steps": len(text.accept_lengths),
                "prompt_tokens": len(text.prompt_ids),
                "token_ids": text.token_ids,
                "stop_reasons": text.stop_reason.name.lower(),
            }
            for name, value in answer.items():
                columns[name].append(value)
            columns["accept_lengths"] += [1 + n for n in text.accept_lengths]
        return Record(
            question_id=question.question_id,
            category=question.category,
            question=question.fingerprint,
            number=question.number,
            **columns,
            nodes=tuple(trees) if has_nodes else None,
            model_id=self.plan.model_id,
        )

    def _look_at_rounds(self, timed: Text, question: Question) -> list[VerifiedTree]:
        """Decodes a turn once more, round by round, and returns its trees."""
        text = self.pair.text(timed.prompt_ids, timed.request)
        text.keeps_rounds = True
        self._write(text)
        if text.token_ids != timed.token_ids:
            raise InputError(
                f"{self.plan.model_id}: decoded round by round, question "
                f"{question.question_id!r} has other tokens, so its nodes say nothing "
                "about the text; give `dtype` float32, where near ties fall alike, or "
                "record no nodes"
            )
        return [VerifiedTree.of(done) for done, _ in text.rounds]

    def _write(self, text: Text) -> None:
        """Writes one text alone, with a cache for prompts like its own."""
        longest = min(self.room, bucket_length(len(text.prompt_ids)))
        self._engine(longest, 1).write([text])

    def _engine(self, longest: int, batch_size: int) -> Engine:
        # More slots would cost time for nothing.
        max_length = longest + self.plan.config.request.max_new_tokens
        return self.pair.engine(batch_size=batch_size, max_length=max_length)
