"""Runs of an evaluation: their settings and answers, and which can be compared.

A run is one method with its settings at one temperature and one batch size.
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from eagle_jax.config import DecodingConfig, shortest
from eagle_jax.decoding.rates import Rates, n_alpha
from eagle_jax.evaluation.nodes import Nodes
from eagle_jax.evaluation.records import QuestionKey, Record, speed, tau
from eagle_jax.methods import METHODS, PLAIN

SETUP = (
    *("target", "dtype", "device"),
    *("template", "system_prompt", "max_new_tokens", "max_length"),
    *("ignore_eos", "top_p", "top_k", "min_p", "seed"),
)
"""The settings, besides temperature and batch size, that compared runs must share."""

TREE = (
    *("draft", "num_nodes", "depth", "width"),
    *("rank_by", "rerank", "calibration"),
    *("kappa", "sharpness", "shared_noise", "acceptance"),
    *("choices", "level", "window", "guesses", "min_match", "max_ngram"),
)
"""The settings of one method."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One method with its settings on some questions.

    Attributes:
        paths: The files of its records.
        settings: Its settings, and the `versions` of the software that computed it.
        answers: The records by the question's category and id.
    """

    paths: tuple[Path, ...]
    settings: dict[str, Any]
    answers: dict[QuestionKey, Record]

    @property
    def method(self) -> str:
        """The method that drafted."""
        return self.settings["method"]

    @property
    def temperature(self) -> float:
        """The temperature of sampling; 0 is greedy."""
        return self.settings["temperature"]

    @property
    def batch_size(self) -> int:
        """The number of questions decoded together."""
        return self.settings["batch_size"]

    @property
    def is_baseline(self) -> bool:
        """Whether this is plain decoding."""
        return self.method == PLAIN.name

    @property
    def has_confidence(self) -> bool:
        """Whether all drafts have probabilities: of a model, not of earlier text."""
        method = METHODS.get(self.method)
        return method is None or method.has_confidence

    @property
    def is_lossless(self) -> bool:
        """Whether texts have the target's distribution: not under "typical"."""
        return self.settings.get("acceptance") != "typical"

    @property
    def is_ablated(self) -> bool:
        """Whether this is EAGLE-2 without one of its two parts (Table 3)."""
        settings = self.settings
        is_by_value = settings.get("rank_by") != "confidence"
        is_whole = is_by_value and settings.get("rerank") is not False
        return self.method == DecodingConfig.method and not is_whole

    @property
    def tasks(self) -> list[str]:
        """The tasks in the order of the file."""
        return list(dict.fromkeys(answer.task for answer in self.answers.values()))

    def of_task(self, task: str | None) -> dict[QuestionKey, Record]:
        """Returns the questions of one task; all for `None`."""
        return {
            key: answer
            for key, answer in self.answers.items()
            if task in (None, answer.task)
        }

    def tau(self, task: str | None = None) -> float | None:
        """Returns tokens per step over all steps of a task, or of all for `None`."""
        return tau(self.of_task(task).values())

    def nodes(self) -> Nodes:
        """Returns the nodes of all questions together."""
        parts = [answer.nodes for answer in self.answers.values() if answer.nodes]
        return Nodes.of(tree for part in parts for tree in part.trees)

    @property
    def accept_lengths(self) -> list[int]:
        """The accepted drafts plus one of each step of all questions, uncut."""
        return [n for record in self.answers.values() for n in record.accept_lengths]

    def n_alpha(self) -> Rates:
        """Returns n-alpha, which for a tree is its acceptance by depth."""
        accepted = [length - 1 for length in self.accept_lengths]
        return n_alpha(accepted, self.settings.get("depth") or 0)

    def joined(self, other: "Run") -> "Run":
        """Returns the run with the answers of one of the same settings."""
        paths, answers = self.paths + other.paths, self.answers | other.answers
        return dataclasses.replace(self, paths=paths, answers=answers)

    def key(self, *without: str) -> str:
        """Returns a text that is equal for runs whose other settings are equal."""
        left = {n: value for n, value in self.settings.items() if n not in without}
        return json.dumps(left, sort_keys=True)

    def setup(self) -> dict[str, Any]:
        """Returns the settings that runs must share to be compared."""
        return {name: self.settings.get(name) for name in SETUP}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """Runs that one table compares.

    Attributes:
        title: The temperature, the batch size and all that tells this group from
            others.
        slug: A short title, for file names.
        runs: The runs, in the papers' order of methods.
        everything: All runs that were read: their names must be unique, and plain
            decoding is looked for among them.
    """

    title: str
    slug: str
    runs: list[Run]
    everything: list[Run]

    @property
    def names(self) -> list[str]:
        """The runs' names, no two the same."""
        return unique_names(self.runs)


