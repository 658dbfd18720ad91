"""Records of an evaluation in, checked runs out."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eagle_jax.errors import InputError
from eagle_jax.evaluation.metrics import Reliability
from eagle_jax.evaluation.nodes import VerifiedTree, read_tree
from eagle_jax.evaluation.runs import Answer, Nodes, QuestionKey, Run
from eagle_jax.parsing import parse_json

_RECORDS = "records of scripts/evaluate.py"
_MOST = 2.0**53
_WANTED = {int: "a whole number of 0 or more", float: "a number of 0 or more"}


def read_runs(folders: Iterable[Path]) -> list[Run]:
    """Reads every `*.jsonl` of some folders.

    Files with the same settings and different questions are one run: a task may have
    a folder of its own.

    Args:
        folders: Of evaluations.

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
                f"{folder} is no folder; give the output folder of scripts/evaluate.py"
            )
        found = [_read_run(path) for path in sorted(folder.glob("*.jsonl"))]
        found = [run for run in found if run is not None]
        if not found:
            raise InputError(
                f"{folder} holds no *.jsonl file with records; give the output folder "
                "of scripts/evaluate.py"
            )
        for run in found:
            _add(runs, run)
    return runs


def _read_run(path: Path) -> Run | None:
    """Returns the run of one file, `None` for a file without lines."""
    answers: dict[QuestionKey, Answer] = {}
    run: Run | None = None
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            record = _parse(line, where)
            try:
                new = _read_record(record, path)
            except _MissingError as error:
                raise InputError(f"{where}: {error}; expected {_RECORDS}") from error
            _check_fits(answers, new, where)
            answers |= new.answers
            if run is None:
                run = dataclasses.replace(new, answers=answers)
            _check_same(run, new, where)
            run = dataclasses.replace(
                run,
                versions=_join(run.versions, new.versions),
                step_seconds=run.step_seconds or new.step_seconds,
            )
    return run


def _add(runs: list[Run], new: Run) -> None:
    """Appends a run, or joins it to one that has other questions."""
    for place, run in enumerate(runs):
        is_apart = run.answers.keys().isdisjoint(new.answers)
        if run.key() == new.key() and is_apart:
            runs[place] = dataclasses.replace(
                run,
                paths=run.paths + new.paths,
                versions=_join(run.versions, new.versions),
                answers=run.answers | new.answers,
                step_seconds=run.step_seconds or new.step_seconds,
            )
            return
    runs.append(new)


def _check_same(run: Run, new: Run, where: str) -> None:
    """Refuses a file that holds lines of several runs, or times of two devices."""
    if run.key("label") == new.key("label"):
        return
    names = [name for name in (*run.settings, *new.settings) if name != "label"]
    # As text: 1 and true are equal, and a missing field is none that is null.
    name = next(
        n
        for n in names
        if repr(run.settings.get(n, ...)) != repr(new.settings.get(n, ...))
    )
    raise InputError(
        f"{where}: {name} = {new.settings.get(name)}, but the lines before have "
        f"{run.settings.get(name)}; keep one run per file"
    )


def _check_fits(answers: dict[QuestionKey, Answer], new: Run, where: str) -> None:
    """Refuses a question that is there already, or whose tree has another shape."""
    ((key, answer),) = new.answers.items()
    if key in answers:
        raise InputError(
            f"{where}: question {key[1]} of {key[0]} comes a second time; remove one "
            "of its lines"
        )
    before = next((a.nodes for a in answers.values() if a.nodes), None)
    if before is None or answer.nodes is None:
        return
    if len(before.values.count) != len(answer.nodes.values.count):
        raise InputError(f"{where}: other bins of `nodes.values` than before")
    # Where there was no round, there are no positions.
    known = [a.nodes.positions for a in answers.values() if a.nodes]
    lengths = {len(p) for p in (*known, answer.nodes.positions) if p is not None}
    if len(lengths) > 1:
        raise InputError(f"{where}: another length of `nodes.positions` than before")


def _join(
    old: tuple[dict[str, Any], ...], new: tuple[dict[str, Any], ...]
) -> tuple[dict[str, Any], ...]:
    """Returns versions, each once."""
    return (*old, *(versions for versions in new if versions not in old))


class _MissingError(Exception):
    """A field that is missing or holds something else."""


def _parse(line: bytes, where: str) -> Any:
    try:
        return parse_json(line, where)
    except InputError as error:
        raise InputError(
            f"{error}; remove the line, or write it again with scripts/evaluate.py"
        ) from error


def _read_record(record: Any, path: Path) -> Run:
    """Returns a run of one question.

    Raises:
        _MissingError: If a field is missing or holds something else.
    """
    settings = dict(_get(record, "run", dict))
    for name, kind in (("method", str), ("label", str)):
        _get(settings, name, kind, "run.")
    for name, kind in (("temperature", float), ("batch_size", int)):
        _numbers([settings.get(name)], f"run.{name}", kind)
    versions = settings.pop("versions", None)
    category = _get(record, "category", str)
    if "question_id" not in record:
        raise _MissingError("no field `question_id`")
    choices = _get(record, "choices", list)
    if len(choices) != 1:
        raise _MissingError(f"{len(choices)} `choices` instead of one")
    steps = record.get("step_seconds")
    return Run(
        paths=(path,),
        settings=settings,
        versions=(versions,) if isinstance(versions, dict) else (),
        answers={
            (category, str(record["question_id"])): _read_answer(
                choices[0], category, record.get("nodes")
            )
        },
        step_seconds=_step_seconds(steps),
    )


