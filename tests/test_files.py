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
from eagle_jax.files import (
    JsonLines,
    check_apart,
    new_folder,
    only_writer,
    unfinished,
    write_json,
    write_whole,
)
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


def test_a_second_writer_is_refused_until_the_first_is_done(tmp_path: Path) -> None:
    output, place = tmp_path / "out", tmp_path / "lock"
    with only_writer(output, place) as is_locked:
        assert is_locked
        message = f"{output} is being written by another process; wait for it"
        refused(lambda: only_writer(output, place).__enter__(), message)
        with only_writer(tmp_path / "other", tmp_path / "other lock"):
            pass
    with only_writer(output, place):
        pass
    assert not _names(tmp_path)


def test_a_writer_that_fails_makes_room_for_the_next(tmp_path: Path) -> None:
    output, place = tmp_path / "out", tmp_path / "lock"
    with pytest.raises(KeyError), only_writer(output, place):
        raise KeyError
    assert not _names(tmp_path)
    with only_writer(output, place):
        assert _names(tmp_path) == ["lock"]


def test_a_lock_on_a_name_that_was_removed_meanwhile_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, place = tmp_path / "out", tmp_path / "lock"
    flock, calls = fcntl.flock, []

    def last_holder_leaves(handle: int, operation: int) -> None:
        calls.append(handle)
        if len(calls) == 1:
            place.unlink()
        flock(handle, operation)

    monkeypatch.setattr(files.fcntl, "flock", last_holder_leaves)
    with only_writer(output, place):
        assert len(calls) == 2
        refused(lambda: only_writer(output, place).__enter__(), "another process")


