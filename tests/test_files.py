"""Files appear whole, outputs have one writer, and what dead writers left goes."""

import errno
import fcntl
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eagle_jax import files
from eagle_jax.files import check_apart, new_folder, unfinished, write_json, write_whole
from tests.helpers import refused

# Takes a lock, says so, and waits to be killed.
HOLDER = """
import sys
from pathlib import Path
from eagle_jax.files import unfinished

with unfinished(Path(sys.argv[1])) as part:
    part.write_text("half")
    print("locked", flush=True)
    sys.stdin.read()
"""


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_an_output_has_one_writer_however_that_ends(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with pytest.raises(KeyError), unfinished(output):
        message = f"{output} is being written by another process; wait for it"
        refused(lambda: unfinished(output).__enter__(), message)
        with unfinished(tmp_path / "other"):
            pass
        raise KeyError
    with unfinished(output):
        pass
    assert not _names(tmp_path)


def test_a_lock_on_a_name_that_was_removed_meanwhile_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, flock, calls = tmp_path / "out", fcntl.flock, []

    def last_holder_leaves(file: Any, operation: int) -> None:
        calls.append(file)
        if len(calls) == 1:
            (tmp_path / ".out.lock").unlink()
        flock(file, operation)

    monkeypatch.setattr(files.fcntl, "flock", last_holder_leaves)
    with unfinished(output):
        assert len(calls) == 2
        refused(lambda: unfinished(output).__enter__(), "another process")


def test_what_a_killed_writer_left_goes_with_the_next_one(tmp_path: Path) -> None:
    output = tmp_path / "curve.png"
    command = [sys.executable, "-c", HOLDER, str(output)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        refused(lambda: write_whole(output, "whole"), "another process")
        holder.send_signal(signal.SIGKILL)
    assert len(_names(tmp_path)) == 2
    write_whole(output, "whole")
    assert _names(tmp_path) == ["curve.png"] and output.read_text() == "whole"


def test_a_folder_that_a_killed_process_moved_aside_comes_back(tmp_path: Path) -> None:
    for name in (".pair.replaced", ".pair.unfinished", ".pair.b.unfinished"):
        (tmp_path / name).mkdir()
    (tmp_path / ".pair.replaced" / "weights").write_text("dear")
    with unfinished(tmp_path / "pair"):
        assert (tmp_path / "pair" / "weights").read_text() == "dear"
    assert _names(tmp_path) == [".pair.b.unfinished", "pair"]  # One is of `pair.b`.


def test_without_locks_nothing_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(files.fcntl, "flock", unknown)
    with unfinished(tmp_path / "a"), unfinished(tmp_path / "a"):
        pass


def test_json_is_written_as_text_that_people_can_read(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    write_json(path, {"text": "Zoë €", "runs": [1, 2.5, None, True], "draft": "\udcff"})
    text = path.read_text(encoding="utf-8")
    assert json.loads(text) == {
        "text": "Zoë €",
        "runs": [1, 2.5, None, True],
        "draft": "?",
    }
    assert "Zoë €" in text and text.endswith("}\n")
    assert list(tmp_path.iterdir()) == [path]


def test_permissions_are_the_usual_ones_or_those_of_the_file_replaced(
    tmp_path: Path,
) -> None:
    usual, file, link = (tmp_path / name for name in ("usual", "file", "link"))
    usual.touch()
    write_json(file, {})
    assert usual.stat().st_mode == file.stat().st_mode
    link.symlink_to(file)
    for mode in (0o644, 0o600, 0o666):  # Of which the umask gives one at most.
        file.chmod(mode)
        write_json(link, {})
        assert stat.S_IMODE(file.stat().st_mode) == mode
    with new_folder(tmp_path / "new", is_ours=lambda _: True) as new:
        (new / "a").touch(mode=0o600)
    assert (tmp_path / "new" / "a").stat().st_mode == usual.stat().st_mode


@pytest.mark.parametrize("value", [{"a": object()}, {"a": [1.0, float("nan")]}])
def test_a_value_that_is_no_json_leaves_the_old_file(
    tmp_path: Path, value: dict[str, Any]
) -> None:
    path = tmp_path / "out.json"
    path.write_text("old")
    with pytest.raises((TypeError, ValueError)):
        write_json(path, value)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_links_stay_links_and_pipes_stay_pipes(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("file")
    write_whole(tmp_path / "link", lambda part: part.write_bytes(b"\x89"))
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_bytes() == b"\x89"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_whole(tmp_path / "pipe", "text")
    assert os.read(reader, 10) == b"text"
    os.close(reader)
    message = f"cannot write {tmp_path}/nowhere/x: No such file or directory; free some"
    refused(lambda: write_whole(tmp_path / "nowhere" / "x", ""), message)


# Whole folders.

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def write_folder(path: Path, text: str = "new", *, overwrite: bool = False) -> None:
    """Writes a folder with one file, which tells that it is ours."""

    def is_ours(folder: Path) -> bool:
        return _names(folder) == ["ours.txt"]

    with new_folder(path, overwrite=overwrite, is_ours=is_ours) as folder:
        assert not path.exists() or overwrite
        (folder / "ours.txt").write_text(text)


def content(folder: Path) -> str:
    return (folder / "ours.txt").read_text()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_folder(tmp_path / "out", "old")
    return tmp_path / "out"


def test_a_folder_is_replaced_only_when_asked(folder: Path) -> None:
    refused(lambda: write_folder(folder), f"{folder} exists already")
    assert content(folder) == "old"
    link = folder.with_name("link")
    link.symlink_to(folder.name)
    write_folder(link, overwrite=True)
    assert link.is_symlink() and content(folder) == "new"
    (folder / "ours.txt").unlink()
    write_folder(folder, overwrite=True)  # What is empty is nobody's.
    assert content(folder) == "new" and _names(folder.parent) == ["link", "out"]


def test_a_folder_of_somebody_else_is_never_replaced(folder: Path) -> None:
    def write_beside() -> None:
        settings = {"overwrite": True, "is_ours": lambda f: len(_names(f)) == 1}
        with new_folder(folder, **settings):
            (folder / "notes.txt").write_text("do not lose me")

    refused(write_beside, "holds something else")
    refused(lambda: write_folder(folder, overwrite=True), f"{folder} is not replaced")
    assert _names(folder) == ["notes.txt", "ours.txt"] and content(folder) == "old"
    assert _names(folder.parent) == ["out"]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("file", "it is no folder"),
        ("nowhere/head", "nowhere is no folder"),
        ("file/head", "file is no folder"),
    ],
)
def test_a_place_that_no_folder_can_take_is_refused(
    tmp_path: Path, name: str, why: str
) -> None:
    (tmp_path / "file").write_text("text")
    path = tmp_path / name
    refused(lambda: write_folder(path, overwrite=True), str(path), why)
    assert (tmp_path / "file").read_text() == "text"


@pytest.mark.parametrize(
    "function", ["pathlib.Path.mkdir", "os.fsync", "pathlib.Path.rename"]
)
def test_a_full_disk_is_told_in_one_line_and_changes_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    rename = Path.rename

    def full(path: Any = None, *given: Any, **_: object) -> None:
        if function.endswith("rename") and path.suffix != ".unfinished":
            rename(path, *given)  # The old folder makes room, and comes back.
            return
        raise FULL

    with monkeypatch.context() as patch:
        patch.setattr(function, full)
        for path in (folder, folder.with_name("other")):
            refused(
                lambda path=path: write_folder(path, overwrite=True),
                f"cannot write {path}: No space left on device; free some space",
            )
    assert content(folder) == "old" and _names(folder.parent) == ["out"]


def test_the_old_folder_is_whole_until_the_new_one_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deleted, remove = [], shutil.rmtree

    def check_and_remove(path: Path, **fields: Any) -> None:
        deleted.append((path.suffix, content(path), content(folder)))
        remove(path, **fields)

    monkeypatch.setattr(files.shutil, "rmtree", check_and_remove)
    write_folder(folder, overwrite=True)
    assert deleted == [(".replaced", "old", "new")]


def test_what_is_read_from_is_not_replaced(folder: Path) -> None:
    refused(lambda: check_apart(folder, folder / "inner"), "is read from it")
    refused(lambda: check_apart(folder, folder), "is read from it")
    check_apart(folder / "inner", folder)
