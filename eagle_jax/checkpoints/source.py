"""Where a checkpoint lies: a local folder, or a name on the Hugging Face hub."""

import os
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from eagle_jax.errors import InputError, first_line

_TEXT_FILES = ["*.json", "*.model", "*.jinja"]


def resolve(name: str) -> Path:
    """Returns the folder of a checkpoint, downloading it if it is a hub name.

    The hub's cache, `HF_HOME`, `HF_TOKEN` and `HF_HUB_OFFLINE` are honoured. Of
    safetensors and `.bin` weights only one kind is downloaded, safetensors first.

    Args:
        name: A local folder, or `owner/name`.

    Returns:
        A folder that holds `config.json`.

    Raises:
        InputError: If there is neither such a folder nor such a repository.
    """
    folder = Path(os.path.expanduser(name))  # Path's own raises for unknown users.
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise InputError(
                f"{name} holds no config.json; give the folder of a Hugging Face "
                "checkpoint"
            )
        return folder
    if folder.exists() or name.count("/") != 1 or name.startswith((".", "~", "/")):
        raise InputError(
            f"{name} is no folder; give the folder of a Hugging Face checkpoint or a "
            "hub name such as owner/name"
        )
    try:
        patterns = [*_TEXT_FILES, "model*.safetensors"]
        path = Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns))
        if not any(path.glob("model*.safetensors")):
            patterns = [*_TEXT_FILES, "pytorch_model*.bin"]
            path = Path(
                huggingface_hub.snapshot_download(name, allow_patterns=patterns)
            )
    except (OSError, HFValidationError, HfHubHTTPError) as error:
        raise InputError(
            f"{name} is neither a local folder nor to be had from the hub "
            f"({first_line(error)})"
        ) from error
    return resolve(str(path))


def file_inside(folder: Path, name: str, list_name: str) -> Path:
    """Returns a file that a list in a checkpoint names.

    It must lie in the checkpoint's folder, also behind links; those of the hub's cache
    lead from `snapshots/REVISION` to `blobs`, the only place outside.

    Args:
        folder: Of the checkpoint.
        name: What the list says, a path relative to the folder.
        list_name: Of the file that holds the list.

    Raises:
        InputError: If it lies elsewhere or is missing.
    """
    path = folder / name
    try:
        home, real = folder.resolve(), path.resolve()
        is_file = path.is_file()
    except (OSError, RuntimeError, ValueError) as error:
        raise InputError(f"{folder / list_name} names {name!r}: {error}") from error
    is_plain = not Path(name).is_absolute() and ".." not in Path(name).parts
    homes = [home]
    if home.parent.name == "snapshots":
        homes.append((home.parent.parent / "blobs").resolve())
    if not is_plain or not any(real.is_relative_to(place) for place in homes):
        raise InputError(
            f"{folder / list_name} names {name!r}, which lies outside the checkpoint's "
            "folder; put the file itself into the folder"
        )
    if not is_file:
        raise InputError(f"{path} is missing, but {list_name} names it")
    return path
