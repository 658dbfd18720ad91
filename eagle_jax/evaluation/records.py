"""The record of an answered question, in the layout of Spec-Bench: a line of JSON."""

import dataclasses
import importlib
import platform
import secrets
import time
import typing
from collections.abc import Collection
from dataclasses import field
from typing import Any

from eagle_jax.errors import InputError
from eagle_jax.evaluation.nodes import VerifiedTree
from eagle_jax.evaluation.questions import MT_BENCH, QuestionId, get
from eagle_jax.parsing import check_type, hints_of

QuestionKey = tuple[str, str]
"""A category and an id: files of different tasks may count from the same number."""

MOST_LEVELS = 2**16
"""More levels than a tree has, and than an array has room for."""

_PACKAGES = ("eagle_jax", "jax", "jaxlib", "flax", "numpy", "transformers")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """The record of one answered question; all lists but one have an entry per turn.

    The fields have the order of a line.

    Attributes:
        question_id: The question's id.
        category: The question's category.
        model_id: The name of the run.
        answer_id: A text that no other record has.
        tstamp: The time when it was made, in seconds since 1970.
        question: The fingerprint of the question, see `Question.fingerprint`.
        number: The question's number among all.
        asked: The number of questions that were asked with it; `None` in old records.
        turns: The answers' texts.
        wall_time: The seconds, prefill included; in a batch the answer's share.
        decoding_steps: The numbers of steps.
        accept_lengths: The accepted drafts and the bonus of each step of all turns;
            tokens that limits and stop tokens cut off a last step are counted.
        prompt_tokens: The numbers of tokens of the prompts.
        token_ids: The answers' tokens, the prefill's and the stop token included.
        stop_reasons: The names of their `StopReason`, in lower case.
        nodes: The trees of all rounds; `None` if they were not looked at.
    """

    question_id: QuestionId
    category: str
    model_id: str
    answer_id: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    tstamp: float = field(default_factory=time.time)
    question: str
    number: int
    asked: int | None = None
    turns: list[str]
    wall_time: list[float]
    decoding_steps: list[int]
    accept_lengths: list[int]
    prompt_tokens: list[int]
    token_ids: list[list[int]]
    stop_reasons: list[str]
    nodes: tuple[VerifiedTree, ...] | None

    @classmethod
    def from_json(cls, record: Any) -> "Record":
        """Returns the record that a parsed line holds; fields of others are left."""
        own: dict[str, Any] = {n: get(record, n, hint) for n, hint in _OWN.items()}
        choices = get(record, "choices", list)
        choice = choices[0] if len(choices) == 1 else None
        columns: dict[str, Any] = {name: _column(choice, name) for name in COLUMNS}
        per_turn = [columns[name] for name in COLUMNS if name != "accept_lengths"]
        num_steps, steps = sum(columns["decoding_steps"]), columns["accept_lengths"]
        if len({*map(len, per_turn)}) > 1 or num_steps != len(steps):
            raise InputError("the lists of `choices` do not fit each other")
        nodes = record.get("nodes")
        if nodes is not None:
            nodes = tuple(map(VerifiedTree.from_json, get(nodes, "trees", list)))
        return cls(**own, **columns, nodes=nodes)

    def to_json(self) -> dict[str, Any]:
        """Returns the object that `from_json` reads, its fields in a line's order."""
        choice = {"index": 0, "turns": self.turns, "new_tokens": self.new_tokens}
        choice |= {name: getattr(self, name) for name in COLUMNS}
        nodes = self.nodes
        return {name: getattr(self, name) for name in _OWN} | {
            "choices": [choice],
            "nodes": None if nodes is None else {"trees": [t.to_json() for t in nodes]},
        }

    @property
    def task(self) -> str:
        """The question's task: one for MT-bench's categories, else the category."""
        return "mt_bench" if self.category in MT_BENCH else self.category

    @property
    def new_tokens(self) -> list[int]:
        """The number of emitted tokens of each turn, the prefill's first included."""
        return [*map(len, self.token_ids)]


_HINTS = hints_of(Record)
_LISTS = {n: hint for n, hint in _HINTS.items() if typing.get_origin(hint) is list}
COLUMNS = {name: typing.get_args(hint)[0] for name, hint in _LISTS.items()}
"""The lists of a record, and the types of their entries."""

_OWN = {n: hint for n, hint in _HINTS.items() if n not in (*COLUMNS, "nodes")}


def speed(records: Collection[Record]) -> float | None:
    """Returns tokens per second over some questions together, prefills included.

    It is `None` where no time passed or nothing was written.
    """
    tokens = sum(sum(record.new_tokens) for record in records)
    seconds = sum(sum(record.wall_time) for record in records)
    return tokens / seconds if tokens > 0 and seconds > 0 else None


def versions() -> dict[str, str]:
    """Returns the versions that a result depends on, also of what is not installed."""
    found = {
        name.replace("_", "-"): importlib.import_module(name).__version__
        for name in _PACKAGES
    }
    return {"python": platform.python_version(), **found}


def _column(choice: Any, name: str) -> list[Any]:
    """Returns a list of a record, and refuses entries of another type or size."""
    kind = typing.get_origin(COLUMNS[name]) or COLUMNS[name]
    least, most = (1, MOST_LEVELS) if name == "accept_lengths" else (0, 2**53)
    values = [check_type(kind, x, f"`{name}`") for x in get(choice, name, list)]
    for value in values:
        if kind in (int, float) and not least <= value <= most:
            raise InputError(f"`{name}` holds {value}, not {least} to {most}")
    return values
