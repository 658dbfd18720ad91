"""Weights that are read in parts, for devices that each hold some."""

import shutil
from pathlib import Path

import chex
import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding
from safetensors.numpy import load_file, save_file

from eagle_jax.checkpoints import load_target
from eagle_jax.checkpoints.store import open_weights
from eagle_jax.checkpoints.weights import TensorFiles
from tests.helpers import refused

_UP, _SINGLE = "model.layers.0.mlp.up_proj.weight", "model.safetensors"
_PART = (slice(8, 24), slice(0, 32))


@pytest.fixture
def target(tiny_pair: Path, tmp_path: Path) -> Path:
    """A copy of the tiny target to change."""
    return Path(shutil.copytree(tiny_pair / "target", tmp_path / "target"))


def _rewrite(folder: Path, tensor: np.ndarray) -> None:
    path = folder / _SINGLE
    save_file(load_file(path) | {_UP: tensor}, path)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_a_part_is_a_slice_of_the_whole(target: Path, dtype: type) -> None:
    whole = load_file(target / _SINGLE)[_UP].astype(dtype)
    _rewrite(target, whole)
    shape, read = TensorFiles(target).parts(_UP)
    assert shape == (48, 32)
    assert read(_PART).dtype == whole.dtype
    np.testing.assert_array_equal(read(_PART), whole[_PART])


def test_a_part_of_a_pickle_is_a_slice_of_the_whole(target: Path) -> None:
    torch = pytest.importorskip("torch")
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
