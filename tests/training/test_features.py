from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.training.features import cached_features
from eagle_jax.training.packing import PackedRows
from tests.helpers import refused

LENGTH, WIDTH, COUNT = 6, 4, 11


def _rows() -> PackedRows:
    tokens = np.arange(COUNT * LENGTH, dtype=np.int32).reshape(COUNT, LENGTH)
    ones = np.ones_like(tokens)
    return PackedRows(
        tokens=tokens, segments=ones, positions=ones, loss_mask=ones.astype(bool)
    )


class Target:
    """Computes features that name their token and column."""

    def __init__(self, dtype: str = "float32", fail_after: int = 99) -> None:
        self.sizes: list[int] = []
        self._dtype, self._left = jnp.dtype(dtype), fail_after

    def __call__(self, rows: PackedRows) -> np.ndarray:
        if not self._left:
            raise KeyboardInterrupt
        self._left -= 1
        self.sizes.append(len(rows))
        features = rows.tokens[..., None] + np.arange(WIDTH) / 16
        return features.astype(self._dtype)


def _kept(path: Path, compute: Target, **changes: Any) -> np.ndarray:
    given: dict[str, Any] = {"batch_size": 4, "dtype": "float32"}
    given |= {"progress": lambda done: None} | changes
    return cached_features(path, _rows(), compute, **given)


@pytest.mark.parametrize("batch_size", [1, 3, 4, 50])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_read_is_what_was_computed(
    tmp_path: Path, batch_size: int, dtype: str
) -> None:
    path, compute, seen = tmp_path / "features.npy", Target(dtype), []
    given: dict[str, Any] = {"batch_size": batch_size, "dtype": dtype}
    found = _kept(path, compute, progress=seen.append, **given)
    chosen = np.array([7, 0, 10, 7, 3])
    assert found.dtype == dtype
    np.testing.assert_array_equal(found[chosen], Target(dtype)(_rows())[chosen])
    assert set(compute.sizes) == {batch_size}  # One compilation.
    assert seen == sorted(seen) and seen[-1] == COUNT
    again = Target(dtype)
    np.testing.assert_array_equal(_kept(path, again, **given), found)
    assert again.sizes == []


def test_features_are_there_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "features.npy"
    with pytest.raises(KeyboardInterrupt):
        _kept(path, Target(fail_after=1))
    assert not path.exists()
    whole = _kept(path, Target())
    np.testing.assert_array_equal(whole, Target()(_rows()))
    path.write_bytes(path.read_bytes()[:-8])
    refused(lambda: _kept(path, Target()), str(path), "remove it and go on")
