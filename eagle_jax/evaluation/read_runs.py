"""Reading the records of an evaluation as checked runs."""

from collections.abc import Iterable
from pathlib import Path

from eagle_jax.errors import InputError
from eagle_jax.evaluation.records import QuestionKey, Record
from eagle_jax.evaluation.runs import Run
from eagle_jax.parsing import parse_json

_RECORDS = "records of eagle-jax evaluate"


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
        if not folder.is_dir():
            raise InputError(
                f"{folder} is no folder; give the output folder of eagle-jax evaluate"
            )
        found = [_read_run(path) for path in sorted(folder.glob("*.jsonl"))]
        found = [run for run in found if run is not None]
        if not found:
            raise InputError(
                f"{folder} holds no *.jsonl file with records; give the output folder "
                "of eagle-jax evaluate"
            )
        for run in found:
            _add(runs, run)
    return runs


def _read_run(path: Path) -> Run | None:
    """Returns the run of one file, or `None` for a file without lines."""
    records: dict[QuestionKey, Record] = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            record = _parse(line, where)
            _check_fits(records, record, where)
            records[record.key] = record
    return Run.of(records.values(), path) if records else None


def _add(runs: list[Run], new: Run) -> None:
    """Appends a run, or joins it to one that has other questions."""
    for place, run in enumerate(runs):
        is_apart = run.answers.keys().isdisjoint(new.answers)
        if run.key() == new.key() and is_apart:
            records = [*run.answers.values(), *new.answers.values()]
            runs[place] = Run.of(records, *run.paths, *new.paths)
            return
    runs.append(new)


def _parse(line: bytes, where: str) -> Record:
    try:
        record = parse_json(line, where)
    except InputError as error:
        raise InputError(
            f"{error}; remove the line, or write it again with eagle-jax evaluate"
        ) from error
    try:
        return Record.from_json(record)
    except InputError as error:
        raise InputError(f"{where}: {error}; expected {_RECORDS}") from error


def _check_fits(records: dict[QuestionKey, Record], new: Record, where: str) -> None:
    """Refuses a record of a known question, of another run, or of other trees.

    Args:
        records: The records of the lines before.
        new: The next line's record.
        where: The line's name in a refusal.
    """
    if new.key in records:
        raise InputError(
            f"{where}: question {new.key[1]} of {new.category} comes a second time; "
            "remove one of its lines"
        )
    before = next(iter(records.values()), new).settings
    settings = new.settings
    for name in (*before, *settings):
        # Texts tell 1 from true. Records of an earlier version lack what later methods
        # brought, which is null in later records of the same run.
        old, given = (repr(found.get(name)) for found in (before, settings))
        if name != "label" and old != given:
            raise InputError(
                f"{where}: {name} = {settings.get(name)}, but the lines before have "
                f"{before.get(name)}; keep one run per file"
            )
    nodes = [r.nodes for r in (*records.values(), new) if r.nodes is not None]
    # Positions are missing where there was no round.
    if len({len(part.positions) for part in nodes if part.positions is not None}) > 1:
        raise InputError(f"{where}: another length of `nodes.positions` than before")
