import collections
import dataclasses
import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from eagle_jax.errors import InputError
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


def _write(folder: Path, rows: PackedRows, **settings: Any) -> FeatureStore:
    defaults = {
        "compute": Target(),
        "target": "a",
        "batch_size": 2,
        "dtype": "float32",
        "rows_per_shard": 4,
    }
    return write_features(folder, rows, **(defaults | settings))


def _bytes(folder: Path) -> dict[str, bytes]:
    assert all(path.is_file() for path in folder.iterdir())
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("batch_size", [1, 2, 3, 4, 50])
def test_what_is_read_is_what_was_computed(tmp_path: Path, batch_size: int) -> None:
    rows = _rows()
    compute = Target()
    store = _write(tmp_path / "f", rows, compute=compute, batch_size=batch_size)
    assert len(rows) == 11
    chosen = np.array([7, 0, 10, 7, 3])
    np.testing.assert_array_equal(store.read(chosen), _expected(rows)[chosen])
    assert store.read(chosen).dtype == np.float32
    assert set(compute.sizes) == {batch_size}  # One compilation.
    names = [f"features-0000{n}.safetensors" for n in range(3)]
    assert sorted(_bytes(tmp_path / "f")) == [*names, "index.json"]
    shard = safetensors.numpy.load_file(tmp_path / "f" / names[2])
    np.testing.assert_array_equal(shard["features"], _expected(rows)[8:])


def test_padding_holds_zeros(tmp_path: Path) -> None:
    rows = _rows()
    assert rows.padding > 0
    found = _write(tmp_path, rows).read(np.arange(len(rows)))
    assert (found[rows.segments == 0] == 0).all()
    assert (found[rows.segments > 0] != 0).all()


@pytest.mark.parametrize(
    ("dtype", "kind"), [("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16)]
)
def test_features_are_kept_in_the_type_asked_for(
    tmp_path: Path, dtype: str, kind: type
) -> None:
    rows = _rows()
    found = _write(tmp_path, rows, dtype=dtype).read(np.arange(len(rows)))
    assert found.dtype == kind
    np.testing.assert_array_equal(found, _expected(rows).astype(kind))


def test_a_stopped_run_goes_on_and_ends_with_the_same_bytes(tmp_path: Path) -> None:
    rows = _rows()
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    _write(whole, rows)
    with pytest.raises(KeyboardInterrupt):
        _write(stopped, rows, compute=Target(fail_after=4))
    assert sorted(_bytes(stopped)) == ["features-00000.safetensors", "index.json"]
    refused(lambda: FeatureStore(stopped), "features-00001.safetensors is missing")
    compute, seen = Target(), []
    # Shards keep the size that they were begun with.
    _write(stopped, rows, compute=compute, rows_per_shard=3, progress=seen.append)
    assert len(compute.sizes) == 4
    assert seen == [4, 6, 8, 10, 11]
    assert _bytes(stopped) == _bytes(whole)
    compute = Target()
    _write(stopped, rows, compute=compute, batch_size=7)
    assert compute.sizes == []


def test_broken_shards_are_written_again_and_leftovers_go(tmp_path: Path) -> None:
    rows = _rows()
    _write(tmp_path, rows)
    before = _bytes(tmp_path)
    broken = tmp_path / "features-00001.safetensors"
    broken.write_bytes(broken.read_bytes()[:-8])
    small = {"features": np.zeros((3, LENGTH, WIDTH), np.float32)}
    safetensors.numpy.save_file(small, tmp_path / "features-00000.safetensors")
    (tmp_path / ".features-00001.safetensors.0123abcd.unfinished").write_bytes(b"half")
    refused(
        lambda: FeatureStore(tmp_path), "missing or broken; write the features again"
    )
    _write(tmp_path, rows)
    assert _bytes(tmp_path) == before


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"target": "b"}, "of another target, kind of head or"),
        ({"dtype": "float16"}, "stored in another type"),
        ({"dtype": "float16", "target": "a-float16"}, "stored in another type"),
        ({"rows": _rows(1)}, "of other data"),
        ({"rows": _rows(0, 12)}, "of other data"),
    ],
)
def test_features_of_something_else_are_refused_and_left_alone(
    tmp_path: Path, settings: dict[str, Any], named: str
) -> None:
    _write(tmp_path, _rows())
    before = _bytes(tmp_path)
    compute = Target()
    with pytest.raises(InputError, match=named) as error:
        _write(tmp_path, **({"rows": _rows(), "compute": compute} | settings))
    assert "remove it, or give another" in str(error.value) and compute.sizes == []
    assert _bytes(tmp_path) == before


