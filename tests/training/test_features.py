from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from eagle_jax.training.encode import EncodedExample
from eagle_jax.training.features import FeatureStore, write_features
from eagle_jax.training.packing import PackedRows, pack
from tests.helpers import refused

LENGTH, WIDTH = 6, 4


def _rows(seed: int = 0, count: int = 11) -> PackedRows:
    random = np.random.default_rng(seed)
    samples = [
        EncodedExample(
            tokens=random.integers(1, 200, size).astype(np.int32),
            loss_mask=np.ones(size, np.bool_),
        )
        for size in random.integers(4, LENGTH + 1, count)
    ]
    return pack(samples, LENGTH)


class Target:
    """Computes features that name their token, position and column."""

    def __init__(self, *, fail_after: int | None = None, scale: float = 1.0) -> None:
        self.sizes: list[int] = []
        self._left, self._scale = fail_after, scale

    def __call__(self, rows: PackedRows) -> np.ndarray:
        if self._left is not None:
            if self._left == 0:
                raise KeyboardInterrupt
            self._left -= 1
        self.sizes.append(len(rows))
        base = rows.tokens + rows.positions / 8
        return self._scale * (base[..., None] + np.arange(WIDTH) / 16)


def _expected(rows: PackedRows) -> np.ndarray:
    return np.where(rows.segments[..., None] > 0, Target()(rows), 0)


def _write(folder: Path, rows: PackedRows, **changes: Any) -> FeatureStore:
    given = {"compute": Target(), "settings": {"target": "a"}, "batch_size": 4}
    given |= {"progress": lambda done: None}
    return write_features(folder, rows, **(given | changes))


def _bytes(folder: Path) -> dict[str, bytes]:
    assert all(path.is_file() for path in folder.iterdir())
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("batch_size", [1, 2, 3, 4, 50])
def test_what_is_read_is_what_was_computed(tmp_path: Path, batch_size: int) -> None:
    rows, compute = _rows(), Target()
    store = _write(tmp_path, rows, compute=compute, batch_size=batch_size)
    assert len(rows) == 11
    chosen = np.array([7, 0, 10, 7, 3])
    np.testing.assert_array_equal(store.read(chosen), _expected(rows)[chosen])
    assert set(compute.sizes) == {batch_size}  # One compilation.
    last = (len(rows) - 1) // batch_size
    shard = safetensors.numpy.load_file(tmp_path / f"features-{last:05}.safetensors")
    wanted = _expected(rows)[last * batch_size :]
    np.testing.assert_array_equal(shard["features"], wanted)


@pytest.mark.parametrize("kind", [np.float32, ml_dtypes.bfloat16])
def test_features_are_kept_in_the_type_that_they_are_computed_in(
    tmp_path: Path, kind: type
) -> None:
    rows = _rows()
    store = _write(tmp_path, rows, compute=lambda rows: Target()(rows).astype(kind))
    found = store.read(np.arange(len(rows)))
    assert found.dtype == kind
    np.testing.assert_array_equal(found, _expected(rows).astype(kind))


def test_a_stopped_run_goes_on_and_ends_with_the_same_bytes(tmp_path: Path) -> None:
    rows = _rows()
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    _write(whole, rows)
    with pytest.raises(KeyboardInterrupt):
        _write(stopped, rows, compute=Target(fail_after=1))
    assert sorted(_bytes(stopped)) == ["features-00000.safetensors", "features.jsonl"]
    half = stopped / ".features-00001.safetensors.unfinished"
    half.write_bytes(b"half")
    compute, seen = Target(), []
    _write(stopped, rows, compute=compute, progress=seen.append)
    assert len(compute.sizes) == 2
    assert seen == [4, 8, 11]
    assert _bytes(stopped) == _bytes(whole)
    compute = Target()
    _write(stopped, rows, compute=compute)
    assert compute.sizes == []


@pytest.mark.parametrize("broken", [b"", None])
def test_a_broken_file_is_named(tmp_path: Path, broken: bytes | None) -> None:
    store = _write(tmp_path, _rows())
    path = tmp_path / "features-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-8] if broken is None else broken)
    refused(lambda: store.read(np.array([5])), str(path), "remove its folder and go on")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"settings": {"target": "b"}}, "target was 'a' and is 'b' now"),
        ({"rows": _rows(0, 14)}, "rows was [11, 6] and is [14, 6] now"),
        ({"batch_size": 3}, "batch_size was 4 and is 3 now"),
    ],
)
def test_features_of_something_else_are_refused_and_left_alone(
    tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    _write(tmp_path, _rows())
    before, compute = _bytes(tmp_path), Target()
    given = {"rows": _rows(), "compute": compute} | change
    refused(lambda: _write(tmp_path, **given), named)
    assert compute.sizes == [] and _bytes(tmp_path) == before


def test_features_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    broken = Target(scale=np.nan)
    refused(lambda: _write(tmp_path, _rows(), compute=broken), "not finite")
    assert not list(tmp_path.glob("*.safetensors"))
