"""Files of records: a line of the run's settings, then a line per answered question.

A file holds one run, see `JsonLines`.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from eagle_jax.errors import InputError
from eagle_jax.evaluation.fields import MOST_LEVELS, get
from eagle_jax.evaluation.questions import Question
from eagle_jax.evaluation.records import Record
from eagle_jax.evaluation.runs import EvaluatedRun
from eagle_jax.logs import check_log, read_log
from eagle_jax.parsing import check_type, parse_json

T = TypeVar("T")


def read_records(
    path: Path, settings: Mapping[str, Any], questions: Iterable[Question]
) -> list[Record]:
    """Reads the records that a run can go on with.

    Args:
        path: The file, which need not exist.
        settings: The settings of the run.
        questions: The questions that are asked; the file may hold others, too.

    Raises:
        InputError: If the file holds other settings, other questions of the same ids
            or something else.
    """
    check_log(path, settings)
    lines = list(read_log(path)) if path.exists() else []
    records = [_parse(Record.from_json, *line) for line in lines[1:]]
    asked = {q.question_id: (q.fingerprint, q.number) for q in questions}
    for record in records:
        answered = record.question, record.number
        if asked.get(record.question_id, answered) != answered:
            raise InputError(
                f"{path} answers another question {record.question_id!r}: choose "
                "another `output`"
            )
    return records


def read_runs(folders: Iterable[Path]) -> list[EvaluatedRun]:
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
    runs: list[EvaluatedRun] = []
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


def _read_run(path: Path) -> EvaluatedRun:
    """Returns the run of one file."""
    head, *lines = list(read_log(path)) or [(f"{path}:1", b"")]
    settings = _parse(_read_settings, *head)
    records = [_parse(Record.from_json, *line) for line in lines]
    sizes = {len(tree.parents) for record in records for tree in record.nodes or ()}
    if len(sizes) > 1:
        raise InputError(f"{path} holds trees of different sizes")
    answers = {record.key: record for record in records}
    return EvaluatedRun(paths=(path,), settings=settings, answers=answers)


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


def _parse(read: Callable[[Any], T], where: str, line: bytes) -> T:
    """Returns what a line of a file holds."""
    value = parse_json(line, where)
    try:
        return read(value)
    except InputError as error:
        wanted = "expected records of eagle-jax evaluate"
        raise InputError(f"{where}: {error}; {wanted}") from error
