"""Writing safely: whole files, whole folders, and lines that a later run goes on with.

A whole file or folder has a hidden name until it is on the disk. An output has one
writer at a time: its lock is advisory and the operating system's, which drops it with
the process that holds it, however that ends. The next writer removes leftovers of it.
"""

import contextlib
import glob
import hashlib
import json
import mmap
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Self

from eagle_jax.errors import InputError, first_line
from eagle_jax.parsing import resolved

try:
    import fcntl
except ImportError:  # Not on Windows; there nothing keeps two processes apart.
    fcntl = None

_HEX = "[0-9a-f]" * 8


def write_whole(path: Path, content: str | Callable[[Path], object]) -> None:
    """Writes a file whole or not at all; a pipe or a device is written to as it is.

    Args:
        path: The file, in a folder that exists. A link stays a link, a mode a mode.
        content: The text, or a function that fills the file that it is given.

    Raises:
        InputError: If the disk is full, the folder cannot be written to, or another
            process writes the file.
        OSError: If a pipe or a device does not take it.
    """

    def fill(place: Path) -> None:
        if isinstance(content, str):
            # A name that is no UTF-8 stands in Python's texts as half characters.
            place.write_text(content, encoding="utf-8", errors="replace")
        else:
            content(place)

    if is_special(path):
        return fill(path)
    with writing(path), unfinished(resolved(path)) as part:
        part.touch()
        mode = (path if path.exists() else part).stat().st_mode
        fill(part)
        _settle(part, mode)
        part.replace(resolved(path))


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file as `write_whole` does, and raises what that raises."""
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False)
    write_whole(path, text + "\n")


def append(path: Path, text: str) -> None:
    """Appends text to a file; the text is on the disk when this returns.

    Raises:
        OSError: If the disk is full.
    """
    with path.open("ab", buffering=0) as file:
        _append(file, text)


class JsonLines:
    """A file of JSON lines that one process at a time appends to.

    Whenever that process is killed, the next one goes on after the last whole line.
    """

    def __init__(self, path: Path) -> None:
        """Opens a file, new or old, in a folder that exists, and leaves it as it is.

        Raises:
            InputError: If it cannot be written, or another process writes it.
        """
        if path.exists() and not path.is_file():
            raise InputError(f"cannot write {path}: it is no file; give a file name")
        self.path = path
        with writing(path, goes_on=True), contextlib.ExitStack() as stack:
            self._file = stack.enter_context(resolved(path).open("a+b", buffering=0))
            _lock(self._file.fileno(), path)
            stack.pop_all()

    def read(self) -> bytes:
        """Returns all that the file holds."""
        self._file.seek(0)
        return self._file.read()

    def clear(self) -> None:
        """Begins the file again."""
        self._file.truncate(0)

    def go_on(self) -> bytes | None:
        """Cuts off what follows the last whole line, and returns that line.

        The file may be large: no other line is read. `None` where there is none.
        """
        if os.fstat(self._file.fileno()).st_size == 0:
            return None
        with mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            end = content.rfind(b"\n")
            start = content.rfind(b"\n", 0, max(end, 0)) + 1
            last = content[start:end] if end >= 0 else None
        self._file.truncate(end + 1)
        return last

    def append(self, record: dict[str, Any]) -> None:
        """Writes a line; the line is on the disk when this returns.

        Raises:
            InputError: If the disk is full.
        """
        line = json.dumps(record, ensure_ascii=False, allow_nan=False)
        with writing(self.path, goes_on=True):
            _append(self._file, line + "\n")

    def close(self) -> None:
        """Closes the file, so that another process may write it."""
        self._file.close()

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes the file."""
        self.close()


@contextlib.contextmanager
def new_folder(
    path: Path, *, overwrite: bool = False, is_ours: Callable[[Path], bool]
) -> Iterator[Path]:
    """Yields an empty folder that takes its name only when everything is in it.

    The folder yielded is a hidden sibling of `path`. It is renamed when the block
    ends, and removed if the block raises. What `path` held before is moved aside first
    and deleted last.

    Args:
        path: The folder to make.
        overwrite: Whether to replace a folder that is there.
        is_ours: A function that returns whether a folder holds only what this program
            wrote; no other folder is replaced, unless it is empty.

    Yields:
        The folder to write to.

    Raises:
        InputError: If `path` may not be replaced or cannot be written, or another
            process writes it.
    """
    check_new_folder(path, overwrite=overwrite, is_ours=is_ours)
    path = resolved(path)  # A link stays a link.
    try:
        with unfinished(path) as new:
            new.mkdir()
            # One that was moved aside may be back.
            check_new_folder(path, overwrite=overwrite, is_ours=is_ours)
            yield new
            _settle(new, new.stat().st_mode & 0o666)
            # Somebody may have put files there meanwhile.
            check_new_folder(path, overwrite=overwrite, is_ours=is_ours)
            _replace(path, new)
    except OSError as error:
        reason, named = error.strerror or first_line(error), str(error.filename or "")
        if named and f"/.{path.name}." not in named:  # Hidden names say nothing.
            reason = f"{reason} ({named})"
        raise InputError(
            f"cannot write {path}: {reason}; nothing was written"
        ) from error


def is_left_behind(name: str, outputs: Iterable[str]) -> bool:
    """Returns whether a killed writer may have left a file of this name by outputs."""
    return name.startswith(tuple(f".{one}." for one in outputs))


