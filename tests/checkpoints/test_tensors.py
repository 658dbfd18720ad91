"""Weights that are read in parts, for devices that each hold some."""

import os
from pathlib import Path
from typing import Any

import chex
import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding
from safetensors.numpy import load_file, save_file

from eagle_jax.checkpoints import load_target, tensors
from eagle_jax.checkpoints.load import load_params
from eagle_jax.checkpoints.tensors import open_safetensors
from eagle_jax.checkpoints.weights import TensorFiles, open_weights
from eagle_jax.errors import InputError
from tests.helpers import refused

_UP, _SINGLE = "model.layers.0.mlp.up_proj.weight", "model.safetensors"
_PART = (slice(8, 24), slice(0, 32))


def _rewrite(folder: Path, tensor: np.ndarray) -> None:
    path = folder / _SINGLE
    save_file(load_file(path) | {_UP: tensor}, path)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("part", [_PART, np.s_[0:48, 4:20], np.s_[40:48, 31:32]])
def test_a_part_is_a_slice_of_the_whole(
    target: Path, dtype: type, part: tuple[slice, ...]
) -> None:
    whole = load_file(target / _SINGLE)[_UP].astype(dtype)
    _rewrite(target, whole)
    shape, read = TensorFiles(target).parts(_UP)
    assert shape == (48, 32)
    assert read(part).dtype == whole.dtype
    np.testing.assert_array_equal(read(part), whole[part])


def test_parts_of_tensors_with_any_number_of_axes_are_read(tmp_path: Path) -> None:
    whole = np.arange(2 * 3 * 4 * 5, dtype=np.int32).reshape(2, 3, 4, 5)
    save_file({"whole": whole, "line": whole.ravel()}, tmp_path / "some.safetensors")
    stored = open_safetensors(tmp_path / "some.safetensors")
    for part in (np.s_[0:2, 1:3, 0:4, 0:5], np.s_[1:2, 0:3, 2:4, 0:5]):
        np.testing.assert_array_equal(stored["whole"].read_part(part), whole[part])
    np.testing.assert_array_equal(stored["line"].read_part((slice(7, 9),)), [7, 8])
    assert stored["whole"].read_part(np.s_[0:0, 0:3, 0:4, 0:5]).shape == (0, 3, 4, 5)


def test_parts_are_filled_from_all_blocks(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = load_target(target, "bfloat16")[1]
    monkeypatch.setattr(tensors, "_BLOCK_BYTES", 700)
    chex.assert_trees_all_equal(load_target(target, "bfloat16")[1], expected)
    mlp: Any = load_target(target)[1].layers[0].mlp
    np.testing.assert_array_equal(mlp.up, load_file(target / _SINGLE)[_UP].T)


def test_parts_with_the_same_rows_are_read_together() -> None:
    halves = [((0, 8), (0, 3)), ((0, 8), (3, 6))]
    assert list(tensors.blocks(halves, 4)) == [((0, 8), (0, 6))]
    apart = [((0, 4), (0, 6)), ((8, 12), (0, 6))]
    assert list(tensors.blocks(apart, 4)) == apart
    pieces = list(tensors.blocks([((0, 1000), (0, 2**20))], 2))
    assert pieces[0] == ((0, 2), (0, 2**20)) and len(pieces) == 500


def test_a_file_that_becomes_shorter_is_refused(target: Path) -> None:
    files = TensorFiles(target)
    path = target / _SINGLE
    os.truncate(path, path.stat().st_size // 2)
    for name in sorted(files.names()):
        try:
            files.read(name)
        except InputError as error:
            assert name in str(error) and "shorter" in str(error)
            break
    else:
        pytest.fail("nothing was refused")


def resident_bytes(name: str) -> int:
    """An entry of the process's status."""
    status = Path("/proc/self/status").read_text()
    return next(
        int(line.split()[1]) * 1024
        for line in status.splitlines()
        if line.startswith(f"{name}:")
    )


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_loading_takes_little_memory_beside_the_weights(tmp_path: Path) -> None:
    table = np.full((48_000, 1024), 0.5, ml_dtypes.bfloat16)
    # One is transposed as it is read, one is not.
    names = ("model.embed_tokens.weight", "lm_head.weight")
    save_file(dict.fromkeys(names, table), tmp_path / _SINGLE)
    shapes = [
        jax.ShapeDtypeStruct(shape, table.dtype)
        for shape in (table.shape, table.T.shape)
    ]
    jax.block_until_ready(jax.device_put(np.zeros(1)))  # Starts the devices.
    Path("/proc/self/clear_refs").write_text("5")  # Forgets the peak so far.
    before = resident_bytes("VmRSS")
    params = load_params(TensorFiles(tmp_path), [*names], shapes, table.dtype)
    jax.block_until_ready(params)
    peak = resident_bytes("VmHWM") - before
    share = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert share == 2 * table.nbytes
    assert 1 <= peak / share < 1.3


@pytest.mark.torch
def test_a_part_of_a_pickle_is_a_slice_of_the_whole(target: Path) -> None:
    import torch

    tensors = load_file(target / _SINGLE)
    table = {name: torch.from_numpy(tensors[name]).bfloat16() for name in tensors}
    torch.save(table, target / "pytorch_model.bin")
    (target / _SINGLE).unlink()
    shape, read = TensorFiles(target).parts(_UP)
    assert shape == (48, 32)
    whole = tensors[_UP].astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(read(_PART), whole[_PART])


def test_a_part_of_a_converted_pair_is_a_slice_of_the_whole(
    tiny_pair: Path, converted: Path
) -> None:
    shape, read = open_weights(converted / "target").parts(_UP)
    assert shape == (48, 32)
    whole = load_file(tiny_pair / "target" / _SINGLE)[_UP]
    np.testing.assert_array_equal(read(_PART), whole[_PART])


def test_each_part_is_checked_and_nothing_else_is_read(target: Path) -> None:
    whole = load_file(target / _SINGLE)[_UP]
    whole[30, 3] = np.nan
    _rewrite(target, whole)
    _, read = TensorFiles(target).parts(_UP)
    np.testing.assert_array_equal(read(_PART), whole[_PART])
    refused(lambda: read((slice(24, 48), slice(0, 32))), _UP, "NaN")


def test_weights_with_a_sharding_are_checked_as_those_without(target: Path) -> None:
    here = SingleDeviceSharding(jax.devices()[0])
    for dtype in ("float32", "bfloat16"):
        params = load_target(target, dtype, here)[1]
        chex.assert_trees_all_equal(params, load_target(target, dtype)[1])
        assert all(leaf.committed for leaf in jax.tree.leaves(params))
    whole = load_file(target / _SINGLE)[_UP]
    for wrong, named in (
        (whole[:40], "asks for (48, 32)"),
        (np.full_like(whole, np.inf), "NaN or infinite"),
        (whole.astype(np.int32), "quantized"),
    ):
        _rewrite(target, np.ascontiguousarray(wrong))
        refused(lambda: load_target(target, "float32", here), _UP, named)
    _rewrite(target, whole + np.float32(1e6))
    refused(lambda: load_target(target, "float16", here), _UP, "float16 cannot hold")
