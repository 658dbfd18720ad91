"""Files of records: a line per question, appended to wherever a run was stopped.

A file holds one run and is only ever appended to, line by line, each brought to the
disk: a process may be killed at any time, and the next one goes on after the last
whole line.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from eagle_jax.errors import InputError
from eagle_jax.evaluation.questions import Question, QuestionId
from eagle_jax.evaluation.records import Record
from eagle_jax.files import JsonLines
from eagle_jax.parsing import parse_json

_START = b'{"question_id": '
_NO_SETTINGS = ("label", "versions")
"""The fields of `run` that are no settings: its label, and the versions of software."""


def check_records(
    path: Path, run: Mapping[str, Any], questions: Iterable[Question]
) -> None:
    """Refuses a file that `RecordFile` would refuse, before any long work starts.

    The arguments are those of `RecordFile`; the file need not exist.

    Raises:
        InputError: If `RecordFile` would refuse the file.
    """
    try:
        content = path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    _check(path, content, run, questions)


class RecordFile(JsonLines):
    """A file of records that a run appends to.

    Attributes:
        records: The records that the file holds.
    """

    def __init__(
        self, path: Path, run: Mapping[str, Any], questions: Iterable[Question]
    ) -> None:
        """Opens a file, new or old, and cuts off a torn last line.

        Args:
            path: The file, in a folder that exists.
            run: The settings of its records.
            questions: The questions that are asked; the file may hold others, too.

        Raises:
            InputError: If the file holds something else than records, records of other
                settings, one question twice, or an answer to another question of the
                same id; the file stays as it is. Or if it cannot be written, or
                another process writes it.
        """
        super().__init__(path)
        try:
            self.records = _check(path, self.read(), run, questions)
            self.go_on()
        except BaseException:
            self.close()
            raise

    def add(self, record: Record) -> None:
        """Writes a record; it is on the disk when this returns.

        Raises:
            InputError: If the disk is full.
        """
        self.append(record.to_json())
        self.records.append(record)


def _check(
    path: Path, content: bytes, run: Mapping[str, Any], questions: Iterable[Question]
) -> list[Record]:
    """Returns the records of a file's whole lines."""
    *whole, torn = content.split(b"\n")
    if not torn.startswith(_START[: len(torn)]):
        raise _foreign(path, len(whole) + 1)
    wanted = json.loads(json.dumps(run))  # Tuples become lists.
    asked = {question.question_id: _identity(question) for question in questions}
    ids = {identity[:2]: question_id for question_id, identity in asked.items()}
    lines: dict[QuestionId, int] = {}
    records = []
    for number, line in enumerate(whole, 1):
        record = _parse(path, number, line)
        question_id = record.question_id
        _check_run(path, record.run, wanted)
        before = lines.setdefault(question_id, number)
        if before != number:
            raise InputError(
                f"{path}:{number}: question {question_id!r} stands in line {before} "
                "already; remove one of them"
            )
        identity = (record.category, record.question, record.number)
        if asked.get(question_id, identity) != identity:
            raise InputError(
                f"{path}:{number}: question {question_id!r} was another one then, or "
                "stood in another place; give the same question files to go on with "
                "it, or another `output`"
            )
        if question_id not in asked and identity[:2] in ids:
            raise InputError(
                f"{path}:{number}: question {question_id!r} is now called "
                f"{ids[identity[:2]]!r}, as ids change with the number of files; give "
                "the same question files, or another `output`"
            )
        records.append(record)
    return records


def _identity(question: Question) -> tuple[str, str, int | None]:
    """Returns what a question asks, and its number, of which its seed is made."""
    return question.category, question.fingerprint, question.number


def _parse(path: Path, number: int, line: bytes) -> Record:
    try:
        record = Record.from_json(parse_json(line, f"{path}:{number}"))
    except InputError as error:
        raise _foreign(path, number) from error
    if record.number is None:
        raise _foreign(path, number)
    return record


def _foreign(path: Path, number: int) -> InputError:
    return InputError(
        f"{path}:{number} is no record of an evaluation; remove the file, or give "
        "another `output`"
    )


def _check_run(path: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Refuses to mix records of two settings in one file."""
    for name in dict.fromkeys([*new, *old]):
        if name not in _NO_SETTINGS and old.get(name) != new.get(name):
            raise InputError(
                f"{path} was written with {name} = {old.get(name)!r}, but now it is "
                f"{new.get(name)!r}; use the same settings to go on with it, or give "
                "another `output`"
            )