def _read_answer(choice: Any, category: str, nodes: Any) -> Answer:
    def numbers(name: str, kind: type) -> list[Any]:
        values = _get(choice, name, list, "choices[0].")
        return _numbers(values, f"choices[0].{name}", kind)

    answer = Answer(
        category=category,
        new_tokens=numbers("new_tokens", int),
        wall_time=numbers("wall_time", float),
        decode_time=numbers("decode_time", float),
        accept_lengths=numbers("accept_lengths", int),
        token_ids=_get(choice, "token_ids", list, "choices[0]."),
        nodes=None if nodes is None else _read_nodes(nodes),
    )
    turns = [answer.new_tokens, answer.wall_time, answer.decode_time]
    if len({len(values) for values in (*turns, answer.token_ids)}) > 1:
        raise _MissingError(
            "`new_tokens`, `wall_time`, `decode_time` and `token_ids` of different "
            "numbers of turns"
        )
    if not all(isinstance(ids, list) for ids in answer.token_ids):
        raise _MissingError("no list of lists in `choices[0].token_ids`")
    return answer


def _read_nodes(nodes: Any) -> Nodes:
    depth, rank, log_confidence, is_accepted = _columns(
        nodes, "tried", ("depth", "rank", "log_confidence", "is_accepted")
    )
    count, accepted, total = _columns(nodes, "values", ("count", "accepted", "sum"))
    if (depth < 1).any() or (rank < 0).any():
        raise _MissingError("`nodes.tried` holds a depth below 1 or a rank below 0")
    # Whatever was tried, its ancestors and its likelier siblings were, too.
    if max(depth.max(initial=0), rank.max(initial=0)) > len(depth):
        raise _MissingError("`nodes.tried` holds a depth or rank of nodes not tried")
    positions = nodes.get("positions")
    if positions is not None:
        positions = np.asarray(_numbers(positions, "nodes.positions", int))
    return Nodes(
        rounds=_get(nodes, "rounds", int, "nodes."),
        drafted=_get(nodes, "drafted", int, "nodes."),
        depth=depth.astype(int),
        rank=rank.astype(int),
        # Rounding in the logarithm may leave a probability just above 1.
        confidence=np.exp(np.minimum(log_confidence, 0.0)),
        is_accepted=is_accepted.astype(bool),
        positions=positions,
        values=Reliability(
            count=count.astype(int), accepted=accepted.astype(int), total=total
        ),
        trees=_read_trees(nodes.get("trees", [])),
    )


def _read_trees(records: Any) -> tuple[VerifiedTree, ...]:
    try:
        return tuple(read_tree(record) for record in records)
    except (TypeError, ValueError, OverflowError) as error:
        raise _MissingError(f"`nodes.trees`: {error}") from error


def _columns(nodes: Any, table: str, names: Sequence[str]) -> list[np.ndarray]:
    """Returns lists of one length as float64 arrays."""
    lists = _get(nodes, table, dict, "nodes.")
    columns = [_get(lists, name, list, f"nodes.{table}.") for name in names]
    try:
        arrays = [np.asarray(column, float) for column in columns]
    except (TypeError, ValueError) as error:
        raise _MissingError(f"`nodes.{table}` holds what is no number") from error
    if not all((np.abs(array) < _MOST).all() for array in arrays):  # NaN is not.
        raise _MissingError(f"`nodes.{table}` holds what no tree has")
    if len({array.shape for array in arrays}) > 1 or arrays[0].ndim != 1:
        raise _MissingError(f"the lists of `nodes.{table}` differ in length")
    return arrays


def _step_seconds(steps: Any) -> dict[str, float] | None:
    """Returns the parts that were measured, `None` if none was."""
    if not isinstance(steps, dict):
        return None
    return {name: value for name, value in steps.items() if value is not None} or None


def _get(record: Any, name: str, kind: type, inside: str = "") -> Any:
    """Returns a field of a JSON object."""
    if not isinstance(record, dict) or name not in record:
        raise _MissingError(f"no field `{inside}{name}`")
    if not isinstance(record[name], kind):
        raise _MissingError(f"`{inside}{name}` is no {kind.__name__}")
    return record[name]


def _numbers(values: Any, name: str, kind: type = float) -> list[Any]:
    """Returns a list of finite numbers of 0 and more, whole ones for `int`."""
    kinds = int if kind is int else int | float
    for value in values if isinstance(values, list) else [values]:
        is_number = isinstance(value, kinds) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value < 0:
            raise _MissingError(f"`{name}` holds {value!r}, not {_WANTED[kind]}")
    return values
