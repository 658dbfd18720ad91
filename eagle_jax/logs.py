"""Logs that a later run goes on with: lines of JSON, each on the disk at once."""

import contextlib
import itertools
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from eagle_jax.errors import InputError
from eagle_jax.files import is_special, lock, writing
from eagle_jax.parsing import check_same, parse_json, resolved, value_at


class JsonLines(contextlib.AbstractContextManager["JsonLines"]):
    """A log of JSON lines: the settings of its run, then a line per result.

    It is only appended to. Whenever its process is killed, the next one goes on after
    the last whole line.
    """

    def __init__(
        self, path: Path, settings: Mapping[str, Any], *, overwrite: bool = False
    ) -> None:
        """Opens a log, new or old, in a folder that exists.

        Args:
            path: The file.
            settings: All that its lines depend on, as JSON can hold it.
            overwrite: Whether to begin again, whatever the file holds.

        Raises:
            InputError: If it is a log of other settings or something else, which stays
                as it is, cannot be written, or another process writes it.
        """
        self.path = path
        _check_regular(path)
        with writing(path), contextlib.ExitStack() as stack:
            self._file = stack.enter_context(resolved(path).open("ab", buffering=0))
            lock(self._file, path)
            if overwrite:
                self._file.truncate(0)
            check_log(path, settings)
            self.keep(None)
            if not os.fstat(self._file.fileno()).st_size:
                self.append({"run": settings})
            stack.pop_all()

    def keep(self, count: int | None) -> None:
        """Cuts off what follows the first results, or with `None` the last whole line.

        Args:
            count: The number of results to keep.
        """
        end = None if count is None else count + 1
        kept = itertools.islice(read_log(self.path), end)
        self._file.truncate(sum(len(line) for _, line in kept))

    def append(self, result: Mapping[str, Any]) -> None:
        """Writes a line; it is on the disk when this returns.

        Raises:
            InputError: If the disk is full.
        """
        left = _line(result)
        with writing(self.path):
            while left:
                left = left[self._file.write(left) :]
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file, so that another process may write it."""
        self._file.close()

    def __exit__(self, *_: object) -> None:
        """Closes the file."""
        self.close()


def read_log(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yields the whole lines of a log, settings first, and a name for each."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.endswith(b"\n"):  # A killed process leaves half a line.
                yield f"{path}:{number}", line


def check_log(path: Path, settings: Mapping[str, Any]) -> None:
    """Refuses what `JsonLines` would refuse; the file need not exist."""
    _check_regular(path)
    head, found = _line({"run": settings}), b""
    if path.exists():
        with path.open("rb") as file:
            found = file.readline()
    if head.startswith(found):  # It may be half of a line.
        return
    where = f"{path} is no log of this command; give another output: its first line"
    before = value_at(parse_json(found, where), "run")
    if not isinstance(before, dict):
        raise InputError(f"{where} holds no settings of a run")
    check_same(before, json.loads(head)["run"], f"{path}")


def _line(value: Mapping[str, Any]) -> bytes:
    # A tokenizer may split a character: half of one is no Unicode text.
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return f"{text}\n".encode(errors="replace")


def _check_regular(path: Path) -> None:
    if is_special(path):
        raise InputError(f"cannot write {path}: it is no file; give a file name")
