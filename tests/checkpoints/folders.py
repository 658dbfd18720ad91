"""Folders of weights, changed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
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
    """Sets tensors of a folder; `None` removes one, `__` stands for a dot."""
    stored = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()  # It may be mapped into memory.
    for name, tensor in tensors.items():
        stored.pop(name.replace("__", "."), None)
        if tensor is not None:
            stored[name.replace("__", ".")] = tensor
    save_file(stored, folder / SINGLE)


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


def save_bin(tensors: Tensors, path: Path) -> None:
    import torch

    torch.save({k: torch.from_numpy(v.copy()) for k, v in tensors.items()}, path)


def add_padding(folder: Path) -> None:
    """Adds to a tiny target's tokenizer a token that its embedding has no row for."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    added = {"id": 300, "content": "<pad>", "special": True, "normalized": False}
    others = {"single_word": False, "lstrip": False, "rstrip": False}
    content["added_tokens"].append(added | others)
    path.write_text(json.dumps(content))
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pad_token": "<pad>"}))
