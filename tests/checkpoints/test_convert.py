"""Conversions that are killed, find the disk full, or replace an earlier one."""

import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
import pytest

from eagle_jax import files
from eagle_jax.checkpoints import (
    convert_pair,
    open_weights,
    orbax_store,
    stored_dtype,
)
from tests.helpers import file_names, refused

_REPOSITORY = Path(__file__).resolve().parents[2]


class _Killed(BaseException):
    """Stands for a signal that nothing can catch."""


def _count_calls(
    monkeypatch: pytest.MonkeyPatch, place: Any, name: str, *, die_at: int
) -> list[int]:
    """Makes a function die on its n-th call, and returns a list with the count."""
    calls = [0]
    function = getattr(place, name)

    def counted(*args: Any, **fields: Any) -> Any:
        calls[0] += 1
        if calls[0] == die_at:
            raise _Killed
        return function(*args, **fields)

    monkeypatch.setattr(place, name, counted)
    return calls


@pytest.mark.parametrize(
    ("place", "name", "die_at", "unfinished"),
    [
        (orbax_store, "load_target", 1, None),
        (ocp.PyTreeCheckpointer, "save", 1, "target"),
        (orbax_store, "load_head", 1, None),
        (ocp.PyTreeCheckpointer, "save", 2, "head"),
        (files, "_settle", 1, None),
        (files, "_replace", 1, None),
    ],
)
def test_a_conversion_killed_anywhere_leaves_nothing_that_loads(
    tiny_pair: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: Any,
    name: str,
    die_at: int,
    unfinished: str | None,
) -> None:
    output = tmp_path / "pair"
    shutil.copytree(tiny_pair, tmp_path / "source")
    # Nothing cleans up after a process that is killed.
    monkeypatch.setattr(files.shutil, "rmtree", lambda *_, **__: None)
    calls = _count_calls(monkeypatch, place, name, die_at=die_at)
    with pytest.raises(_Killed):
        convert_pair(output, tmp_path / "source/target", tmp_path / "source/head")
    assert calls == [die_at]
    assert not output.exists()
    (left,) = (path for path in tmp_path.iterdir() if path.name != "source")
    assert left.name.startswith(".pair.")
    if unfinished is not None:
        refused(lambda: open_weights(left / unfinished), str(left / unfinished))


def test_a_killed_process_leaves_the_old_pair_and_the_next_one_nothing_else(
    converted: Path, tmp_path: Path
) -> None:
    output = Path(shutil.copytree(converted, tmp_path / "pair"))
    before = {name: (output / name).read_bytes() for name in file_names(output)}
    code = f"""
import os, signal
from pathlib import Path
from eagle_jax.checkpoints import convert_pair, orbax_store

orbax_store.write_json = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
source = Path({str(converted)!r})
convert_pair(Path({str(output)!r}), source / "target", overwrite=True)
"""
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=_REPOSITORY, capture_output=True, check=False
    )
    assert process.returncode == -signal.SIGKILL, process.stderr.decode()
    assert {name: (output / name).read_bytes() for name in file_names(output)} == before
    (left,) = tmp_path.glob(".pair.*.unfinished")
    assert (left / "target" / "params").is_dir()
    convert_pair(output, converted / "target", overwrite=True)
    assert list(tmp_path.iterdir()) == [output]


def test_what_the_disk_cannot_take_is_not_begun(
    tiny_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Orbax prints tracebacks of its own where it fills a disk.
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    calls = _count_calls(monkeypatch, ocp.PyTreeCheckpointer, "save", die_at=0)
    refused(
        lambda: convert_pair(tmp_path / "pair", tiny_pair / "target"),
        "No space left on device",
        "1,000 are free",
    )
    assert calls == [0]
    assert not list(tmp_path.iterdir())


def test_a_file_larger_than_allowed_is_not_begun(
    tiny_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1000, 1000))
    calls = _count_calls(monkeypatch, ocp.PyTreeCheckpointer, "save", die_at=0)
    refused(
        lambda: convert_pair(tmp_path / "pair", tiny_pair / "target"),
        "File too large",
        "1,000 are allowed (ulimit -f)",
    )
    assert calls == [0]
    assert not list(tmp_path.iterdir())


def test_what_orbax_cannot_write_is_told_in_one_line(
    tiny_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise ValueError("RESOURCE_EXHAUSTED: no space left\nand more lines")

    monkeypatch.setattr(ocp.PyTreeCheckpointer, "save", full)
    refused(
        lambda: convert_pair(tmp_path / "pair", tiny_pair / "target"),
        str(tmp_path / "pair"),
        "no space left); is the disk full?",
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", ["", "target"])
def test_a_folder_with_anything_else_is_never_replaced(
    tiny_pair: Path, converted: Path, tmp_path: Path, place: str
) -> None:
    output = Path(shutil.copytree(converted, tmp_path / "pair"))
    (output / place / "notes.txt").write_text("do not lose me")
    refused(
        lambda: convert_pair(output, tiny_pair / "target", overwrite=True),
        str(output),
        "holds something else",
    )
    assert (output / place / "notes.txt").read_text() == "do not lose me"


def test_a_pair_is_not_replaced_by_itself(converted: Path, tmp_path: Path) -> None:
    output = Path(shutil.copytree(converted, tmp_path / "pair"))
    for half in (None, output / "head"):
        source = converted if half else output
        refused(
            lambda source=source, half=half: convert_pair(
                output, source / "target", half, dtype="bfloat16", overwrite=True
            ),
            str(output),
            "is read from it",
        )
    assert stored_dtype(output / "target") == "float32"


def test_an_earlier_conversion_is_replaced_when_asked(
    tiny_pair: Path, converted: Path, tmp_path: Path
) -> None:
    output = Path(shutil.copytree(converted, tmp_path / "pair"))
    convert_pair(output, tiny_pair / "target", dtype="bfloat16", overwrite=True)
    assert stored_dtype(output / "target") == "bfloat16"
    assert not (output / "head").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["pair"]
