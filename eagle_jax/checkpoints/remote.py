"""Folders in object stores (`gs://BUCKET/FOLDER`), read through `fsspec`.

Text files are copied to a folder of the user's cache. Of weights each process reads the
byte ranges of its own devices; in the folder a file with their address stands for them.
"""

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eagle_jax.errors import InputError, first_line

RangeReader = Callable[[int, int], bytes]
"""A function that returns a file's bytes from one place up to another."""

_MARK = b"# eagle_jax reads the file at this address.\n"


def cache_folder() -> Path:
    """Returns the folder of what can be made anew for a user."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def local_folder(url: str, texts: tuple[str, ...], weights: tuple[str, ...]) -> Path:
    """Returns a local folder that stands for a remote one, its text files copied anew.

    Args:
        url: The address of the remote folder.
        texts: Patterns of the names of text files.
        weights: Patterns of the names of files that are read in ranges.

    Raises:
        InputError: If the folder cannot be read.
    """
    url = url.rstrip("/")
    store, place = _open(url)
    digest = hashlib.sha256(url.encode()).hexdigest()[:16]
    folder = cache_folder() / "eagle_jax" / "remote" / digest / Path(url).name
    try:
        names = {Path(found).name for found in store.ls(place, detail=False)}
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("[!.]*"):
            if old.name not in names:
                old.unlink()
        for name in sorted(names):
            if any(Path(name).match(pattern) for pattern in weights):
                content = _MARK + f"{url}/{name}".encode()
            elif any(Path(name).match(pattern) for pattern in texts):
                content = store.cat_file(f"{place}/{name}")
            else:
                continue
            # Several processes of a machine may do this at once.
            with tempfile.NamedTemporaryFile(
                dir=folder, prefix=".", delete=False
            ) as file:
                file.write(content)
            os.replace(file.name, folder / name)
    except Exception as error:  # Each store has its own.
        raise InputError(f"{url} cannot be read: {first_line(error)}") from error
    return folder


def range_reader(path: Path) -> RangeReader | None:
    """Returns what reads the file that a local one stands for, `None` if none is."""
    with path.open("rb") as file:
        if file.read(len(_MARK)) != _MARK:
            return None
        url = file.read().decode()
    store, place = _open(url)

    def read(start: int, stop: int) -> bytes:
        try:
            return store.cat_file(place, start=start, end=stop)
        except Exception as error:
            raise OSError(f"{url}: {first_line(error)}") from error

    return read


def _open(url: str) -> tuple[Any, str]:
    """Returns what reads a store, and the place in it."""
    try:
        from fsspec.core import url_to_fs

        return url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise InputError(
            f"{url} cannot be read: {first_line(error)}; for gs:// install the extra "
            "gcs (pip install '.[gcs]')"
        ) from error
