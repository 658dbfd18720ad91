"""The record of an answered question, in the format of Spec-Bench: a line of JSON."""

import dataclasses
import importlib.metadata
import platform
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import field
from itertools import accumulate
from typing import Any

from eagle_jax.decoding.rates import decoded_tokens, tokens_per_round
from eagle_jax.errors import InputError
from eagle_jax.evaluation.fields import get, numbers
from eagle_jax.evaluation.nodes import Nodes
from eagle_jax.evaluation.questions import MT_BENCH, QuestionId

QuestionKey = tuple[str, str]
"""A category and an id: files of different tasks may count from the same number."""

_CHOICE = "choices[0]."
_VERSIONS = ("eagle-jax", "jax", "jaxlib", "flax", "numpy", "transformers")
_MOST_LEVELS = 2**16
_COLUMNS = {
    **{"turns": "text", "token_ids": "token_ids", "prompt_tokens": "prompt_tokens"},
    **{"wall_time": "wall_time", "decode_time": "decode_time"},
    **{"stop_reasons": "stop_reason"},
}
"""The names of a turn's fields in a file; each holds a list of a value per turn."""


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
        number: The question's number among all; `None` in older records, which have
            none.
        turns: The answers, one per turn.
        run: The settings of its run: at least `method`, `label`, `temperature` and
            `batch_size`; `versions` are those of the software that computed it.
        nodes: The drafted nodes and their acceptance; `None` if they were not looked
            at.
        model_id: The name of the run.
        answer_id: A text that no other record has.
        tstamp: The time when it was made, in seconds since 1970.
    """

    question_id: QuestionId
    category: str
    question: str
    number: int | None
    turns: tuple[Turn, ...]
    run: Mapping[str, Any]
    nodes: Nodes | None
    model_id: str
    answer_id: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    tstamp: float = field(default_factory=time.time)

    @classmethod
    def from_json(cls, record: Any) -> "Record":
        """Returns the record that a line of a file holds.

        Args:
            record: The parsed line.

        Raises:
            InputError: If a field is missing or holds something else; fields of others
                are left alone.
        """
        get(record, "question_id", object)
        nodes = record.get("nodes")
        made = cls(
            question_id=record["question_id"],
            category=get(record, "category", str),
            question=get(record, "question", str),
            number=record.get("number"),
            turns=_read_turns(get(record, "choices", list)),
            run=get(record, "run", dict),
            nodes=None if nodes is None else Nodes.from_json(nodes),
            model_id=get(record, "model_id", str),
            answer_id=get(record, "answer_id", str),
            tstamp=get(record, "tstamp", float),
        )
        made.validate()
        return made

    def validate(self) -> None:
        """Refuses settings, numbers and texts that no evaluation writes.

        Raises:
            InputError: If there is one; names the field.
        """
        if not isinstance(self.question_id, int | str):
            raise InputError(f"`question_id` is {self.question_id!r}")
        for name in ("method", "label"):
            get(self.run, name, str, "run.")
        for name, kind in (("temperature", float), ("batch_size", int)):
            numbers([self.run.get(name)], f"run.{name}", kind)
        if (depth := self.run.get("depth")) is not None:
            numbers([depth], "run.depth", int, most=_MOST_LEVELS)
        for turn in self.turns:
            numbers([turn.wall_time], f"{_CHOICE}wall_time")
            numbers([turn.decode_time], f"{_CHOICE}decode_time")
            numbers([turn.prompt_tokens], f"{_CHOICE}prompt_tokens", int)
            lengths = turn.accept_lengths
            numbers(lengths, f"{_CHOICE}accept_lengths", int, most=_MOST_LEVELS)
            if 0 in lengths:
                raise InputError(
                    f"`{_CHOICE}accept_lengths` holds 0; a step emits 1 or more"
                )
            for text in (turn.text, turn.stop_reason):
                if not isinstance(text, str):
                    raise InputError(f"`{_CHOICE}turns` or reasons hold {text!r}")

    def to_json(self) -> dict[str, Any]:
        """Returns the object that `from_json` reads, its fields in a line's order."""
        turns = self.turns
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
            "run": dict(self.run),
            "nodes": None if self.nodes is None else self.nodes.to_json(),
        }

    @property
    def key(self) -> QuestionKey:
        """The key that tells the question from those of all tasks."""
        return self.category, str(self.question_id)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of its run, without the versions of software."""
        return {name: self.run[name] for name in self.run if name != "versions"}

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


def _read_turns(choices: list[Any]) -> tuple[Turn, ...]:
    """Returns the turns of a record's only choice, as far as its lists fit.

    Raises:
        InputError: If a list is missing, or the lists do not fit each other.
    """
    if len(choices) != 1:
        raise InputError(f"{len(choices)} `choices` instead of one")
    names = (*_COLUMNS, "new_tokens", "decoding_steps")
    columns = {name: get(choices[0], name, list, _CHOICE) for name in names}
    if len(set(map(len, columns.values()))) > 1:
        raise InputError(f"`{'`, `'.join(names)}` of different numbers of turns")
    if not all(isinstance(ids, list) for ids in columns["token_ids"]):
        raise InputError(f"no list of lists in `{_CHOICE}token_ids`")
    if columns["new_tokens"] != [len(ids) for ids in columns["token_ids"]]:
        raise InputError(f"`{_CHOICE}new_tokens` does not count `{_CHOICE}token_ids`")
    lengths = get(choices[0], "accept_lengths", list, _CHOICE)
    steps = numbers(columns["decoding_steps"], f"{_CHOICE}decoding_steps", int)
    if sum(steps) != len(lengths):
        raise InputError(
            f"`{_CHOICE}decoding_steps` does not count `{_CHOICE}accept_lengths`"
        )
    ends = accumulate(steps)
    rows = zip(*(columns[name] for name in _COLUMNS), strict=True)
    return tuple(
        Turn(
            **dict(zip(_COLUMNS.values(), row, strict=True)),
            accept_lengths=lengths[end - count : end],
        )
        for row, count, end in zip(rows, steps, ends, strict=True)
    )


def versions() -> dict[str, str]:
    """Returns the versions that a result depends on."""
    found = {name: importlib.metadata.version(name) for name in _VERSIONS}
    return {"python": platform.python_version(), **found}
