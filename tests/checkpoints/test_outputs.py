"""One writer per output, and what dead writers left."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from eagle_jax.checkpoints import outputs
from eagle_jax.checkpoints.outputs import only_writer, unfinished
from tests.helpers import refused

# Takes a lock, says so, and waits to be killed.
HOLDER = """
import sys
from pathlib import Path
from eagle_jax.checkpoints.outputs import unfinished

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

    monkeypatch.setattr(outputs.fcntl, "flock", last_holder_leaves)
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

    monkeypatch.setattr(outputs.fcntl, "flock", unknown)
    alive = ".a.0123abcd.unfinished"
    (tmp_path / alive).write_text("somebody may still write this")
    with unfinished(tmp_path / "a"), unfinished(tmp_path / "a") as second:
        second.write_text("mine")
    assert _names(tmp_path) == [alive]
