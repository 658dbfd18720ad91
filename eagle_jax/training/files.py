"""Files that long runs leave behind: written whole, recognised when they go on."""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from eagle_jax import parsing
from eagle_jax.checkpoints.outputs import only_writer, unfinished
from eagle_jax.errors import InputError

LOCK = ".lock"
"""In the folder of a run that is being written."""


def write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Writes a file under a temporary name and renames it: whole or not at all.

    Args:
        path: Of the file; its folder exists.
        write: Fills the file that it is given.

    Raises:
        InputError: If the disk is full, the folder cannot be written to, or another
            process writes the file.
    """
    with writing(path), unfinished(path) as part:
        write(part)
        publish(part, path)


@contextlib.contextmanager
def writing_run(folder: Path) -> Iterator[None]:
    """Keeps other processes out of a run's folder, which is made if it is missing.

    If the block ends with nothing in the folders that were made for it, they go too.

    Args:
        folder: Of the run.

    Raises:
        InputError: If another process writes the run, or the folder cannot be made.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--output {folder} is no folder; give another name")
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        with contextlib.ExitStack() as stack:
            with writing(folder):
                folder.mkdir(parents=True, exist_ok=True)
                stack.enter_context(only_writer(folder, folder / LOCK))
            yield
    finally:
        with contextlib.suppress(OSError):
            for place in made:
                place.rmdir()


def publish(part: Path, path: Path) -> None:
    """Gives a finished temporary file its name, once it is on the disk.

    Args:
        part: In the same file system.
        path: What it becomes; replaced if it is there.
    """
    umask = os.umask(0)
    os.umask(umask)
    os.chmod(part, 0o666 & ~umask)  # safetensors makes files private.
    with part.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(part, path)


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file whole or not at all.

    Raises:
        InputError: As for `write_whole`.
    """
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    write_whole(path, lambda part: _write_text(part, text))


def read_json(path: Path) -> dict[str, Any] | None:
    """Returns a JSON object, or `None` where the file is missing or is none."""
    try:
        return parsing.read_json(path)
    except InputError:
        return None


def value_at(record: Any, *names: str) -> Any:
    """Returns what lies under these names, each inside the one before.

    `None` where there is nothing, or where something else than an object lies between.
    """
    for name in names:
        record = record.get(name) if isinstance(record, dict) else None
    return record


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns what goes wrong while a file is written into one clear line.

    Raises:
        InputError: For a full disk, a missing folder, missing rights and the like.
    """
    try:
        yield
    except OSError as error:
        raise InputError(
            f"cannot write {path}: {error.strerror or error}; free some space or give "
            "another place, then run the same command again: it goes on from there"
        ) from error


def fingerprint_file(path: Path) -> str:
    """Returns 32 hexadecimal digits for a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:32]


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
