"""Logs: gone on with after a kill at any moment, and never mixed."""

import os
from pathlib import Path
from typing import Any

import pytest

from eagle_jax.errors import InputError
from eagle_jax.logs import JsonLines, check_log, read_log
from tests.helpers import refused

RUN: dict[str, Any] = {"seed": 1, "sizes": (1, 2), "versions": {"jax": "é"}}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A log of two results."""
    path = tmp_path / "log.jsonl"
    with JsonLines(path, RUN) as log:
        for number in range(2):
            log.append({"index": number, "text": "\u20ac\u2028\ud800"})
    return path


def test_every_line_is_on_the_disk_at_once(path: Path) -> None:
    with JsonLines(path, RUN) as log:
        log.append({"index": 2})
        head, *lines = read_log(path)
    assert head == (f"{path}:1", path.read_bytes().splitlines(True)[0])
    assert lines[0] == (f"{path}:2", '{"index": 0, "text": "€\u2028?"}\n'.encode())
    assert lines[2] == (f"{path}:4", b'{"index": 2}\n')


def test_a_log_goes_on_after_its_last_whole_line_wherever_it_was_torn(
    path: Path,
) -> None:
    content = path.read_bytes()
    for length in range(len(content) + 1):
        path.write_bytes(content[:length])
        check_log(path, RUN)
        with JsonLines(path, RUN) as log:
            log.append({"index": 9})
        lines = path.read_bytes().splitlines(True)
        count = max(1, content[:length].count(b"\n"))
        assert lines[:count] == content.splitlines(True)[:count]
        assert lines[count:] == [b'{"index": 9}\n']


def test_later_results_are_cut_off_when_asked(path: Path) -> None:
    content = path.read_bytes().splitlines(True)
    for count in (2, 1, 0):
        with JsonLines(path, RUN) as log:
            log.keep(count)
        assert path.read_bytes() == b"".join(content[: count + 1])


@pytest.mark.parametrize(
    ("content", "settings", "named"),
    [
        (None, RUN | {"seed": 2}, "log.jsonl: seed was 1 and is 2 now; use the same"),
        (None, RUN | {"new": 0}, "log.jsonl: new was None and is 0 now"),
        (None, {"seed": 1, "sizes": (1, 2)}, "log.jsonl: versions was"),
        (None, RUN | {"versions": {"jax": "2"}}, "versions: jax was 'é' and is '2'"),
        ("a poem", RUN, "is no log of this command; give another output: its first"),
        ('{"seed": 1}\n', RUN, "first line holds no settings of a run"),
        ("[1]\n", RUN, "is no log of this command"),
        ("\n", RUN, "is no log of this command"),
    ],
)
def test_a_file_of_something_else_is_refused_and_stays(
    path: Path, content: str | None, settings: dict[str, Any], named: str
) -> None:
    torn = path.read_bytes() + b'{"index"' if content is None else content.encode()
    path.write_bytes(torn)
    refused(lambda: check_log(path, settings), named)
    refused(lambda: JsonLines(path, settings), named)
    assert path.read_bytes() == torn
    with JsonLines(path, settings, overwrite=True):
        assert len(list(read_log(path))) == 1


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path, tmp_path / "pipe"):
        refused(lambda place=place: JsonLines(place, RUN), "it is no file")
    refused(lambda: JsonLines(tmp_path / "nowhere" / "log", RUN), "No such file")


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_log_has_one_writer(path: Path, overwrite: bool) -> None:
    with JsonLines(path, RUN) as log:
        refused(
            lambda: JsonLines(path, RUN, overwrite=overwrite),
            "is being written by another process",
        )
        log.append({"index": 2})
    assert len(list(read_log(path))) == 4


def test_a_full_disk_ends_in_one_line(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with JsonLines(path, RUN) as log:
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(InputError, match=r"No space left .* free some space"):
            log.append({"index": 0})
