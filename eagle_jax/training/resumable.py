"""Records that a later run appends to, and the settings that made them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle_jax.errors import InputError
from eagle_jax.files import JsonLines, write_json
from eagle_jax.parsing import parse_json, read_json_if_any, resolved


class ResumableLines(JsonLines):
    """A file of records, with the settings that made them beside it.

    The settings lie in `NAME.settings.json`, so that the file itself holds nothing
    but records. Every record has an `index` that grows from line to line.

    Attributes:
        next_index: The index of the first record that is still missing.
    """

    def __init__(
        self, path: Path, settings: Mapping[str, Any], *, overwrite: bool = False
    ) -> None:
        """Opens a file, new or to be continued; a half-written line is dropped.

        Args:
            path: The file of the records.
            settings: The settings that determine the records, as JSON can hold them.
            overwrite: Whether to start again, whatever the file holds.

        Raises:
            InputError: If the file was made with other settings or by something
                else, cannot be written, or another process writes it.
        """
        super().__init__(path)
        self.next_index = 0
        settings = json.loads(json.dumps(settings))  # Tuples become lists.
        try:
            if overwrite or path.stat().st_size == 0:
                self.clear()
                write_json(_beside(path), settings)
            else:
                _check_settings(path, read_json_if_any(_beside(path)), settings)
                self.next_index = self._index_after(self.go_on())
        except BaseException:
            self.close()
            raise

    def append(self, record: dict[str, Any]) -> None:
        """Writes a record; it is on the disk when this returns.

        Args:
            record: The record, whose `index` is above all before it.

        Raises:
            InputError: If the disk is full.
        """
        assert record["index"] >= self.next_index, record["index"]
        super().append(record)
        self.next_index = record["index"] + 1

    def _index_after(self, line: bytes | None) -> int:
        try:
            return (
                0
                if line is None
                else int(parse_json(line, f"{self.path}")["index"]) + 1
            )
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            raise InputError(
                f"the last line of {self.path} is no record of this command; give "
                "another output, or `overwrite` to lose it"
            ) from error


def _beside(path: Path) -> Path:
    path = resolved(path)
    return path.with_name(f"{path.name}.settings.json")


def _check_settings(
    path: Path, old: Mapping[str, Any] | None, new: Mapping[str, Any]
) -> None:
    """Refuses to mix records of different settings in one file."""
    if old is None:
        raise InputError(
            f"{path} exists and has no {path.name}.settings.json beside it, so it was "
            "made by something else; give another output, or `overwrite` to lose it"
        )
    for name in [*new, *old]:
        if old.get(name) != new.get(name):
            raise InputError(
                f"{path} was made with {name} = {old.get(name)!r}, but now it is "
                f"{new.get(name)!r}; use the same settings to go on with it, give "
                "another output, or `overwrite` to start again"
            )
