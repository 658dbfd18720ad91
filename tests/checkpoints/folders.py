"""Folders of weights, changed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

Tensors = dict[str, np.ndarray]

SINGLE = "model.safetensors"


def take_weights(folder: Path) -> Tensors:
    """Reads the folder's weights and removes the file."""
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    return tensors


def change_config(folder: Path, **fields: Any) -> None:
    """Sets fields of a folder's `config.json`; `None` counts as left out."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def change_weights(folder: Path, **tensors: np.ndarray | None) -> None:
    """Sets tensors of a folder's file; `None` removes one, `__` stands for a dot."""
    path = next(folder.glob("*.safetensors"))
    stored = load_file(path)
    path.unlink()  # It may be mapped into memory.
    for name, tensor in tensors.items():
        stored.pop(name.replace("__", "."), None)
        if tensor is not None:
            stored[name.replace("__", ".")] = tensor
    save_file(stored, path)


def write_shards(
    folder: Path, tensors: Tensors, save: Callable[[Any, Path], object], kind: str
) -> Path:
    """Writes two shards and their index, and returns the index."""
    stem = "model" if kind == "safetensors" else "pytorch_model"
    ordered = sorted(tensors)
    weight_map = {}
    for number in (1, 2):
        part = ordered[number - 1 :: 2]
        shard = f"{stem}-{number:05d}-of-00002.{kind}"
        save({name: tensors[name] for name in part}, folder / shard)
        weight_map |= dict.fromkeys(part, shard)
    index = folder / f"{stem}.{kind}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


def save_bin(
    tensors: Tensors, path: Path, wrap: Callable[[Any], Any] = lambda x: x, **how: Any
) -> None:
    import torch

    def convert(tensor: np.ndarray) -> torch.Tensor:
        if tensor.dtype == ml_dtypes.bfloat16:  # torch takes none from NumPy.
            return torch.from_numpy(tensor.view(np.int16).copy()).view(torch.bfloat16)
        return torch.from_numpy(tensor.copy())

    torch.save({n: wrap(convert(tensors[n])) for n in tensors}, path, **how)


def store(folder: Path, tensors: Tensors, kind: str) -> None:
    """Writes the weights of a folder that has none, in one of `KINDS`."""
    if kind == "safetensors":
        save_file(tensors, folder / SINGLE)
    elif kind == "shards":
        write_shards(folder, tensors, save_file, "safetensors")
    elif kind == "bin":
        import torch

        save_bin(tensors, folder / "pytorch_model.bin", torch.nn.Parameter)
    elif kind == "bin of before torch 1.6":
        path = folder / "pytorch_model.bin"
        save_bin(tensors, path, _use_new_zipfile_serialization=False)
    else:
        write_shards(folder, tensors, save_bin, "bin")


_TORCH = ("bin", "bin of before torch 1.6", "shards of bin")
KINDS = (
    "safetensors",
    "shards",
    *(pytest.param(kind, marks=pytest.mark.torch) for kind in _TORCH),
)
