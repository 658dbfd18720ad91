"""Where a checkpoint lies: a local folder, or a name on the Hugging Face hub."""

import json
import os
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from eagle_jax.errors import InputError

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


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        InputError: If the file is missing, broken or no object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise InputError(f"{path} holds no JSON object")
    return value


def first_line(error: Exception) -> str:
    """Returns what an error says in one line, its kind if it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
