"""Files of records: a line of the run's settings, then a line per answered question.

A file holds one run and is only ever appended to, line by line, each brought to the
disk: a process may be killed at any time, and the next one goes on after the last
whole line.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from eagle_jax.errors import InputError
from eagle_jax.evaluation.fields import MOST_LEVELS, get
from eagle_jax.evaluation.questions import Question
from eagle_jax.evaluation.records import Record
from eagle_jax.evaluation.runs import Run
from eagle_jax.files import JsonLines
from eagle_jax.parsing import check_type, parse_json

T = TypeVar("T")


class RecordFile(JsonLines):
    """A file of records that a run appends to.

    Attributes:
        records: The records that the file holds.
    """

    def __init__(
        self, path: Path, settings: Mapping[str, Any], questions: Iterable[Question]
    ) -> None:
        """Opens a file, new or old, and cuts off a torn last line.

        Args:
            path: The file, in a folder that exists.
            settings: The settings of its run.
            questions: The questions that are asked; the file may hold others, too.

        Raises:
            InputError: If the file holds other settings, other questions of the same
                ids or something else; the file stays as it is. Or if it cannot be
                written, or another process writes it.
        """
        super().__init__(path)
        try:
            self.records = _check(path, self.read(), settings, questions)
            if self.go_on() is None:
                self.append({"run": dict(settings)})
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


def check_records(
    path: Path, settings: Mapping[str, Any], questions: Iterable[Question]
) -> None:
    """Refuses a file that `RecordFile` would refuse, before any long work starts.

    The arguments are those of `RecordFile`; the file need not exist.
    """
    try:
        content = path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    _check(path, content, settings, questions)


def read_runs(folders: Iterable[Path]) -> list[Run]:
    """Reads every `*.jsonl` of some folders.

    Files with the same settings and different questions are one run: a task may have
    a folder of its own.

    Args:
        folders: The folders of evaluations.

    Returns:
        The runs, in the order of folders and file names.

    Raises:
        InputError: If a folder is missing or holds no record, or a line is broken or
            lacks a field.
    """
    runs: list[Run] = []
    for folder in folders:
        files = [path for path in sorted(folder.glob("*.jsonl")) if path.stat().st_size]
        found = [_read_run(path) for path in files]
        if not any(run.answers for run in found):
            raise InputError(
                f"{folder} holds no *.jsonl file with records; give the output folder "
                "of eagle-jax evaluate"
            )
        for new in found:
            for place, run in enumerate(runs):
                is_apart = run.answers.keys().isdisjoint(new.answers)
                if run.key() == new.key() and is_apart:
                    runs[place] = run.joined(new)
                    break
            else:
                runs += [new] if new.answers else []
    return runs


def _check(
    path: Path,
    content: bytes,
    settings: Mapping[str, Any],
    questions: Iterable[Question],
) -> list[Record]:
    """Returns the records of a file's whole lines."""
    line = json.dumps({"run": dict(settings)}, ensure_ascii=False, allow_nan=False)
    head = f"{line}\n".encode(errors="replace")
    if not content.startswith(head) and not head.startswith(content):
        raise InputError(f"{path} has other settings: choose another `output`")
    lines = enumerate(content.split(b"\n")[1:-1], 2)
    records = [_parse(Record.from_json, line, f"{path}:{n}") for n, line in lines]
    asked = {q.question_id: (q.fingerprint, q.number) for q in questions}
    for record in records:
        answered = record.question, record.number
        if asked.get(record.question_id, answered) != answered:
            raise InputError(
                f"{path} answers another question {record.question_id!r}: choose "
                "another `output`"
            )
    return records


def _read_run(path: Path) -> Run:
    """Returns the run of one file."""
    head, *lines = path.read_bytes().split(b"\n")
    settings = _parse(_read_settings, head, f"{path}:1")
    records = [
        _parse(Record.from_json, line, f"{path}:{number}")
        for number, line in enumerate(lines, 2)
        if line.strip()
    ]
    sizes = {record.nodes.size for record in records if record.nodes is not None}
    if len(sizes - {None}) > 1:
        raise InputError(f"{path} holds trees of different sizes")
    answers = {record.key: record for record in records}
    return Run(paths=(path,), settings=settings, answers=answers)


def _read_settings(head: Any) -> dict[str, Any]:
    """Returns the settings that a file's first line holds."""
    run = get(head, "run", dict)
    for name in ("method", "label"):
        get(run, name, str)
    get(run, "temperature", float)
    get(run, "batch_size", int)
    depth = get(run, "depth", int | None) or 0
    if not 0 <= depth <= MOST_LEVELS:
        raise InputError(f"`depth` = {depth} must be 0 to {MOST_LEVELS}")
    check_type(dict, run.get("versions", {}), "`versions`")
    return run


def _parse(read: Callable[[Any], T], line: bytes, where: str) -> T:
    """Returns what a line of a file holds."""
    value = parse_json(line, where)
    try:
        return read(value)
    except InputError as error:
        wanted = "expected records of eagle-jax evaluate"
        raise InputError(f"{where}: {error}; {wanted}") from error
