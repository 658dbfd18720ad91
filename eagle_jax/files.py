"""Writing safely: whole files and whole folders, by one process at a time.

Each has a hidden name until it is on the disk: a process that is killed at any moment
leaves the old one or the new one. Its lock is the operating system's, which drops it.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import jax

from eagle_jax.errors import InputError
from eagle_jax.parsing import resolved

try:
    import fcntl
except ImportError:  # Not on Windows; there nothing keeps two processes apart.
    fcntl = None


_KEPT: list[Path] = []


def keep_compiled_programs() -> None:
    """Keeps the programs that this process compiles on disk, as all commands do.

    They lie in `JAX_COMPILATION_CACHE_DIR`, or else in the user's cache folder; without
    either and without a home folder none are kept. Beside them lies which trees paid.
    """
    place = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if place is None:
        folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        if not os.path.isabs(folder):
            return
        place = str(Path(folder) / "eagle_jax")
        jax.config.update("jax_compilation_cache_dir", place)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    _KEPT[:] = [Path(place)]


def kept_folder() -> Path | None:
    """Returns where compiled programs are kept; `None` if they are not."""
    return _KEPT[0] if _KEPT else None


def write_whole(path: Path, content: str | Callable[[Path], object]) -> None:
    """Writes a file whole or not at all; a pipe or a device is written to as it is.

    Args:
        path: The file. A link stays a link, permissions stay as they are.
        content: The text, or a function that fills the file that it is given.
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


@contextlib.contextmanager
def new_folder(
    path: Path, *, overwrite: bool = False, is_ours: Callable[[Path], bool]
) -> Iterator[Path]:
    """Yields an empty folder that takes its name when the block has ended.

    Args:
        path: The folder to make; what it held before is deleted last.
        overwrite: Whether to replace a folder that is there.
        is_ours: A function that returns whether a folder holds only what this program
            wrote; no other folder is replaced, unless it is empty.
    """
    check_new_folder(path, overwrite=overwrite, is_ours=is_ours)
    path = resolved(path)  # A link stays a link.
    with writing(path), unfinished(path) as new:
        new.mkdir()
        yield new
        _settle(new, new.stat().st_mode & 0o666)
        # Somebody may have put files there meanwhile.
        check_new_folder(path, overwrite=overwrite, is_ours=is_ours)
        if path.exists():
            path.rename(_hidden(path, "replaced"))
        new.rename(path)


def check_new_folder(
    path: Path, *, overwrite: bool, is_ours: Callable[[Path], bool]
) -> None:
    """Refuses before any long work starts what `new_folder` would refuse."""
    parent = resolved(path).parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise InputError(f"cannot write {path}: {parent} is no folder to write to")
    if path.exists() and not path.is_dir():
        raise InputError(f"cannot write {path}: it is no folder; give another name")
    if path.is_dir() and not overwrite:
        raise InputError(f"{path} exists already; give another name, or `overwrite`")
    if path.is_dir() and any(path.iterdir()) and not is_ours(path):
        why = "it holds something else than what this command wrote; give another name"
        raise InputError(f"{path} is not replaced: {why}")


def check_apart(output: Path, *sources: Path) -> None:
    """Refuses an output that is, or holds, one of the files that are read."""
    for source in sources:
        if resolved(source).is_relative_to(resolved(output)):
            raise InputError(f"{output} is not replaced: {source} is read from it")


def is_left_behind(name: str, outputs: Iterable[str]) -> bool:
    """Returns whether a killed writer may have left a file of this name by outputs."""
    return name.startswith(tuple(f".{one}." for one in outputs))


def is_special(path: Path) -> bool:
    """Returns whether a path is a pipe or a device, which no file may replace."""
    return path.exists() and not path.is_file()


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an error that occurs while an output is written into one clear line."""
    try:
        yield
    except OSError as error:
        is_other = error.filename and path.name not in f"{error.filename}"
        reason = f"{error}" if is_other else error.strerror or f"{error}"
        advice = "free some space or give another place"
        raise InputError(f"cannot write {path}: {reason}; {advice}") from error


@contextlib.contextmanager
def unfinished(path: Path) -> Iterator[Path]:
    """Yields a hidden name beside an output, which no other process writes."""
    place = _hidden(path, "lock")
    with contextlib.ExitStack() as stack:
        while True:
            file = stack.enter_context(place.open("ab"))
            lock(file, path)
            # Who held it before has removed it: another process may lock a new one.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), place.stat()):
                    break
        stack.callback(place.unlink, missing_ok=True)
        stack.callback(_tidy, path)
        _tidy(path)
        yield _hidden(path, "unfinished")


def lock(file: IO[bytes], path: Path) -> None:
    """Locks the open file of an output until it is closed, where that can be done."""
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        why = "is being written by another process; wait for it, or give another output"
        raise InputError(f"{path} {why}") from error
    except OSError:
        return


def _hidden(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.{kind}")


def _tidy(path: Path) -> None:
    """Removes what a writer left; an output that it had moved aside comes back."""
    part, old = _hidden(path, "unfinished"), _hidden(path, "replaced")
    if old.exists() and not path.exists():
        old.rename(path)
    for place in (part, old):
        if place.is_dir():
            shutil.rmtree(place, ignore_errors=True)
        else:
            place.unlink(missing_ok=True)


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
