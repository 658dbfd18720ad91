"""Runs of an evaluation: what was decoded how, and which runs can be compared.

A run is one method with its settings at one temperature and one batch size.
"""

import dataclasses
import json
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from eagle_jax.config import shortest
from eagle_jax.decoding.state import tokens_per_round
from eagle_jax.evaluation import metrics
from eagle_jax.evaluation.nodes import VerifiedTree
from eagle_jax.evaluation.questions import MT_BENCH

SETUP = (
    *("target", "target_fingerprint", "dtype", "device"),
    *("template", "system_prompt", "date"),
    *("max_new_tokens", "max_length"),
    *("ignore_eos", "top_p", "top_k", "min_p", "seed"),
)
"""Settings that runs must share, besides temperature and batch size, to be compared."""

TREE = (
    *("draft", "draft_fingerprint", "num_nodes", "depth", "width"),
    *("rank_by", "rerank", "calibration"),
    *("kappa", "sharpness", "shared_noise", "acceptance"),
)
"""Settings of one method."""

_METHODS = ("autoregressive", "lookup", "small-model", "chain", "eagle1", "eagle2")
QuestionKey = tuple[str, str]
"""Category and id: files of different tasks may count from the same number."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Nodes:
    """What the drafted nodes of some rounds became.

    Attributes:
        rounds: Number of rounds.
        drafted: Nodes drafted in them, roots not counted.
        depth: `[M]` int, of the tried nodes (those whose parent was accepted), from 1.
        rank: `[M]` int, their places among their siblings, 0 = likeliest.
        confidence: `[M]` float64, probability given the parent, to the draft model.
        is_accepted: `[M]` bool.
        positions: `[N]` int, times that each node of a static tree was accepted, the
            root's in front; `None` where it was not recorded.
        values: All drafted nodes by path value, the product of confidences.
        trees: Every round's; empty in records of before they were kept.
    """

    rounds: int
    drafted: int
    depth: np.ndarray
    rank: np.ndarray
    confidence: np.ndarray
    is_accepted: np.ndarray
    positions: np.ndarray | None
    values: metrics.Reliability
    trees: tuple[VerifiedTree, ...] = ()

    @property
    def accepted_per_round(self) -> float:
        """Accepted nodes per round, root not counted."""
        return float(self.is_accepted.sum()) / max(self.rounds, 1)

    @property
    def wasted_per_round(self) -> float:
        """Drafted nodes per round that were not accepted."""
        return self.drafted / max(self.rounds, 1) - self.accepted_per_round


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """The record of one question.

    Attributes:
        category: As in the question file.
        new_tokens: Per turn, tokens emitted, the prefill's first one included.
        wall_time: Per turn, in seconds, prefill included; in a batch its share.
        decode_time: Likewise, without prefill.
        accept_lengths: Over all turns, what each step accepted and one more, uncut.
        token_ids: Per turn.
        nodes: Of the trees, if they were recorded.
    """

    category: str
    new_tokens: list[int]
    wall_time: list[float]
    decode_time: list[float]
    accept_lengths: list[int]
    token_ids: list[list[int]]
    nodes: Nodes | None

    @property
    def task(self) -> str:
        """MT-bench's categories are one task, every other category is its own."""
        return "mt_bench" if self.category in MT_BENCH else self.category

    @property
    def tau(self) -> float | None:
        """Tokens per step, over all turns."""
        return tokens_per_round(self.new_tokens, len(self.accept_lengths))

    def speed(self, *, with_prefill: bool) -> float | None:
        """Returns tokens per second over all turns."""
        seconds = self.wall_time if with_prefill else self.decode_time
        return metrics.tokens_per_second(
            self.new_tokens, seconds, with_prefill=with_prefill
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One method with its settings on some questions.

    Attributes:
        paths: The files.
        settings: The records' `run`, without `versions`.
        versions: Of what computed it; several if it was gone on with.
        answers: By the question's category and id.
        step_seconds: Seconds of each part of a batch step, if they were measured.
    """

    paths: tuple[Path, ...]
    settings: dict[str, Any]
    versions: tuple[dict[str, Any], ...]
    answers: dict[QuestionKey, Answer]
    step_seconds: dict[str, float] | None

    @property
    def method(self) -> str:
        """What drafted."""
        return self.settings["method"]

    @property
    def temperature(self) -> float:
        """Of sampling; 0 is greedy."""
        return self.settings["temperature"]

    @property
    def batch_size(self) -> int:
        """Questions decoded together."""
        return self.settings["batch_size"]

    @property
    def is_baseline(self) -> bool:
        """Whether this is plain decoding."""
        return self.method == "autoregressive"

    @property
    def is_ablated(self) -> bool:
        """Whether this is EAGLE-2 without one of its two parts (Table 3)."""
        settings = self.settings
        is_by_value = settings.get("rank_by") != "confidence"
        is_whole = is_by_value and settings.get("rerank") is not False
        return self.method == "eagle2" and not is_whole

    @property
    def tasks(self) -> list[str]:
        """Tasks in the order of the file."""
        return list(dict.fromkeys(answer.task for answer in self.answers.values()))

    @property
    def throughput(self) -> float | None:
        """Tokens per second over the whole run, prefill included."""
        return throughput(self.answers.values())

    def of_task(self, task: str | None) -> dict[QuestionKey, Answer]:
        """Returns the questions of one task; all for `None`."""
        return {
            key: answer
            for key, answer in self.answers.items()
            if task in (None, answer.task)
        }

    def tau(self, task: str | None = None) -> float | None:
        """Returns tokens per step, over all steps of a task; of all for `None`."""
        answers = self.of_task(task).values()
        return tokens_per_round(
            [number for answer in answers for number in answer.new_tokens],
            sum(len(answer.accept_lengths) for answer in answers),
        )

    def nodes(self) -> Nodes | None:
        """Returns the nodes of all questions together, `None` where there are none."""
        parts = [a.nodes for a in self.answers.values() if a.nodes is not None]
        if not parts:
            return None
        positions = [part.positions for part in parts if part.positions is not None]
        values = [part.values for part in parts]
        return Nodes(
            rounds=sum(part.rounds for part in parts),
            drafted=sum(part.drafted for part in parts),
            depth=np.concatenate([part.depth for part in parts]),
            rank=np.concatenate([part.rank for part in parts]),
            confidence=np.concatenate([part.confidence for part in parts]),
            is_accepted=np.concatenate([part.is_accepted for part in parts]),
            positions=np.sum(positions, axis=0) if positions else None,
            values=metrics.Reliability(
                count=np.sum([value.count for value in values], axis=0),
                accepted=np.sum([value.accepted for value in values], axis=0),
                total=np.sum([value.total for value in values], axis=0),
            ),
        )

    def n_alpha(self) -> metrics.Rates:
        """Returns n-alpha, for a chain: from its nodes, or else from its steps."""
        nodes = self.nodes()
        if nodes is not None:
            return metrics.n_alpha_of_nodes(nodes.depth, nodes.is_accepted)
        steps = [answer.accept_lengths for answer in self.answers.values()]
        return metrics.n_alpha_of_steps(steps, self.settings.get("depth") or 0)

    def key(self, *without: str) -> str:
        """Returns equal text for runs whose settings are equal but for some."""
        left = {k: v for k, v in self.settings.items() if k not in without}
        return json.dumps(left, sort_keys=True)

    def setup(self) -> dict[str, Any]:
        """Returns the settings that runs must share to be compared."""
        return {name: self.settings.get(name) for name in SETUP}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """Runs that one table compares.

    Attributes:
        title: Temperature, batch size and whatever tells this group from others.
        slug: The same, short, for file names.
        runs: In the papers' order of methods.
        everything: All runs that were read: where names must be unique, and where
            plain decoding is looked for.
    """

    title: str
    slug: str
    runs: list[Run]
    everything: list[Run]

    @property
    def names(self) -> list[str]:
        """The runs' names, each once."""
        return unique_names(self.runs)


def groups(runs: list[Run], *, one_batch_size: bool) -> list[Group]:
    """Returns runs of one setup and temperature together, in order of temperature.

    Args:
        runs: All of them.
        one_batch_size: Keep only the smallest batch size of each group.
    """
    found: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: run.temperature):
        setup = json.dumps([run.temperature, run.setup()], sort_keys=True)
        found.setdefault(setup, []).append(run)
    differing = varying(runs, SETUP)
    result = []
    for members in found.values():
        smallest = min(run.batch_size for run in members)
        if one_batch_size:
            members = [run for run in members if run.batch_size == smallest]
        first = members[0]
        parts = [f"temperature {shortest(first.temperature)}"]
        parts += [f"batch size {smallest}"] if one_batch_size else []
        parts += [f"{name} {first.settings.get(name)}" for name in differing]
        slug = f"t{shortest(first.temperature)}"
        used = sum(group.slug.split("-")[0] == slug for group in result)
        group = Group(
            title=", ".join(parts),
            slug=slug if not used else f"{slug}-{used + 1}",
            runs=in_order(members),
            everything=runs,
        )
        result.append(group)
    return result


