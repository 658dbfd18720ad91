"""Folders in object stores, here one in memory."""

import json
from pathlib import Path
from typing import Any

import chex
import fsspec
import numpy as np
import pytest
from safetensors.numpy import load_file

from eagle_jax.checkpoints import load_target, open_weights, resolve
from eagle_jax.models.transformer import TransformerParams
from tests.checkpoints.folders import SINGLE, store, take_weights
from tests.helpers import refused

_URL = "memory://bucket/models/target"
_UP = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture
def stored(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: Any
) -> Any:
    """The target in a store, as a whole or in shards, and what reads the store."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    store(target, take_weights(target), getattr(request, "param", "safetensors"))
    (target / "pytorch_model.bin").write_bytes(b"unsafe")
    files = fsspec.filesystem("memory")
    files.put(f"{target}/", f"{_URL}/", recursive=True)
    yield files
    files.rm(_URL, recursive=True)


@pytest.mark.parametrize("stored", ["safetensors", "shards"], indirect=True)
def test_a_folder_in_a_store_is_the_local_one(
    stored: Any, expected: TransformerParams
) -> None:
    folder = resolve(f"{_URL}/")
    assert folder.name == "target"
    assert not (folder / "pytorch_model.bin").exists()
    chex.assert_trees_all_equal(load_target(folder)[1], expected)
    config = json.loads(stored.cat_file(f"{_URL}/config.json")) | {"rope_theta": 7.0}
    stored.pipe_file(f"{_URL}/config.json", json.dumps(config).encode())
    stored.rm(f"{_URL}/tokenizer_config.json")
    assert resolve(_URL) == folder
    assert load_target(folder)[0].layer.rope.theta == 7.0
    assert not (folder / "tokenizer_config.json").exists()


def test_only_the_rows_of_a_part_are_read(
    stored: Any, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, read = open_weights(resolve(_URL)), stored.cat_file
    ranges: list[int] = []

    def counted(path: str, start: int, end: int) -> bytes:
        ranges.append(end - start)
        return read(path, start, end)

    monkeypatch.setattr(type(stored), "cat_file", staticmethod(counted))
    found = files.read(_UP, ((8, 24), (4, 20)))
    np.testing.assert_array_equal(found, load_file(target / SINGLE)[_UP][8:24, 4:20])
    assert ranges == [16 * 32 * 4]


def test_what_cannot_be_read_is_refused(stored: Any) -> None:
    refused(lambda: resolve("memory://bucket/other"), "memory://bucket/other cannot")
    refused(lambda: resolve("no-store://bucket/target"), "no-store", "extra gcs")
    whole = stored.cat_file(f"{_URL}/{SINGLE}")
    for content in (whole[:-1], whole[:40], b"", b"\2" + b"\0" * 7 + b"[]"):
        stored.pipe_file(f"{_URL}/{SINGLE}", content)
        refused(lambda: load_target(resolve(_URL)), "target")
    stored.rm(f"{_URL}/config.json")
    refused(lambda: resolve(_URL), "no config.json")