def check_new_folder(
    path: Path, *, overwrite: bool, is_ours: Callable[[Path], bool]
) -> None:
    """Refuses before any long work starts what `new_folder` would refuse.

    Raises:
        InputError: If `path` is a file, a folder that may not be replaced, or in a
            folder that does not exist or cannot be written to.
    """
    parent = resolved(path).parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise InputError(
            f"cannot write {path}: {parent} is no folder that can be written to"
        )
    if not path.exists():
        return
    if not path.is_dir():
        raise InputError(f"cannot write {path}: it is no folder; give another name")
    if not overwrite:
        raise InputError(
            f"{path} exists already; give another name, or `overwrite` to replace it"
        )
    if any(path.iterdir()) and not is_ours(path):
        raise InputError(
            f"{path} is not replaced: it holds something else than what this command "
            "wrote; remove it yourself or give another name"
        )


def check_apart(output: Path, *sources: Path) -> None:
    """Refuses to replace a folder that is read from.

    Raises:
        InputError: If `output` is or holds one of `sources`.
    """
    for source in sources:
        if resolved(source).is_relative_to(resolved(output)):
            raise InputError(
                f"{output} is not replaced: {source} is read from it; give another name"
            )


def fingerprint_file(path: Path) -> str:
    """Returns 32 hexadecimal digits for a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:32]


@contextlib.contextmanager
def writing(path: Path, *, goes_on: bool = False) -> Iterator[None]:
    """Turns an error that occurs while a file is written into one clear line.

    Raises:
        InputError: If the block fails; names `path` and whether the command `goes_on`.
    """
    try:
        yield
    except OSError as error:
        raise InputError(
            f"cannot write {path}: {error.strerror or error}; free some space or give "
            "another place, then run the same command again"
            + ": it goes on from there"
            * goes_on
        ) from error


@contextlib.contextmanager
def unfinished(path: Path) -> Iterator[Path]:
    """Yields a hidden name beside `path` for an output that is not to be seen yet.

    A file that still has the name when the block ends is removed. Before the block,
    the files of processes that died in such a block are removed; an output that one of
    them had moved aside comes back.

    Raises:
        InputError: If another process writes the output.
        OSError: If its folder cannot be written to.
    """
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.unfinished")
    with only_writer(path, path.with_name(f".{path.name}.lock")) as is_alone:
        if is_alone:
            _remove_dead(path)
        try:
            yield part
        finally:
            _remove(part)


@contextlib.contextmanager
def only_writer(output: Path, place: Path) -> Iterator[bool]:
    """Keeps other processes from writing an output while the block runs.

    Args:
        output: The output, which a refusal names.
        place: A file to lock, the same for all who write this output. It is there
            while the block runs; one that a dead process left hinders nobody.

    Yields:
        Whether the file is locked: not every file system can lock one.

    Raises:
        InputError: If another process writes the output.
        OSError: If `place` cannot be made.
    """
    if fcntl is None:
        yield False
        return
    handle, is_locked = _take(output, place)
    try:
        yield is_locked
    finally:
        place.unlink(missing_ok=True)
        os.close(handle)


def _take(output: Path, place: Path) -> tuple[int, bool]:
    """Returns the descriptor of the opened `place`, and whether it is locked."""
    while True:
        handle = os.open(place, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            is_locked = _lock(handle, output)
            # Who held it before has removed it: another process may lock a new one.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(handle), place.stat()):
                    return handle, is_locked
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _lock(handle: int, output: Path) -> bool:
    """Locks an open file until it is closed; returns whether the file system can.

    Raises:
        InputError: If another process has locked it, and so writes `output`.
    """
    if fcntl is None:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise InputError(
            f"{output} is being written by another process; wait for it, or give "
            "another output"
        ) from error
    except OSError:
        return False
    return True


def _append(file: Any, text: str) -> None:
    """Appends text to a file that is open without a buffer."""
    # A tokenizer may split a character: half of one is no Unicode text.
    left = text.encode(errors="replace")
    while left:
        left = left[file.write(left) :]
    os.fsync(file.fileno())


def _settle(path: Path, mode: int) -> None:
    """Brings a file or a folder to the disk; all files get the permissions `mode`."""
    for place in (*path.rglob("*"), path):
        if not place.is_dir():
            place.chmod(mode)  # safetensors makes files private.
        handle = os.open(place, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _replace(path: Path, new: Path) -> None:
    """Gives a folder the name `path`; the one that had it is deleted afterwards."""
    if not path.exists():
        new.rename(path)
        return
    old = new.with_suffix(".replaced")
    path.rename(old)
    try:
        new.rename(path)
    except BaseException:
        old.rename(path)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _remove_dead(path: Path) -> None:
    """Removes what dead processes left of an output that this process has locked."""
    prefix = f".{glob.escape(path.name)}.{_HEX}"
    for old in path.parent.glob(f"{prefix}.replaced"):
        if path.exists():
            _remove(old)
        else:  # Killed between two names.
            old.rename(path)
    for part in path.parent.glob(f"{prefix}.unfinished"):
        _remove(part)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def is_special(path: Path) -> bool:
    """Returns whether a path is a pipe or a device, which no file may replace."""
    return path.exists() and not path.is_file()
