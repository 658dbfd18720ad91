"""Folders of checkpoints: where they lie, and what is in them."""

import os
from pathlib import Path

from eagle_jax.checkpoints.gguf_folder import gguf_folder
from eagle_jax.checkpoints.gguf_header import is_gguf, names_of_parts, parts_of
from eagle_jax.checkpoints.remote import local_folder
from eagle_jax.errors import InputError, first_line, shortened

CALIBRATION_FILE = "calibration.json"
"""The name of the calibration in a head's folder; `heads` describes it."""

VOCABULARY_FILE = "vocabulary.json"
"""The name of a head's own draft vocabulary in its folder, a list of token ids."""

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


def resolve(name: str) -> Path:
    """Returns the folder of a checkpoint, downloading it if it is a hub name.

    The hub's cache, `HF_HOME`, `HF_TOKEN` and `HF_HUB_OFFLINE` are honoured. Of
    safetensors and pickled weights only one kind is downloaded, safetensors first.

    Args:
        name: A local folder, `owner/name`, or the address of a folder in an object
            store (`gs://BUCKET/FOLDER`), whose weights are read in ranges. A GGUF file
            is named by its path, as `owner/name/FILE.gguf`, or by a folder that holds
            one; of several parts any one stands for all.

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
            if file := _only_gguf(folder):
                return gguf_folder(file)
            raise InputError(
                f"{name} holds no config.json; give the folder of a Hugging Face "
                "checkpoint"
            )
        return folder
    if is_gguf(folder) and os.path.isfile(folder):
        return gguf_folder(folder)
    depth = name.count("/")
    is_hub_name = depth > 1 if is_gguf(folder) else depth == 1
    is_local = name.startswith((".", "~", "/")) or os.path.exists(folder)
    if is_local or not is_hub_name:
        raise InputError(
            f"{name} is no {'file' if is_gguf(folder) else 'folder'}; give the folder "
            "of a Hugging Face checkpoint, a GGUF file, or a hub name: owner/name"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError

    try:
        if is_gguf(folder):
            owner, model, file = name.split("/", maxsplit=2)
            parts = names_of_parts(file)
            path = Path(snapshot_download(f"{owner}/{model}", allow_patterns=parts))
            return resolve(str(path / file))
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


def _only_gguf(folder: Path) -> Path | None:
    """Returns the GGUF model in a folder, the first file of it; `None` without one."""
    found = sorted(folder.glob("*.gguf"))
    whole = [path for path in found if path == parts_of(path)[0]]
    if len(whole) > 1:
        raise InputError(
            f"{folder} holds several GGUF files; give one of them: "
            f"{shortened([path.name for path in whole], 3)}"
        )
    return next(iter(whole), None)
