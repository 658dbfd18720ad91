"""Folders that appear whole or not at all."""

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import safetensors

from eagle_jax.checkpoints.outputs import unfinished
from eagle_jax.checkpoints.source import first_line
from eagle_jax.errors import InputError

try:
    import resource
except ImportError:  # Not on Windows, which has no such limits.
    resource = None


@contextlib.contextmanager
def new_folder(
    path: Path, *, overwrite: bool = False, is_ours: Callable[[Path], bool]
) -> Iterator[Path]:
    """Yields an empty folder that takes its name only when everything is in it.

    The folder yielded is a hidden sibling of `path`. It is renamed when the block
    ends, and removed if the block raises; what a process that is killed leaves behind
    under its hidden name, the next one removes. What `path` held before is moved aside
    first and deleted last.

    Args:
        path: Where the folder shall be.
        overwrite: Replace a folder that is there.
        is_ours: Says whether a folder holds what this program wrote and nothing
            else; no other folder is replaced, unless it is empty.

    Yields:
        The folder to write to.

    Raises:
        InputError: If `path` may not be replaced or cannot be written, or another
            process writes it.
    """
    check_new_folder(path, overwrite=overwrite, is_ours=is_ours)
    path = path.resolve()  # A link stays a link.
    try:
        with unfinished(path) as new:
            new.mkdir()
            # One that was moved aside may be back.
            check_new_folder(path, overwrite=overwrite, is_ours=is_ours)
            yield new
            _settle(new)
            # Somebody may have put files there meanwhile.
            check_new_folder(path, overwrite=overwrite, is_ours=is_ours)
            _replace(path, new)
    except OSError as error:
        raise InputError(
            f"cannot write {path}: {_reason(error, path)}; nothing was written"
        ) from error


def check_new_folder(
    path: Path, *, overwrite: bool, is_ours: Callable[[Path], bool]
) -> None:
    """Refuses an output folder before any long work starts.

    Args:
        path: As for `new_folder`.
        overwrite: As for `new_folder`.
        is_ours: As for `new_folder`.

    Raises:
        InputError: If `path` is a file, a folder that may not be replaced, or in a
            folder that does not exist or cannot be written to.
    """
    parent = path.resolve().parent
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
            f"{path} exists already; give another name, or --overwrite to replace it"
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
        if source.resolve().is_relative_to(output.resolve()):
            raise InputError(
                f"{output} is not replaced: {source} is read from it; give another name"
            )


def check_space(folder: Path, num_bytes: int, largest: int) -> None:
    """Refuses to start writing what the disk cannot take.

    Args:
        folder: To be written to.
        num_bytes: In all.
        largest: Of them, in one file.

    Raises:
        OSError: If fewer are free, or this process may not write so large a file.
    """
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        full = os.strerror(errno.ENOSPC)
        raise OSError(
            errno.ENOSPC, f"{full}: {num_bytes:,} bytes are needed, {free:,} are free"
        )
    if resource is None:
        return
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit != resource.RLIM_INFINITY and limit < largest:
        large = os.strerror(errno.EFBIG)
        raise OSError(
            errno.EFBIG,
            f"{large}: {largest:,} bytes are needed in one file, {limit:,} are allowed "
            "(ulimit -f)",
        )


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns the errors of libraries that write `path` into `OSError`.

    safetensors, torch and tensorstore have an error of their own each for a full
    disk, and torch's does not say so.
    """
    try:
        yield
    except (RuntimeError, ValueError, safetensors.SafetensorError) as error:
        full = os.strerror(errno.ENOSPC)
        if full in str(error):
            raise OSError(errno.ENOSPC, full) from error
        raise OSError(
            f"writing {path.name} failed ({first_line(error)}); is the disk full?"
        ) from error


def _settle(folder: Path) -> None:
    """Brings everything to the disk, with the permissions of ordinary new files."""
    umask = os.umask(0)
    os.umask(umask)
    for place, _, names in os.walk(folder):
        for name in names:
            file = Path(place, name)
            file.chmod(0o666 & ~umask)  # safetensors makes files private.
            _sync(file)
        _sync(Path(place))


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _replace(path: Path, new: Path) -> None:
    """Gives `new` the name `path`; what had that name is deleted afterwards."""
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


def _reason(error: OSError, path: Path) -> str:
    """Returns what went wrong; hidden names that are gone by now say nothing."""
    reason = error.strerror or first_line(error)
    named = str(error.filename or "")
    if named and f"/.{path.name}." not in named:
        reason = f"{reason} ({named})"
    return reason
