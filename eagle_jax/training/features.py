"""The target's features of all training rows, computed once and kept on disk.

A folder holds `index.json` and `features-00000.safetensors` and so on, each with one
tensor `features` `[rows, T, F]`. Shards are written whole, so a run that was stopped
goes on with the first one that is missing.
"""

import dataclasses
import functools
import hashlib
import shutil
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import ml_dtypes
import numpy as np

from eagle_jax.checkpoints.tensors import saving
from eagle_jax.errors import InputError
from eagle_jax.files import write_json, write_whole, writing
from eagle_jax.parallel import wait_for_all
from eagle_jax.parsing import read_json_if_any
from eagle_jax.training.packing import PackedRows

FeatureDtype = Literal["float16", "bfloat16", "float32"]
"""Names of the types that features are stored in; float16 is the published heads'."""

_DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
}
_SHARD_BYTES = 1 << 30
_SPARE_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Index:
    """The content of `index.json`.

    Attributes:
        rows: The fingerprint of the rows.
        target: The fingerprint of the target.
        num_rows: The number of rows, `R`.
        length: The number of tokens per row, `T`.
        width: The width of the features, `F`.
        dtype: The type of the features.
        rows_per_shard: The number of rows in every shard but the last.
    """

    rows: str
    target: str
    num_rows: int
    length: int
    width: int
    dtype: str
    rows_per_shard: int

    @property
    def num_shards(self) -> int:
        return -(-self.num_rows // self.rows_per_shard)

    def shard_rows(self, shard: int) -> range:
        start = shard * self.rows_per_shard
        return range(start, min(start + self.rows_per_shard, self.num_rows))

    @property
    def row_bytes(self) -> int:
        return self.length * self.width * _DTYPES[self.dtype].itemsize


def fingerprint_rows(rows: PackedRows) -> str:
    """Returns 32 hexadecimal digits for the rows' tokens and segments."""
    digest = hashlib.sha256(str(rows.tokens.shape).encode())
    for array in (rows.tokens, rows.segments):
        digest.update(np.ascontiguousarray(array, np.int32).tobytes())
    return digest.hexdigest()[:32]


def write_features(
    folder: Path,
    rows: PackedRows,
    compute: Callable[[PackedRows], Any],
    *,
    target: str,
    batch_size: int,
    dtype: FeatureDtype = "float16",
    rows_per_shard: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> "FeatureStore":
    """Computes what a folder still lacks of the rows' features, and opens it.

    Of several processes, which share the folder, all compute and the first one writes.

    Args:
        folder: The folder, which is made if it is missing.
        rows: The rows, `[R, T]` fields.
        compute: A function from `batch_size` rows to their features, `[batch_size, T,
            F]`; it is always called with that many, so that it is compiled once.
        target: The fingerprint of the target that computes the features.
        batch_size: The number of rows of a call of `compute`, `B`.
        dtype: The type that features are stored in.
        rows_per_shard: The number of rows per shard; `None` for about a gigabyte. A
            folder that is gone on with keeps its own.
        progress: Called with the number of rows done, at the start and after each
            batch.

    Returns:
        The store.

    Raises:
        InputError: If the folder holds features of other rows, another target or
            another type, the disk is too small, or features do not fit the type.
    """
    is_first = jax.process_index() == 0
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    check_features(folder, rows, target=target, dtype=dtype)
    index = _read_index(folder)
    is_new = index is None
    if index is None:
        first = _compute(rows, range(min(batch_size, len(rows))), compute, batch_size)
        _cast(first, dtype)  # Features that do not fit must not claim the folder.
        wanted = _wanted(rows, target, dtype)
        index = _new_index(wanted, first.shape, dtype, rows_per_shard)
    missing = [s for s in range(index.num_shards) if not _is_complete(folder, index, s)]
    _check_space(folder, index, missing)
    wait_for_all("all have seen which features are missing")
    if is_new and is_first:
        write_json(folder / "index.json", dataclasses.asdict(index))
    done = sum(len(index.shard_rows(s)) for s in range(index.num_shards))
    done -= sum(len(index.shard_rows(s)) for s in missing)
    report = progress or (lambda done: None)
    report(done)
    for shard in missing:
        numbers = index.shard_rows(shard)
        features = np.empty((len(numbers), index.length, index.width), _DTYPES[dtype])
        for start in range(0, len(numbers), batch_size):
            some = numbers[start : start + batch_size]
            found = _compute(rows, some, compute, batch_size)
            features[start : start + len(some)] = _cast(found, dtype)
            report(done + start + len(some))
        done += len(numbers)
        if is_first:
            write_whole(_shard_path(folder, shard), functools.partial(_save, features))
    wait_for_all("all features are written")
    return FeatureStore(folder, rows=rows, target=target)


def check_features(
    folder: Path, rows: PackedRows, *, target: str, dtype: FeatureDtype
) -> None:
    """Refuses a folder that `write_features` cannot go on with, before any is computed.

    Args:
        folder: The folder, which need not be there.
        rows: The rows, `[R, T]` fields.
        target: The fingerprint of the target that computes the features.
        dtype: The type that features are stored in.

    Raises:
        InputError: If the folder holds features of other rows, another target or
            another type, or tensors that are no features.
    """
    index = _read_index(folder)
    if index is not None:
        _check_same(folder, index, _wanted(rows, target, dtype))
    elif next(folder.glob("*.safetensors"), None) is not None:
        raise InputError(
            f"{folder} holds .safetensors files but no index.json, so they are no "
            "features written here; give another folder"
        )


def _wanted(rows: PackedRows, target: str, dtype: FeatureDtype) -> dict[str, Any]:
    """Returns what the index of these rows' features says of them."""
    return {
        "dtype": dtype,  # First: the target's print may name it, too.
        "rows": fingerprint_rows(rows),
        "target": target,
        "num_rows": len(rows),
        "length": int(rows.tokens.shape[1]),
    }


class FeatureStore:
    """The features of a folder, read from disk as they are asked for."""

    def __init__(
        self, folder: Path, *, rows: PackedRows | None = None, target: str | None = None
    ) -> None:
        """Opens a complete folder.

        Args:
            folder: The folder that `write_features` filled.
            rows: The rows that the features must be of; `None` for any.
            target: The fingerprint of the target that must have computed them; `None`
                for any.

        Raises:
            InputError: If there is no such folder, it is not complete, or it is of
                other rows or another target.
        """
        index = _read_index(folder)
        if index is None:
            raise InputError(
                f"{folder} holds no features (no index.json); write them first"
            )
        wanted: dict[str, Any] = {} if target is None else {"target": target}
        if rows is not None:
            wanted |= {"rows": fingerprint_rows(rows), "num_rows": len(rows)}
        _check_same(folder, index, wanted)
        for shard in range(index.num_shards):
            if not _is_complete(folder, index, shard):
                raise InputError(
                    f"{folder}: {_shard_path(folder, shard).name} is missing or "
                    "broken; write the features again, which completes them"
                )
        self._index = index
        self._shards = [
            _open_shard(_shard_path(folder, shard)) for shard in range(index.num_shards)
        ]

    def read(self, row_indices: np.ndarray) -> np.ndarray:
        """Reads some rows.

        Args:
            row_indices: `[B]` int, each in 0 .. `R - 1`.

        Returns:
            The features, `[B, T, E]` in the stored type; 0 in padding.
        """
        index = self._index
        found = np.empty(
            (len(row_indices), index.length, index.width), _DTYPES[index.dtype]
        )
        for place, row in enumerate(np.asarray(row_indices).tolist()):
            if not 0 <= row < index.num_rows:  # -1 would be a row, but not this one.
                raise IndexError(f"row {row} of {index.num_rows}")
            shard, offset = divmod(row, index.rows_per_shard)
            found[place] = self._shards[shard][offset : offset + 1][0]
        return found


def _new_index(
    wanted: dict[str, Any],
    shape: tuple[int, ...],
    dtype: FeatureDtype,
    rows_per_shard: int | None,
) -> _Index:
    """Returns the index of a new folder."""
    row_bytes = shape[1] * shape[2] * _DTYPES[dtype].itemsize
    if rows_per_shard is None:
        rows_per_shard = max(1, _SHARD_BYTES // row_bytes)
    return _Index(**wanted, width=int(shape[2]), rows_per_shard=rows_per_shard)


def _compute(
    rows: PackedRows,
    numbers: range,
    compute: Callable[[PackedRows], Any],
    batch_size: int,
) -> np.ndarray:
    """Returns the features of up to `batch_size` rows, 0 in padding."""
    padded = np.resize(np.array(numbers), batch_size)
    features = np.asarray(compute(rows[padded]))
    expected = (batch_size, rows.tokens.shape[1])
    if features.ndim != 3 or features.shape[:2] != expected:
        raise ValueError(f"compute gave {features.shape}, not [*{expected}, E]")
    is_token = rows.segments[numbers.start : numbers.stop, :, None] > 0
    return np.where(is_token, features[: len(numbers)], 0)


def _cast(features: np.ndarray, dtype: FeatureDtype) -> np.ndarray:
    """Returns features in the type that they are stored in, if that can hold them."""
    with np.errstate(over="ignore"):
        cast = features.astype(_DTYPES[dtype])
    if not np.isfinite(cast.astype(np.float32)).all():
        if np.isfinite(features.astype(np.float32)).all():
            raise InputError(
                f"the target's features go beyond what {dtype} holds; store them as "
                "bfloat16 or float32, in a new folder"
            )
        raise InputError(
            "the target's features are not finite; it is broken, or its type is too "
            "narrow for it: try another dtype"
        )
    return cast


def _save(features: np.ndarray, path: Path) -> None:
    from safetensors.numpy import save_file

    with saving(path):
        save_file({"features": features}, path)


def _open_shard(path: Path) -> Any:
    """Returns a shard that reads from disk only what is sliced out of it."""
    from safetensors import safe_open

    return safe_open(path, "np").get_slice("features")


def _is_complete(folder: Path, index: _Index, shard: int) -> bool:
    """Returns whether a shard is there; one of another size is not."""
    from safetensors import SafetensorError

    path = _shard_path(folder, shard)
    if not path.is_file():
        return False
    try:
        shape = _open_shard(path).get_shape()
    except (OSError, SafetensorError):
        return False
    return list(shape) == [len(index.shard_rows(shard)), index.length, index.width]


def _shard_path(folder: Path, shard: int) -> Path:
    return folder / f"features-{shard:05}.safetensors"


def _read_index(folder: Path) -> _Index | None:
    """Returns a folder's index, `None` where there is none."""
    path = folder / "index.json"
    if not path.exists():
        return None
    table, kinds = read_json_if_any(path) or {}, typing.get_type_hints(_Index)
    is_index = table.keys() == kinds.keys() and all(
        type(table[name]) is kind and (kind is str or table[name] > 0)
        for name, kind in kinds.items()
    )
    if not is_index or table["dtype"] not in _DTYPES:
        raise InputError(f"{path} is no index of features; give another folder")
    return _Index(**table)


def _check_same(folder: Path, index: _Index, wanted: dict[str, Any]) -> None:
    """Refuses a folder of other rows, another target or another type."""
    labels = {
        "rows": "of other data, or packed in another way",
        "num_rows": "of other data, or packed in another way",
        "length": "of rows of another length",
        "target": "of another target, kind of head or feature layers",
        "dtype": "stored in another type",
    }
    for name, value in wanted.items():
        if getattr(index, name) != value:
            raise InputError(
                f"{folder} holds features {labels[name]}; remove it, or give another "
                "folder"
            )


def _check_space(folder: Path, index: _Index, shards: Any) -> None:
    """Refuses a disk that cannot hold what is still to be written."""
    needed = sum(len(index.shard_rows(shard)) for shard in shards) * index.row_bytes
    free = shutil.disk_usage(folder).free
    if needed + _SPARE_BYTES * bool(needed) > free:
        raise InputError(
            f"the features still need {needed / 1e9:.1f} GB in {folder}, but "
            f"{free / 1e9:.1f} GB are free; free some space, give another folder, or "
            "compute features as they are needed"
        )
