"""A JSON-lines file that a later run goes on with after its last complete line."""

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from eagle_jax.checkpoints.outputs import lock
from eagle_jax.errors import InputError
from eagle_jax.parsing import parse_json
from eagle_jax.training.files import read_json, write_json, writing

_BLOCK = 1 << 20


class ResumableLines:
    """Records appended one by one, with the settings that made them beside the file.

    The settings lie in `NAME.settings.json`, so that the file itself holds nothing
    but records. Every record has an `index` that grows from line to line.

    Attributes:
        next_index: Of the first record that is still missing.
    """

    def __init__(
        self, path: Path, settings: Mapping[str, Any], *, overwrite: bool = False
    ) -> None:
        """Opens a file, new or to be continued; a half-written line is dropped.

        Args:
            path: Of the records.
            settings: What determines them, as JSON can hold it.
            overwrite: Start again, whatever there is.

        Raises:
            InputError: If the file was made with other settings or by something
                else, cannot be written, or another process writes it.
        """
        if path.exists() and not path.is_file():
            raise InputError(f"cannot write {path}: it is no file; give a file name")
        self.next_index = 0
        self._path = path.resolve()  # A link stays a link.
        beside = _beside(path)
        settings = json.loads(json.dumps(settings))  # Tuples become lists.
        with writing(path), contextlib.ExitStack() as stack:
            file = stack.enter_context(self._path.open("ab"))
            lock(file.fileno(), path)
            if overwrite or self._path.stat().st_size == 0:
                file.truncate(0)
                write_json(beside, settings)
            else:
                _check_settings(path, read_json(beside), settings)
                self.next_index = _drop_broken_line(self._path)
            stack.pop_all()
            self._file = file

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends one line.

        Args:
            record: With an `index` above all before it.

        Raises:
            InputError: If the disk is full.
        """
        assert record["index"] >= self.next_index, record["index"]
        line = json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
        with writing(self._path):
            # Lone surrogates, which no tokenizer takes, must not end a long run.
            self._file.write(line.encode(errors="replace"))
            self._file.flush()
        self.next_index = record["index"] + 1

    def close(self) -> None:
        """Brings the lines to the disk."""
        with writing(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Closes the file."""
        if kind is None:
            self.close()
        else:
            self._file.close()  # What went wrong must not be hidden by the next thing.


def made_with(path: Path) -> Mapping[str, Any]:
    """Returns the settings that made a file, none where nothing tells of them."""
    return read_json(_beside(path)) or {}


def _beside(path: Path) -> Path:
    path = path.resolve()
    return path.with_name(f"{path.name}.settings.json")


def _check_settings(
    path: Path, old: Mapping[str, Any] | None, new: Mapping[str, Any]
) -> None:
    """Refuses to mix records of two kinds in one file."""
    if old is None:
        raise InputError(
            f"{path} exists and has no {path.name}.settings.json beside it, so it was "
            "made by something else; give another output, or --overwrite to lose it"
        )
    for name in [*new, *old]:
        if old.get(name) != new.get(name):
            raise InputError(
                f"{path} was made with {name} = {old.get(name)!r}, but now it is "
                f"{new.get(name)!r}; use the same settings to go on with it, give "
                "another output, or --overwrite to start again"
            )


def _drop_broken_line(path: Path) -> int:
    """Cuts a file behind its last complete line; returns the next index."""
    with path.open("r+b") as file:
        end = _last_newline(file, file.seek(0, os.SEEK_END))
        file.truncate(end + 1)
        start = _last_newline(file, end) + 1 if end >= 0 else 0
        file.seek(start)
        line = file.read(max(0, end - start))
    if end < 0:
        return 0
    try:
        return int(parse_json(line, str(path))["index"]) + 1
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise InputError(
            f"the last line of {path} is no record of this command; give another "
            "output, or --overwrite to lose it"
        ) from error


def _last_newline(file: Any, end: int) -> int:
    """Returns the offset of the last newline before an offset, -1 without one."""
    while end > 0:
        start = max(0, end - _BLOCK)
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        if found >= 0:
            return start + found
        end = start
    return -1
