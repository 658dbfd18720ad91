"""The record of an answered question, in the layout of Spec-Bench: a line of JSON."""

import dataclasses
import importlib.metadata
import platform
import secrets
import time
from collections.abc import Iterable
from dataclasses import field
from itertools import accumulate
from typing import Any

from eagle_jax.decoding.rates import decoded_tokens, tokens_per_round
from eagle_jax.errors import InputError
from eagle_jax.evaluation.fields import MOST_LEVELS, get, numbers
from eagle_jax.evaluation.nodes import VerifiedTree
from eagle_jax.evaluation.questions import MT_BENCH, QuestionId
from eagle_jax.parsing import check_type

QuestionKey = tuple[str, str]
"""A category and an id: files of different tasks may count from the same number."""

_VERSIONS = ("eagle-jax", "jax", "jaxlib", "flax", "numpy", "transformers")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
    """A model's answer to one turn.

    Attributes:
        text: The answer's text.
        token_ids: The answer's tokens, the prefill's and the stop token included.
        prompt_tokens: The number of tokens of the prompt.
        wall_time: The seconds with the prefill; in a batch the answer's share.
        decode_time: The seconds without the prefill; in a batch the answer's share.
        accept_lengths: The accepted drafts and the bonus of each step; tokens that
            limits and stop tokens cut off the last step are counted.
        stop_reason: The name of its `StopReason`, in lower case.
    """

    text: str
    token_ids: list[int]
    prompt_tokens: int
    wall_time: float
    decode_time: float
    accept_lengths: list[int]
    stop_reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """The record of one answered question.

    Attributes:
        question_id: The question's id.
        category: The question's category.
        question: The fingerprint of the question, see `Question.fingerprint`.
        number: The question's number among all.
        turns: The answers, one per turn.
        nodes: The trees of all rounds; `None` if they were not looked at.
        model_id: The name of the run.
        answer_id: A text that no other record has.
        tstamp: The time when it was made, in seconds since 1970.
    """

    question_id: QuestionId
    category: str
    question: str
    number: int
    turns: tuple[Turn, ...]
    nodes: tuple[VerifiedTree, ...] | None
    model_id: str
    answer_id: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    tstamp: float = field(default_factory=time.time)

    @classmethod
    def from_json(cls, record: Any) -> "Record":
        """Returns the record that a parsed line holds; fields of others are left."""
        category, nodes = get(record, "category", str), record.get("nodes")
        if nodes is not None:
            nodes = tuple(map(VerifiedTree.from_json, get(nodes, "trees", list)))
        return cls(
            question_id=get(record, "question_id", int | str),
            category=category,
            question=get(record, "question", str),
            number=get(record, "number", int),
            turns=_read_turns(get(record, "choices", list)),
            nodes=nodes,
            model_id=get(record, "model_id", str),
            answer_id=get(record, "answer_id", str),
            tstamp=get(record, "tstamp", float),
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the object that `from_json` reads, its fields in a line's order."""
        turns, nodes = self.turns, self.nodes
        choice = {
            "index": 0,
            "turns": [turn.text for turn in turns],
            "new_tokens": self.new_tokens,
            "wall_time": [turn.wall_time for turn in turns],
            "decode_time": [turn.decode_time for turn in turns],
            "decoding_steps": [len(turn.accept_lengths) for turn in turns],
            "accept_lengths": self.accept_lengths,
            "prompt_tokens": [turn.prompt_tokens for turn in turns],
            "token_ids": self.token_ids,
            "stop_reasons": [turn.stop_reason for turn in turns],
        }
        return {
            "question_id": self.question_id,
            "category": self.category,
            "model_id": self.model_id,
            "answer_id": self.answer_id,
            "tstamp": self.tstamp,
            "question": self.question,
            "number": self.number,
            "choices": [choice],
            "nodes": None if nodes is None else {"trees": [t.to_json() for t in nodes]},
        }

    @property
    def key(self) -> QuestionKey:
        """The key that tells the question from those of all tasks."""
        return self.category, str(self.question_id)

    @property
    def task(self) -> str:
        """The question's task: one for MT-bench's categories, else the category."""
        return "mt_bench" if self.category in MT_BENCH else self.category

    @property
    def token_ids(self) -> list[list[int]]:
        """The tokens of each turn's answer."""
        return [turn.token_ids for turn in self.turns]

    @property
    def new_tokens(self) -> list[int]:
        """The number of emitted tokens of each turn, the prefill's first included."""
        return [len(turn.token_ids) for turn in self.turns]

    @property
    def accept_lengths(self) -> list[int]:
        """The accepted drafts plus one of each step of all turns, uncut."""
        return [length for turn in self.turns for length in turn.accept_lengths]


def speed(records: Iterable[Record], *, with_prefill: bool) -> float | None:
    """Returns tokens per second over some questions together.

    Args:
        records: The records of one run.
        with_prefill: Whether the prefills, their times and their tokens, count.

    Returns:
        The speed; `None` where no time passed or nothing was decoded.
    """
    turns = [turn for record in records for turn in record.turns]
    tokens = [len(turn.token_ids) for turn in turns]
    counted = sum(tokens) if with_prefill else decoded_tokens(tokens)
    times = (turn.wall_time if with_prefill else turn.decode_time for turn in turns)
    seconds = sum(times)
    return counted / seconds if counted > 0 and seconds > 0 else None


def tau(records: Iterable[Record]) -> float | None:
    """Returns tokens per step over all steps of some questions; `None` without any."""
    turns = [turn for record in records for turn in record.turns]
    steps = sum(len(turn.accept_lengths) for turn in turns)
    return tokens_per_round([len(turn.token_ids) for turn in turns], steps)


def versions() -> dict[str, str]:
    """Returns the versions that a result depends on."""
    found = {name: importlib.metadata.version(name) for name in _VERSIONS}
    return {"python": platform.python_version(), **found}


def _read_turns(choices: list[Any]) -> tuple[Turn, ...]:
    """Returns the turns of a record's only choice."""
    choice = choices[0] if len(choices) == 1 else None
    lengths = numbers(choice, "accept_lengths", int, least=1, most=MOST_LEVELS)
    steps = numbers(choice, "decoding_steps", int)
    columns = {
        "text": _entries(choice, "turns", str),
        "token_ids": _entries(choice, "token_ids", list),
        "prompt_tokens": numbers(choice, "prompt_tokens", int),
        "wall_time": numbers(choice, "wall_time", float),
        "decode_time": numbers(choice, "decode_time", float),
        "stop_reason": _entries(choice, "stop_reasons", str),
    }
    ends = list(accumulate(steps))
    starts = [end - count for end, count in zip(ends, steps, strict=True)]
    are_even = {len(column) for column in columns.values()} == {len(steps)}
    if not are_even or sum(steps) != len(lengths):
        raise InputError("the lists of `choices` do not fit each other")
    return tuple(
        Turn(
            accept_lengths=lengths[start:end],
            **{name: column[turn] for name, column in columns.items()},
        )
        for turn, (start, end) in enumerate(zip(starts, ends, strict=True))
    )


def _entries(record: Any, name: str, kind: type) -> list[Any]:
    """Returns a field that is a list of values of one type."""
    return [check_type(kind, x, f"`{name}`") for x in get(record, name, list)]