def test_rows_with_other_segments_are_other_rows(tmp_path: Path) -> None:
    rows = _rows()
    _write(tmp_path, rows)
    halves = rows.segments + ((rows.positions > 1) & (rows.segments > 0))
    other = dataclasses.replace(rows, segments=halves)
    refused(lambda: FeatureStore(tmp_path, rows=other), "packed in another way")
    FeatureStore(tmp_path, rows=rows, target="a")
    refused(lambda: FeatureStore(tmp_path, target="b"), "of another target")


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    refused(lambda: FeatureStore(tmp_path), "holds no features")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"mine")
    refused(lambda: _write(tmp_path, _rows()), "no index.json, so they are no features")
    (tmp_path / "index.json").write_text(json.dumps({"weight_map": {}}))
    refused(lambda: _write(tmp_path, _rows()), "is no index of features")
    assert weights.read_bytes() == b"mine"
    refused(lambda: _write(weights / "below", _rows()), "cannot write")


def test_rows_that_are_not_there_cannot_be_read(tmp_path: Path) -> None:
    store = _write(tmp_path, _rows())
    for row in (-1, 11):
        with pytest.raises(IndexError, match=f"row {row} of 11"):
            store.read(np.array([0, row]))


def test_features_beyond_the_type_are_refused(tmp_path: Path) -> None:
    refused(
        lambda: _write(tmp_path, _rows(), compute=Target(scale=1e4), dtype="float16"),
        "beyond what float16 holds;",
        "bfloat16",
    )
    refused(
        lambda: _write(tmp_path, _rows(), compute=Target(scale=np.nan)), "not finite"
    )
    assert not list(tmp_path.iterdir())  # Another type may use the same folder.
    calls: list[float] = [1.0, 1.0, 1.0, 1e9]
    refused(
        lambda: _write(
            tmp_path,
            _rows(),
            compute=lambda rows: Target(scale=calls.pop(0))(rows),
            dtype="float16",
        ),
        "beyond what float16 holds",
    )
    assert "features-00001.safetensors" not in _bytes(tmp_path)


def test_features_of_another_shape_are_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="compute gave"):
        _write(tmp_path, _rows(), compute=lambda rows: np.zeros((1, LENGTH, WIDTH)))


def test_a_disk_that_is_too_small_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1, 1, 500))
    compute = Target()
    refused(
        lambda: _write(tmp_path, _rows(), compute=compute),
        "still need 0.0 GB",
        "are free",
    )
    assert len(compute.sizes) == 1 and not list(tmp_path.iterdir())


def test_a_disk_that_fills_up_ends_in_one_line_and_the_run_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = safetensors.numpy.save_file

    def full(*_: Any) -> None:
        raise safetensors.SafetensorError("No space left on device (os error 28)")

    monkeypatch.setattr(safetensors.numpy, "save_file", full)
    refused(lambda: _write(tmp_path, _rows()), "No space left", "free some space")
    monkeypatch.setattr(safetensors.numpy, "save_file", save)
    rows = _rows()
    found = _write(tmp_path, rows).read(np.arange(11))
    np.testing.assert_array_equal(found, _expected(rows))


def test_shards_have_the_usual_permissions(tmp_path: Path) -> None:
    usual = tmp_path / "usual"
    usual.write_text("")
    _write(tmp_path / "f", _rows())
    wanted = stat.S_IMODE(os.stat(usual).st_mode)
    for path in (tmp_path / "f").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == wanted