def test_what_a_killed_writer_left_goes_with_the_next_one(tmp_path: Path) -> None:
    output = tmp_path / "curve.png"
    command = [sys.executable, "-c", HOLDER, str(output)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        refused(lambda: unfinished(output).__enter__(), "another process")
        holder.send_signal(signal.SIGKILL)
    assert len(_names(tmp_path)) == 2
    with unfinished(output) as part:
        part.write_text("whole")
        part.rename(output)
    assert _names(tmp_path) == ["curve.png"]
    assert output.read_text() == "whole"


def test_only_what_is_ours_is_removed(tmp_path: Path) -> None:
    for name in ("0123abcd.unfinished", "89abcdef.replaced"):
        (tmp_path / f".a[b].{name}").mkdir()
        (tmp_path / f".a[b].{name}" / "file").write_text("half")
    kept = [".a[b].txt", ".a[b].c.0123abcd.unfinished", ".ab.0123abcd.unfinished"]
    for name in (*kept, "a[b]"):
        (tmp_path / name).write_text("kept")
    with unfinished(tmp_path / "a[b]"):
        pass
    assert _names(tmp_path) == sorted([*kept, "a[b]"])


def test_an_output_that_a_killed_process_moved_aside_comes_back(tmp_path: Path) -> None:
    (tmp_path / ".pair.89abcdef.replaced").mkdir()
    (tmp_path / ".pair.89abcdef.replaced" / "weights").write_text("dear")
    (tmp_path / ".pair.89abcdef.unfinished").mkdir()
    with unfinished(tmp_path / "pair"):
        assert (tmp_path / "pair" / "weights").read_text() == "dear"
    assert _names(tmp_path) == ["pair"]


def test_without_locks_nothing_is_refused_and_nothing_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(files.fcntl, "flock", unknown)
    alive = ".a.0123abcd.unfinished"
    (tmp_path / alive).write_text("somebody may still write this")
    with unfinished(tmp_path / "a"), unfinished(tmp_path / "a") as second:
        second.write_text("mine")
    assert _names(tmp_path) == [alive]


def test_json_is_written_as_text_that_people_can_read(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    value = {"text": "Zoë €", "runs": [1, 2.5, None, True]}
    write_json(path, value)
    text = path.read_text(encoding="utf-8")
    assert json.loads(text) == value
    assert "Zoë €" in text
    assert text.endswith("}\n")
    assert list(tmp_path.iterdir()) == [path]


def test_an_output_has_the_usual_permissions(tmp_path: Path) -> None:
    usual = tmp_path / "usual"
    usual.touch()
    write_json(tmp_path / "out.json", {})
    modes = [stat.S_IMODE(p.stat().st_mode) for p in (usual, tmp_path / "out.json")]
    assert modes[0] == modes[1]


def test_no_other_thread_meets_another_umask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "umask", None)
    write_json(tmp_path / "out.json", {})
    with new_folder(tmp_path / "out", is_ours=lambda _: True) as folder:
        (folder / "file").touch()


def test_a_file_that_is_replaced_keeps_its_permissions(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.touch()
    link.symlink_to(file)
    for mode in (0o644, 0o600, 0o666):  # Of which the umask gives one at most.
        file.chmod(mode)
        write_json(link, {})
        assert stat.S_IMODE(file.stat().st_mode) == mode


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


def test_what_a_killed_process_left_of_a_file_goes_with_the_next(
    tmp_path: Path,
) -> None:
    (tmp_path / ".run.json.0123abcd.unfinished").write_text("{")
    write_json(tmp_path / "run.json", {"seed": 1})
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_names_that_are_no_unicode_are_written(tmp_path: Path) -> None:
    write_json(tmp_path / "file", {"draft": "\udcff", "also": "é"})
    assert json.loads((tmp_path / "file").read_text()) == {"draft": "?", "also": "é"}


def test_a_file_may_be_filled_by_a_function(tmp_path: Path) -> None:
    path = tmp_path / "picture"
    write_whole(path, lambda part: part.write_bytes(b"\x89"))
    assert path.read_bytes() == b"\x89"
    message = f"cannot write {tmp_path}/nowhere/x: No such file or directory; free some"
    refused(lambda: write_whole(tmp_path / "nowhere" / "x", ""), message)


def test_links_stay_links_and_pipes_stay_pipes(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("file")
    write_whole(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "text"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_whole(tmp_path / "pipe", "text")
    assert os.read(reader, 10) == b"text"
    os.close(reader)


@pytest.mark.parametrize(
    ("content", "kept", "last"),
    [
        (b"", b"", None),
        (b"{", b"", None),
        (b"\n", b"\n", b""),
        (b"1\n", b"1\n", b"1"),
        (b"1\n2\n[", b"1\n2\n", b"2"),
    ],
)
def test_lines_go_on_after_the_last_whole_one(
    tmp_path: Path, content: bytes, kept: bytes, last: bytes | None
) -> None:
    path = tmp_path / "lines"
    path.write_bytes(content)
    with JsonLines(path) as lines:
        assert lines.read() == content
        assert lines.go_on() == last
        lines.append({"a": "\u20ac\ud800"})
    assert path.read_bytes() == kept + '{"a": "\u20ac?"}\n'.encode()


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
    write_folder(folder, overwrite=True)
    assert content(folder) == "new" and _names(folder.parent) == ["out"]
    (folder / "ours.txt").unlink()
    refused(lambda: write_folder(folder), "exists already")
    write_folder(folder, overwrite=True)  # What is empty is nobody's.
    assert content(folder) == "new"


def test_a_folder_of_somebody_else_is_never_replaced(folder: Path) -> None:
    (folder / "notes.txt").write_text("do not lose me")
    named = (f"{folder} is not replaced", "holds something else")
    refused(lambda: write_folder(folder, overwrite=True), *named)
    assert _names(folder) == ["notes.txt", "ours.txt"] and content(folder) == "old"


def test_files_that_appear_meanwhile_are_not_lost(folder: Path) -> None:
    def write() -> None:
        settings = {"overwrite": True, "is_ours": lambda f: len(_names(f)) == 1}
        with new_folder(folder, **settings):
            (folder / "notes.txt").write_text("do not lose me")

    refused(write, "holds something else")
    assert (folder / "notes.txt").exists() and _names(folder.parent) == ["out"]


def test_a_place_that_no_folder_can_take_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    for name, why in [
        ("file", "it is no folder"),
        ("nowhere/head", "nowhere is no folder"),
        ("file/head", "file is no folder"),
    ]:
        path = tmp_path / name
        refused(lambda path=path: write_folder(path, overwrite=True), str(path), why)
    assert (tmp_path / "file").read_text() == "text"


def test_a_link_to_a_folder_stays_a_link(folder: Path) -> None:
    link = folder.with_name("link")
    link.symlink_to(folder.name)
    write_folder(link, overwrite=True)
    assert link.is_symlink() and content(folder) == "new"


@pytest.mark.parametrize("function", ["pathlib.Path.mkdir", "os.fsync"])
def test_a_full_disk_is_told_in_one_line_and_changes_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    def full(*_: object, **__: object) -> None:
        raise FULL

    monkeypatch.setattr(function, full)
    for path in (folder, folder.with_name("other")):
        refused(
            lambda path=path: write_folder(path, overwrite=True),
            *(f"cannot write {path}: No space left on device", "nothing was written"),
        )
    assert content(folder) == "old" and _names(folder.parent) == ["out"]


def test_the_old_folder_comes_back_where_the_new_one_cannot_take_its_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def refuse_new(path: Path, name: Path) -> Path:
        if path.suffix == ".unfinished":
            raise FULL
        return rename(path, name)

    monkeypatch.setattr(Path, "rename", refuse_new)
    refused(lambda: write_folder(folder, overwrite=True), "No space left")
    assert content(folder) == "old" and _names(folder.parent) == ["out"]


def test_the_old_folder_is_whole_until_the_new_one_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deleted, remove = [], shutil.rmtree

    def check_and_remove(path: Path, **fields: Any) -> None:
        if path.exists():
            deleted.append((path.suffix, content(path), content(folder)))
        remove(path, **fields)

    monkeypatch.setattr(files.shutil, "rmtree", check_and_remove)
    write_folder(folder, overwrite=True)
    assert deleted == [(".replaced", "old", "new")]


def test_a_folder_has_one_writer(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with new_folder(path, is_ours=lambda _: True):
        message = f"{path} is being written by another process"
        refused(lambda: write_folder(path), message)
    assert _names(tmp_path) == ["out"]


def test_what_is_read_from_is_not_replaced(folder: Path) -> None:
    refused(lambda: check_apart(folder, folder / "inner"), "is read from it")
    refused(lambda: check_apart(folder, folder), "is read from it")
    check_apart(folder / "inner", folder)


def test_files_of_a_folder_have_the_usual_permissions(folder: Path) -> None:
    usual = folder.with_name("usual")
    usual.touch()
    private = folder.with_name("private")
    with new_folder(private, is_ours=lambda _: True) as new:
        (new / "a").touch(mode=0o600)
    assert (private / "a").stat().st_mode == usual.stat().st_mode
