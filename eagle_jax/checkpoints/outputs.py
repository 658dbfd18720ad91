"""An output has one writer at a time, and nothing of dead ones stays behind.

Locks are advisory and of the operating system, which drops them with the process that
holds them, however it ends.
"""

import contextlib
import glob
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from eagle_jax.errors import InputError

try:
    import fcntl
except ImportError:  # Not on Windows; there nothing keeps two processes apart.
    fcntl = None

_HEX = "[0-9a-f]" * 8


def lock(handle: int, output: Path) -> bool:
    """Keeps other processes from writing an output for as long as a file is open.

    Args:
        handle: Of the file, which stands for the output and is open for writing.
        output: What a refusal names.

    Returns:
        Whether it is locked: not every file system can.

    Raises:
        InputError: If another process writes the output.
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


@contextlib.contextmanager
def only_writer(output: Path, place: Path) -> Iterator[bool]:
    """Keeps other processes from writing an output while the block runs.

    Args:
        output: What a refusal names.
        place: A file to lock, the same for all who write this output. It is there
            while the block runs; one that a dead process left hinders nobody.

    Yields:
        Whether it is locked, see `lock`.

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


@contextlib.contextmanager
def unfinished(path: Path) -> Iterator[Path]:
    """Yields a hidden name beside `path` for what is not to be seen yet.

    The block makes a file or a folder of that name and renames it when it is whole;
    what still has the name when the block ends is removed. First of all goes what
    processes that died in such a block have left; an output that one of them had
    moved aside comes back.

    Args:
        path: Of the output, in a folder that exists.

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


def _take(output: Path, place: Path) -> tuple[int, bool]:
    """Returns the open file that is locked, and whether it is."""
    while True:
        handle = os.open(place, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            is_locked = lock(handle, output)
            # Who held it before has removed it: another process may lock a new one.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(handle), place.stat()):
                    return handle, is_locked
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _remove_dead(path: Path) -> None:
    """Removes what dead processes left of an output, which nobody else writes."""
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
