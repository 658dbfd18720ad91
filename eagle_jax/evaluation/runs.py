"""Runs of an evaluation: their files, and which of them can be compared.

A run is one method with its settings at one temperature and one batch size. A file
holds one: a line of its settings, then a line per answered question, see `JsonLines`.
"""

import dataclasses
import json
import operator
import re
import statistics
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from eagle_jax.config import shortest
from eagle_jax.decoding.rates import tokens_per_round
from eagle_jax.errors import InputError
from eagle_jax.evaluation.questions import get
from eagle_jax.evaluation.records import MOST_LEVELS, QuestionKey, Record, speed
from eagle_jax.logs import read_log
from eagle_jax.methods import METHODS, PLAIN, Method
from eagle_jax.parsing import check_type, parse_json

_SETUP = (
    "target dtype device template max_new_tokens max_length ignore_eos "
    "top_p top_k min_p seed"
)
SETUP = tuple(_SETUP.split())
"""The settings, besides temperature and batch size, that compared runs must share."""

_OWN = [name for method in METHODS.values() for name in method.own_settings]

TREE = ("draft", "acceptance", *dict.fromkeys(_OWN))
"""The settings of one method."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluatedRun:
    """One method with its settings on some questions.

    Attributes:
        path: The file of its records.
        settings: Its settings, and the `versions` of the software that computed it.
        answers: The records by the question's category and id.
    """

    path: Path
    settings: dict[str, Any]
    answers: dict[QuestionKey, Record]

    @property
    def file(self) -> str:
        """The file of its records, with its folder."""
        return f"{self.path.parent.name}/{self.path.name}"

    @property
    def is_baseline(self) -> bool:
        """Whether this is plain decoding."""
        return self.settings["method"] == PLAIN.name

    @property
    def row(self) -> Method:
        """What is known of its method; of an unknown one as little as of `PLAIN`."""
        return METHODS.get(self.settings["method"], PLAIN)

    @property
    def is_static(self) -> bool:
        """Whether its method drafts one shape of branching tree in every round."""
        return "choices" in self.row.own_settings

    @property
    def is_ablated(self) -> bool:
        """Whether this is a dynamic tree without one of its two parts (Table 3)."""
        is_by_confidence = self.settings.get("rank_by") == "confidence"
        return is_by_confidence or self.settings.get("rerank") is False

    @property
    def missing(self) -> int:
        """The number of questions that were asked and have no answer yet."""
        asked = max((answer.asked or 0 for answer in self.answers.values()), default=0)
        return max(asked - len(self.answers), 0)

    def of_task(self, task: str | None) -> dict[QuestionKey, Record]:
        """Returns the questions of one task; all for `None`."""
        every = self.answers.items()
        return {key: one for key, one in every if task in (None, one.task)}

    @property
    def accepted(self) -> list[int]:
        """The number of drafts that each step accepted."""
        return [n - 1 for one in self.answers.values() for n in one.accept_lengths]

    def tau(self, task: str | None = None) -> float | None:
        """Returns tokens per step over all steps of a task, or of all for `None`."""
        answers = self.of_task(task).values()
        new_tokens = [number for answer in answers for number in answer.new_tokens]
        steps = sum(len(answer.accept_lengths) for answer in answers)
        return tokens_per_round(new_tokens, steps)

    @property
    def setup(self) -> str:
        """A text that is equal for runs that can be compared."""
        names = ("temperature", "batch_size", *SETUP)
        return json.dumps([self.settings.get(name) for name in names])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """Runs that one table compares: of one temperature, batch size and setup.

    Attributes:
        title: The temperature, the batch size and all that tells this group from
            others.
        runs: The runs, in the papers' order of methods.
    """

    title: str
    runs: list[EvaluatedRun]

    @property
    def slug(self) -> str:
        """The title, for file names."""
        return re.sub(r"[^\w.]+", "-", self.title)

    @property
    def named(self) -> list[tuple[str, EvaluatedRun]]:
        """The runs by their labels, with their files where labels repeat."""
        labels = [run.settings["label"] for run in self.runs]
        return [
            (label if labels.count(label) == 1 else f"{label} ({run.file})", run)
            for label, run in zip(labels, self.runs, strict=True)
        ]


def groups(runs: list[EvaluatedRun]) -> list[Group]:
    """Returns groups by temperature and batch size, in this order."""
    found: dict[str, list[EvaluatedRun]] = {}
    sizes = operator.itemgetter("temperature", "batch_size")
    for run in sorted(runs, key=lambda run: sizes(run.settings)):
        found.setdefault(run.setup, []).append(run)
    differing, result = varying(runs, SETUP), list[Group]()
    for members in found.values():
        settings = members[0].settings
        temperature, batch_size = sizes(settings)
        title = f"temperature {shortest(temperature)}, batch size {batch_size}"
        own = [f", {name} {settings.get(name)}" for name in differing]
        result.append(Group(title=title + "".join(own), runs=in_order(members)))
    return result


def in_order(runs: Iterable[EvaluatedRun]) -> list[EvaluatedRun]:
    """Returns runs in the order of the papers' tables, plain decoding first."""
    names = ("method", "temperature", "batch_size", "label")

    def place(run: EvaluatedRun) -> tuple[Any, ...]:
        method, *others = (run.settings[name] for name in names)
        # One that is not known stands last.
        return [*METHODS, method].index(method), *others

    return sorted(runs, key=place)


