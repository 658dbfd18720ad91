"""Questions of an evaluation: files of Spec-Bench's format, and plain prompts.

A line of such a file, as of MT-bench's too, holds `question_id`, `category` and
`turns`; other fields are left alone.
"""

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle_jax.errors import InputError
from eagle_jax.parsing import parse_json

QuestionId = int | str

_HALF = re.compile("[\ud800-\udfff]")

MT_BENCH = {
    *("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem"),
    "humanities",
}
"""The categories of MT-bench, which are one task of Spec-Bench."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """A question to a model, one turn after the other.

    Attributes:
        question_id: The question's id, unique in an evaluation.
        category: The name of the kind of question.
        turns: The user's turns, at least one, none empty.
        number: The number among all questions of all files, from 0; seeds are made of
            it, so it does not depend on which questions are chosen.
    """

    question_id: QuestionId
    category: str
    turns: tuple[str, ...]
    number: int

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that stand for the turns."""
        return _hash(json.dumps(self.turns))[:16]


def read_questions(path: Path) -> list[Question]:
    """Reads a `.jsonl` file of questions.

    The EAGLE repository keeps each task in a folder as `question.jsonl`, and says
    nothing or, for GSM8K, "math" as a category, which is one of MT-bench's. Such a
    file's category is its folder's name, so that tasks are not mixed up.

    Args:
        path: The file.

    Returns:
        The questions, at least one, in the file's order.

    Raises:
        InputError: If the file cannot be read, or a line is wrong, which is named.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the questions {path}: {error}") from error
    lines: dict[str, int] = {}
    questions = []
    # JSON strings may hold line separators at which `splitlines` would cut.
    for line, content in enumerate(text.split("\n"), 1):
        if not content.strip():
            continue
        question = _parse(content, f"{path}:{line}", len(questions))
        before = lines.setdefault(str(question.question_id), line)
        if before != line:
            raise InputError(
                f"{path}:{line}: question_id {question.question_id!r} stands in line "
                f"{before} already; give every question its own"
            )
        questions.append(question)
    if not questions:
        raise InputError(f"{path} holds no question")
    categories = {question.category for question in questions}
    is_mixed_up = len(categories) == 1 and categories <= MT_BENCH
    own = path.stem == "question" and is_mixed_up
    return [
        dataclasses.replace(question, category=_name(path))
        if own or not question.category
        else question
        for question in questions
    ]


def plain_questions(path: Path, prompts: Sequence[str]) -> list[Question]:
    """Returns questions of one turn, one per prompt.

    Args:
        path: The file of the prompts, whose stem is their category.
        prompts: The texts; empty ones are refused.

    Raises:
        InputError: If a prompt is no text.
    """
    return [
        Question(
            question_id=number,
            category=path.stem,
            turns=_check_turns([prompt], f"{path}: prompt {number}"),
            number=number,
        )
        for number, prompt in enumerate(prompts)
    ]


def join_files(files: Sequence[tuple[Path, Sequence[Question]]]) -> list[Question]:
    """Returns the questions of several files together.

    Args:
        files: The paths, each with its questions.

    Returns:
        All questions. Those of a single file keep their ids; with several files an id
        gets its file's label in front: question 12 of `gsm8k/question.jsonl` is
        "gsm8k-12".

    Raises:
        InputError: If two files cannot be told apart.
    """
    names = labels([path for path, _ in files])
    joined: list[Question] = []
    for name, (_, questions) in zip(names, files, strict=True):
        for question in questions:
            label = f"{name}-{question.question_id}"
            question_id = question.question_id if len(files) == 1 else label
            joined.append(
                dataclasses.replace(
                    question, question_id=question_id, number=len(joined)
                )
            )
    return joined


def labels(paths: Sequence[Path]) -> list[str]:
    """Returns a name for each file, no two the same.

    It is the file's stem, or the folder's name for a `question.jsonl`; both where that
    is not enough.

    Raises:
        InputError: If two files still have one name.
    """
    names = [_name(path) for path in paths]
    if len(set(names)) < len(names):
        names = [f"{_folder(path)}-{path.stem}" for path in paths]
    for name in names:
        if names.count(name) > 1:
            raise InputError(
                f"two of the question files are called {name}; give each file once "
                "and under a name of its own"
            )
    return names


def choose(
    questions: Sequence[Question],
    *,
    categories: Sequence[str] | None = None,
    per_category: int | None = None,
) -> list[Question]:
    """Returns some of the questions, the same ones on every machine.

    A smaller sample is part of a larger one.

    Args:
        questions: All questions.
        categories: The wanted categories; `None` for all.
        per_category: The largest number of questions per category; `None` for all.

    Returns:
        The chosen questions, in the order given.

    Raises:
        InputError: If a category is unknown or the number below 1.
    """
    known = list(dict.fromkeys(question.category for question in questions))
    for category in categories or ():
        if category not in known:
            raise InputError(
                f"`categories`: {category!r} is unknown; the files have "
                f"{', '.join(known)}"
            )
    if per_category is not None and per_category < 1:
        raise InputError(f"`per_category` {per_category} must be at least 1")
    chosen: set[int] = set()
    for category in known if categories is None else categories:
        members = [question for question in questions if question.category == category]
        # Hashes order them as well as chance does, and alike on every machine.
        members.sort(key=lambda question: _hash(f"{category}:{question.question_id}"))
        chosen.update(question.number for question in members[:per_category])
    return [question for question in questions if question.number in chosen]


def _name(path: Path) -> str:
    return _folder(path) if path.stem == "question" else path.stem


def _folder(path: Path) -> str:
    """Returns the name of a file's folder, that of a link's and not of its target."""
    return Path(os.path.abspath(path)).parent.name


def _hash(text: str) -> str:
    # A file's name need not be UTF-8.
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()


def _parse(content: str, where: str, number: int) -> Question:
    record = parse_json(content, where)
    if not isinstance(record, dict):
        raise InputError(f"{where} must be an object with `question_id` and `turns`")
    for name in ("question_id", "category", "turns"):
        if name not in record:
            raise InputError(f"{where} has no `{name}`")
    question_id, category = record["question_id"], record["category"]
    is_number = isinstance(question_id, int) and not isinstance(question_id, bool)
    if not is_number and not (_is_text(question_id) and question_id):
        raise InputError(
            f"{where}: question_id = {question_id!r} must be a whole number or text"
        )
    if not _is_text(category):
        raise InputError(f"{where}: category = {category!r} must be Unicode text")
    return Question(
        question_id=question_id,
        category=category,
        turns=_check_turns(record["turns"], where),
        number=number,
    )


def _check_turns(turns: Any, where: str) -> tuple[str, ...]:
    """Returns the turns if each is a text that a tokenizer can take."""
    if not isinstance(turns, list) or not turns:
        raise InputError(f"{where}: turns must be a list of at least one text")
    for number, turn in enumerate(turns, 1):
        if not _is_text(turn) or not turn.strip():
            raise InputError(f"{where}: turn {number} is {turn!r}, not a text")
    return tuple(turns)


def _is_text(value: Any) -> bool:
    """Returns whether a value is a text without half characters."""
    return isinstance(value, str) and _HALF.search(value) is None
