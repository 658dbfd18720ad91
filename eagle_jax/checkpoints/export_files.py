"""The files of an export, which appear whole or not at all."""

import collections
import dataclasses
import errno
import importlib.util
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from eagle_jax.checkpoints import names
from eagle_jax.checkpoints.hf_fields import DTYPES
from eagle_jax.checkpoints.hub import CALIBRATION_FILE, VOCABULARY_FILE, WEIGHT_FILES
from eagle_jax.checkpoints.load import convert
from eagle_jax.errors import InputError, first_line
from eagle_jax.files import is_left_behind, new_folder
from eagle_jax.parsing import read_json

WRITTEN_BY = "eagle_jax"
"""The value of `written_by` in an export, which may be replaced on request."""

Tensors = dict[str, np.ndarray]
"""Weights by tensor name, as files hold them."""

_CONFIG = "config.json"
# What an exported folder may hold; only weights and their settings are written here.
_NAMES = {
    _CONFIG,
    "generation_config.json",
    "tokenizer.json",
    *(f"{stem}.{suffix}" for stem, suffix in WEIGHT_FILES),
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    CALIBRATION_FILE,
    VOCABULARY_FILE,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Export:
    """How a folder of weights is written.

    Attributes:
        dtype: The dtype of the files: "float32", "bfloat16" or "float16".
        base_model: The name of the target, which the official code of heads of Medusa
            and Hydra loads.
        files: The names of the safetensors file and of the torch pickle.
        with_pickle: Whether to write the pickle where torch is installed.
        also: A function that is called with the unfinished folder, to add other files.
        overwrite: Whether to replace an earlier export.
    """

    dtype: str = "float32"
    base_model: str | None = None
    files: tuple[str, str] = ("model.safetensors", "pytorch_model.bin")
    with_pickle: bool = True
    also: Callable[[Path], object] | None = None
    overwrite: bool = False


def is_export(folder: Path) -> bool:
    """Returns whether a folder holds what is exported here and nothing else."""
    for path in folder.iterdir():
        is_known = path.name in _NAMES and not path.is_dir()
        if not is_known and not is_left_behind(path.name, [CALIBRATION_FILE]):
            return False
    try:
        return read_json(folder / _CONFIG).get("written_by") == WRITTEN_BY
    except InputError:
        return False


def copy_beside(source: Path) -> Callable[[Path], None]:
    """Returns a function that copies what lies beside a head's weights to a new one."""

    def copy(new: Path) -> None:
        for name in (CALIBRATION_FILE, VOCABULARY_FILE):
            if (source / name).is_file():
                shutil.copyfile(source / name, new / name)

    return copy


def has_torch() -> bool:
    """Returns whether torch can be imported, which pickles need."""
    return importlib.util.find_spec("torch") is not None


def host_tensors(
    params: Any, shapes: Any, table: dict[str, str], dtype: str
) -> Tensors:
    """Returns copies of weights as files hold them, checked against their sizes.

    Args:
        params: A pytree of the weights.
        shapes: A pytree of the shapes that they must have.
        table: The tensors' names, from `names`.
        dtype: The dtype of the copies: "float32", "bfloat16" or "float16".

    Raises:
        InputError: If weights are missing, unexpected, of the wrong shape or too large
            for `dtype`.
    """
    if dtype not in DTYPES:
        raise InputError(f"dtype = {dtype!r} must be one of {', '.join(DTYPES)}")
    given, wanted = (names.by_name(x, table) for x in (params, shapes))
    odd = sorted(set(given) ^ set(wanted))
    if odd:
        verb = "lack" if odd[0] in wanted else "hold unexpected"
        raise InputError(f"the weights {verb} {odd[0]}; they do not fit their sizes")
    tensors = {}
    for name, shape in wanted.items():
        tensor = np.asarray(given[name])
        if tensor.shape != shape.shape:
            raise InputError(
                f"{name} has shape {tensor.shape}, but its sizes ask for {shape.shape}"
            )
        for number, one in enumerate(tensor if "{}" in name else (tensor,)):
            # A copy in C order: torch wants memory that it may write to.
            one = np.array(one.T if names.is_transposed(name) else one, order="C")
            single = name.format(number)
            tensors[single] = convert(one, jnp.dtype(dtype), f"tensor {single}")
    return tensors


def write_export(
    folder: Path,
    fields: dict[str, Any],
    tensors: Tensors,
    config: Any,
    read_config: Callable[[Path], Any],
    how: Export,
) -> None:
    """Writes a folder of settings and weights, and reads the settings back.

    Args:
        folder: The folder to write.
        fields: The fields of `config.json`.
        tensors: The weights by tensor name.
        config: The sizes of the model.
        read_config: The function that reads them back from a folder.
        how: How it is written.

    Raises:
        InputError: If sizes are read back otherwise, or the folder cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    with new_folder(folder, overwrite=how.overwrite, is_ours=is_export) as unfinished:
        text = json.dumps(fields, indent=1) + "\n"
        (unfinished / _CONFIG).write_text(text, encoding="utf-8")
        safe, pickled = (unfinished / name for name in how.files)
        try:
            # transformers asks for this entry. A second one would come in any order.
            save_file(tensors, safe, metadata={"format": "pt"})
            if how.with_pickle and has_torch():
                _write_pickle(pickled, tensors)
        except (RuntimeError, ValueError, SafetensorError) as error:
            # Both have an error of their own for a full disk; torch's does not say so.
            why = first_line(error)
            full = os.strerror(errno.ENOSPC)
            text = full if full in why else f"{why}; is the disk full?"
            raise OSError(errno.ENOSPC, text) from error
        read = read_config(unfinished)
        if read != config:
            raise InputError(
                f"these settings cannot be exported: {_difference(config, read)}"
            )
        if how.also is not None:
            how.also(unfinished)


def _write_pickle(path: Path, tensors: Tensors) -> None:
    """Writes a state dict; torch stores the file's name in it, so that never varies."""
    import torch

    table = collections.OrderedDict()
    for name, tensor in tensors.items():
        if tensor.dtype == jnp.bfloat16:  # torch takes no bfloat16 from NumPy.
            table[name] = torch.from_numpy(tensor.view(np.int16)).view(torch.bfloat16)
        else:
            table[name] = torch.from_numpy(tensor)
    torch.save(table, path)


def _difference(config: Any, read: Any) -> str:
    """Returns what the first field that differs would be read as."""
    for field in dataclasses.fields(config):
        one, other = getattr(config, field.name), getattr(read, field.name)
        if one != other:
            if type(one) is type(other) and dataclasses.is_dataclass(one):
                return _difference(one, other)
            return f"{field.name} = {one!r} would be read as {other!r}"
    return "they would be read as those of another kind"