def groups(runs: list[Run]) -> list[Group]:
    """Returns runs of one temperature, batch size and setup together, in this order."""
    found: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: (run.temperature, run.batch_size)):
        setup = [run.temperature, run.batch_size, run.setup()]
        found.setdefault(json.dumps(setup, sort_keys=True), []).append(run)
    differing = varying(runs, SETUP)
    slugs = Counter[str]()
    result = []
    for members in found.values():
        first, temperature = members[0], shortest(members[0].temperature)
        parts = [f"temperature {temperature}", f"batch size {first.batch_size}"]
        parts += [f"{name} {first.settings.get(name)}" for name in differing]
        slug = f"t{temperature}-b{first.batch_size}"
        slugs[slug] += 1
        group = Group(
            title=", ".join(parts),
            slug=slug if slugs[slug] == 1 else f"{slug}-{slugs[slug]}",
            runs=in_order(members),
            everything=runs,
        )
        result.append(group)
    return result


def in_order(runs: Iterable[Run]) -> list[Run]:
    """Returns runs in the order of the papers' tables, plain decoding first."""

    def place(run: Run) -> tuple[int, float, int, str]:
        known = list(METHODS)
        method = known.index(run.method) if run.method in known else len(known)
        return method, run.temperature, run.batch_size, run.settings["label"]

    return sorted(runs, key=place)


def find_baseline(run: Run, runs: Iterable[Run]) -> Run | None:
    """Returns the plain decoding that a run is compared with.

    Args:
        run: The run to compare.
        runs: The runs among which to look.

    Returns:
        A run of the same setup, temperature and batch size; of several the one with
        the most questions in common, then one from the same folder.
    """
    folders = {path.parent for path in run.paths}

    def closeness(other: Run) -> tuple[int, bool]:
        shared = len(run.answers.keys() & other.answers.keys())
        return shared, any(path.parent in folders for path in other.paths)

    candidates = [
        other
        for other in runs
        if other.is_baseline
        and other.setup() == run.setup()
        and (other.temperature, other.batch_size) == (run.temperature, run.batch_size)
    ]
    return max(candidates, key=closeness, default=None)


def speedups(
    run: Run, baseline: Run | None, *, task: str | None, with_prefill: bool
) -> list[float]:
    """Returns the speedup of each question that both runs hold and have a speed for."""
    speeds = [
        [speed([answer], with_prefill=with_prefill) for answer in pair]
        for pair in shared(run, baseline, task).values()
    ]
    return [ours / theirs for ours, theirs in speeds if ours and theirs]


def identical(run: Run, baseline: Run | None) -> tuple[int, int] | None:
    """Returns how many questions have plain decoding's tokens, of how many compared.

    Returns:
        Both numbers; `None` where nothing can be compared: without questions of both,
        for plain decoding itself, and for rejection and typical acceptance, which give
        other draws or other texts.
    """
    both = shared(run, baseline, None)
    is_other = run.settings.get("acceptance") in ("rejection", "typical")
    if not both or run.is_baseline or is_other:
        return None
    same = sum(ours.token_ids == theirs.token_ids for ours, theirs in both.values())
    return same, len(both)


def shared(
    run: Run, baseline: Run | None, task: str | None
) -> dict[QuestionKey, tuple[Record, Record]]:
    """Returns the questions of a task that both runs hold."""
    if baseline is None:
        return {}
    theirs = baseline.answers
    mine = run.of_task(task).items()
    return {key: (ours, theirs[key]) for key, ours in mine if key in theirs}


def varying(runs: Collection[Run], names: Iterable[str]) -> list[str]:
    """Returns the names of settings that are not the same in all runs."""
    return [
        name
        for name in names
        if len({json.dumps(run.settings.get(name)) for run in runs}) > 1
    ]


def unique_names(runs: list[Run]) -> list[str]:
    """Returns the runs' labels, with the settings that differ where labels repeat."""
    named = []
    for run in runs:
        label = run.settings["label"]
        namesakes = [other for other in runs if other.settings["label"] == label]
        differing = varying(namesakes, (*TREE, *SETUP, "temperature", "batch_size"))
        named.append((label, [f"{n}={run.settings.get(n)}" for n in differing]))
    names = []
    for name, run in zip(named, runs, strict=True):
        label, parts = name
        if named.count(name) > 1:
            parts = [*parts, f"from {run.paths[0].parent.name}/{run.paths[0].name}"]
        names.append(f"{label} ({', '.join(parts)})" if parts else label)
    return names