def find_baseline(
    run: EvaluatedRun, runs: Iterable[EvaluatedRun]
) -> EvaluatedRun | None:
    """Returns the plain decoding that a run is compared with.

    It has the same setup, temperature and batch size; of several it is the one with the
    most questions in common.
    """
    candidates = [o for o in runs if o.is_baseline and o.setup == run.setup]
    return max(candidates, key=lambda o: len(shared(run, o)), default=None)


def speedup(
    run: EvaluatedRun, baseline: EvaluatedRun | None, task: str
) -> float | None:
    """Returns the median over questions that both runs hold and have a speed for."""
    pairs = shared(run, baseline, task).values()
    speeds = [(speed([ours]), speed([theirs])) for ours, theirs in pairs]
    ratios = [ours / theirs for ours, theirs in speeds if ours and theirs]
    return statistics.median(ratios) if ratios else None


def identical(
    run: EvaluatedRun, baseline: EvaluatedRun | None
) -> tuple[int, int] | None:
    """Returns how many questions have plain decoding's tokens, of how many compared.

    `None` stands where nothing can be compared: without questions of both, for plain
    decoding itself, and for acceptance by rejection, which draws other texts.
    """
    both = shared(run, baseline)
    is_other = run.settings.get("acceptance") == "rejection"
    if not both or run.is_baseline or is_other:
        return None
    same = sum(ours.token_ids == theirs.token_ids for ours, theirs in both.values())
    return same, len(both)


def shared(
    run: EvaluatedRun, baseline: EvaluatedRun | None, task: str | None = None
) -> dict[QuestionKey, tuple[Record, Record]]:
    """Returns the questions of a task, or of all, that both runs hold."""
    theirs = baseline.answers if baseline else {}
    mine = run.of_task(task).items()
    return {key: (ours, theirs[key]) for key, ours in mine if key in theirs}


def varying(runs: Collection[EvaluatedRun], names: Iterable[str]) -> list[str]:
    """Returns the names of settings that are not the same in all runs."""
    values = {
        name: {json.dumps(run.settings.get(name)) for run in runs} for name in names
    }
    return [name for name in values if len(values[name]) > 1]


def read_runs(folders: Iterable[Path]) -> list[EvaluatedRun]:
    """Reads every `*.jsonl` of some folders, in the order of folders and file names.

    Raises:
        InputError: If a folder is missing or holds no record, or a line is broken or
            lacks a field.
    """
    runs: list[EvaluatedRun] = []
    for folder in folders:
        files = [path for path in sorted(folder.glob("*.jsonl")) if path.stat().st_size]
        found = [run for run in map(read_run, files) if run.answers]
        if not found:
            raise InputError(
                f"{folder} holds no *.jsonl file with records; give the output folder "
                "of eagle-jax evaluate"
            )
        runs += found
    return runs


def read_run(path: Path) -> EvaluatedRun:
    """Reads the file of one run."""
    settings: dict[str, Any] = {}
    answers: dict[QuestionKey, Record] = {}
    sizes: set[int] = set()
    for where, line in list(read_log(path)) or [(f"{path}:1", b"")]:
        value = parse_json(line, where)
        try:
            if settings:
                record = Record.from_json(value)
                answers[record.category, str(record.question_id)] = record
                sizes |= {len(tree.parents) for tree in record.nodes or ()}
            else:
                settings = _read_settings(value)
        except InputError as error:
            wanted = "expected records of eagle-jax evaluate"
            raise InputError(f"{where}: {error}; {wanted}") from error
    if len(sizes) > 1:
        raise InputError(f"{path} holds trees of different sizes")
    return EvaluatedRun(path=path, settings=settings, answers=answers)


def _read_settings(head: Any) -> dict[str, Any]:
    """Returns the settings that a file's first line holds."""
    run = get(head, "run", dict)
    kinds = {"method": str, "label": str, "temperature": float, "batch_size": int}
    for name, kind in kinds.items():
        get(run, name, kind)
    depth = get(run, "depth", int | None) or 0
    if not 0 <= depth <= MOST_LEVELS:
        raise InputError(f"`depth` = {depth} must be 0 to {MOST_LEVELS}")
    check_type(dict, run.get("versions", {}), "`versions`")
    return run
