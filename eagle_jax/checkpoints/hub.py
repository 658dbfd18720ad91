"""Folders of checkpoints: where they lie, and what is in them.

Those in object stores (`gs://BUCKET/FOLDER`) are read through `fsspec`. Text files are
copied to a folder of the user's cache. Of weights each process reads the byte ranges of
its own devices; in the folder a file with their address stands for them.
"""

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eagle_jax.errors import InputError, first_line

CALIBRATION_FILE = "calibration.json"
"""The name of the calibration in a head's folder; `heads` describes it."""

WEIGHT_FILES = (
    ("model", "safetensors"),
    ("pytorch_model", "bin"),
    ("medusa_lm_head", "safetensors"),
    ("medusa_lm_head", "pt"),
    ("hydra_lm_head", "safetensors"),
    ("hydra_lm_head", "pt"),
)
"""The stems and suffixes of files of weights, the first that is there is read."""

# Settings, the tokenizer's files and the chat template.
_TEXT_FILES = ("*.json", "*.model", "*.jinja")
_SAFETENSORS = ("model*.safetensors", "*_lm_head.safetensors")
_PICKLES = ("pytorch_model*.bin", "*_lm_head.pt")

RangeReader = Callable[[int, int], bytes]
"""A function that returns a file's bytes from one place up to another."""

_MARK = b"# eagle_jax reads the file at this address.\n"


def resolve(name: str) -> Path:
    """Returns the folder of a checkpoint, downloading it if it is a hub name.

    The hub's cache, `HF_HOME`, `HF_TOKEN` and `HF_HUB_OFFLINE` are honoured. Of
    safetensors and pickled weights only one kind is downloaded, safetensors first.

    Args:
        name: A local folder, `owner/name`, or the address of a folder in an object
            store (`gs://BUCKET/FOLDER`), whose weights are read in ranges.

    Returns:
        A folder that holds `config.json`.

    Raises:
        InputError: If there is neither such a folder nor such a repository.
    """
    if "://" in name:
        return resolve(str(local_folder(name, _TEXT_FILES, _SAFETENSORS)))
    folder = Path(os.path.expanduser(name))  # Path's own raises for unknown users.
    if os.path.isdir(folder):  # `Path` raises for names that are too long.
        if not (folder / "config.json").is_file():
            raise InputError(
                f"{name} holds no config.json; give the folder of a Hugging Face "
                "checkpoint"
            )
        return folder
    is_hub_name = name.count("/") == 1 and not name.startswith((".", "~", "/"))
    if os.path.exists(folder) or not is_hub_name:
        raise InputError(
            f"{name} is no folder; give the folder of a Hugging Face checkpoint or a "
            "hub name such as owner/name"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
    )

    try:
        patterns = [*_TEXT_FILES, *_SAFETENSORS]
        path = Path(snapshot_download(name, allow_patterns=patterns))
        if not any(any(path.glob(pattern)) for pattern in _SAFETENSORS):
            patterns = [*_TEXT_FILES, *_PICKLES]
            path = Path(snapshot_download(name, allow_patterns=patterns))
    except GatedRepoError as error:
        raise InputError(
            f"{name} is gated: accept its terms at https://huggingface.co/{name}, and "
            "set HF_TOKEN to a token of that account"
        ) from error
    except (OSError, HFValidationError, HfHubHTTPError) as error:
        raise InputError(
            f"{name} is neither a local folder nor to be had from the hub "
            f"({first_line(error)})"
        ) from error
    return resolve(str(path))


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
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    digest = hashlib.sha256(url.encode()).hexdigest()[:16]
    folder = cache / "eagle_jax" / "remote" / digest / Path(url).name
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