def in_order(runs: Iterable[Run]) -> list[Run]:
    """Returns runs in the order of the papers' tables, plain decoding first."""

    def place(run: Run) -> tuple[int, float, int, str]:
        known = run.method in _METHODS
        method = _METHODS.index(run.method) if known else len(_METHODS)
        return method, run.temperature, run.batch_size, run.settings["label"]

    return sorted(runs, key=place)


def find_baseline(run: Run, runs: Iterable[Run]) -> Run | None:
    """Returns the plain decoding that a run is compared with.

    Args:
        run: Any run.
        runs: Where to look.

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


def throughput(answers: Iterable[Answer]) -> float | None:
    """Returns tokens per second over some questions together, prefill included."""
    answers = list(answers)
    return metrics.tokens_per_second(
        [number for answer in answers for number in answer.new_tokens],
        [seconds for answer in answers for seconds in answer.wall_time],
        with_prefill=True,
    )


def varying(runs: Collection[Run], names: Iterable[str]) -> list[str]:
    """Returns which of some settings are not the same in all runs."""
    return [
        name
        for name in names
        if len({json.dumps(run.settings.get(name)) for run in runs}) > 1
    ]


def unique_names(runs: list[Run]) -> list[str]:
    """Returns the runs' labels, with what differs where a label comes twice."""
    names = []
    for run in runs:
        label = run.settings["label"]
        namesakes = [other for other in runs if other.settings["label"] == label]
        differing = varying(namesakes, (*TREE, *SETUP, "temperature", "batch_size"))
        parts = [f"{name}={run.settings.get(name)}" for name in differing]
        if sum(other.key() == run.key() for other in namesakes) > 1:
            parts.append(f"from {run.paths[0].parent.name}/{run.paths[0].name}")
        names.append(f"{label} ({', '.join(parts)})" if parts else label)
    return names
