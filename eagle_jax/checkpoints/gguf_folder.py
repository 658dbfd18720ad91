"""A folder as on the Hugging Face hub that stands for a GGUF file.

It holds settings and the tokenizer in Hugging Face's files, and a link to the weights,
which are read where they lie. It is made once for each file, in the user's cache.
"""

import hashlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from eagle_jax.checkpoints.gguf_config import config_of, tensors_of
from eagle_jax.checkpoints.gguf_header import Gguf, parts_of, read_gguf
from eagle_jax.checkpoints.hf_config import target_config
from eagle_jax.checkpoints.remote import cache_folder
from eagle_jax.checkpoints.tensors import StoredTensor
from eagle_jax.errors import InputError, first_line
from eagle_jax.files import write_json

# Folders that another version has made are not used.
_VERSION = 1
_IDS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def gguf_folder(path: Path) -> Path:
    """Returns the folder that stands for a GGUF file, made unless it is there.

    Args:
        path: The file, of several parts any one.

    Raises:
        InputError: If the file holds no target that can be run, or is broken.
    """
    parts = parts_of(Path(os.path.abspath(path)))
    states = [(part, part.stat()) for part in parts]
    marks = [(f"{part}", state.st_size, state.st_mtime_ns) for part, state in states]
    digest = hashlib.sha256(repr((_VERSION, marks)).encode()).hexdigest()[:16]
    folder = cache_folder() / "eagle_jax" / "gguf" / digest / parts[0].stem
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(dir=folder.parent, prefix="."))
        try:
            _fill(new, read_gguf(parts))
            for part in parts:
                (new / part.name).symlink_to(part)
            new.rename(folder)
        except OSError as error:
            # Another process may have made it meanwhile.
            if not folder.is_dir():
                raise InputError(f"cannot write {new}: {error.strerror}") from error
        finally:
            shutil.rmtree(new, ignore_errors=True)
    return folder


def open_gguf(folder: Path) -> dict[str, StoredTensor] | None:
    """Returns the tensors of a folder's GGUF files by name; `None` without any."""
    found = sorted(folder.glob("*.gguf"))
    return tensors_of(read_gguf(parts_of(found[0]))) if found else None


def _fill(folder: Path, gguf: Gguf) -> None:
    """Writes what a file says as Hugging Face's files do."""
    config = config_of(gguf)
    write_json(folder / "config.json", config)
    write_json(
        folder / "generation_config.json", {"eos_token_id": config["eos_token_id"]}
    )
    try:
        target_config(folder)
    except InputError as error:
        told = f"{error}".replace(f"{folder / 'config.json'}", f"{gguf.path}")
        raise InputError(told) from error
    _write_tokenizer(folder, gguf)


def _write_tokenizer(folder: Path, gguf: Gguf) -> None:
    """Writes the tokenizer that a file describes, if it does, by transformers' rules.

    Raises:
        InputError: If there is none that transformers can make.
    """
    values = {
        name.removeprefix("tokenizer.ggml."): value
        for name, value in gguf.fields.items()
        if name.startswith("tokenizer.")
    }
    if values.get("model") in (None, "none", "no_vocab"):
        return
    try:
        from transformers import PreTrainedTokenizerFast

        rules: Any
        try:
            from transformers.integrations.gguf import gguf_tokenizer_mapping as rules
        except ImportError:  # Where they stood before 5.24.
            from transformers.integrations import ggml as rules

        names = rules.GGUF_TOKENIZER_MAPPING["tokenizer"].items()
        found = {theirs: values.get(key.removeprefix("ggml.")) for key, theirs in names}
        given = {name: value for name, value in found.items() if value is not None}
        arch, tokens = gguf.fields["general.architecture"], values["tokens"]
        backend, more = rules.convert_gguf_tokenizer(arch, given)
        more |= {
            name: None if (id_ := values.get(key)) is None else tokens[id_]
            for name, key in _IDS.items()
        }
        # Older files do not say it, and llama.cpp adds one to sentencepiece's.
        more["add_bos_token"] = values.get("add_bos_token", values["model"] == "llama")
        more["add_eos_token"] = values.get("add_eos_token", False)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **more)
        tokenizer.chat_template = values.get("tokenizer.chat_template")
        tokenizer.save_pretrained(folder)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # What Rust code ends in is no `Exception`.
        raise InputError(
            f"{gguf.path} holds no usable tokenizer: {first_line(error)}; a newer "
            "transformers may know it"
        ) from error
