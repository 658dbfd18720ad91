"""The target's features of all training rows, computed once and kept on disk.

For every batch of rows a folder holds a file, `features-00000.safetensors` and so on,
with one tensor `features` `[B, T, F]`, and in its log, `features.jsonl`, a line. So a
run that was stopped goes on with the first batch that is missing.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from eagle_jax.checkpoints.tensors import saving
from eagle_jax.errors import InputError, first_line
from eagle_jax.files import write_whole, writing
from eagle_jax.heads.rows import PackedRows
from eagle_jax.logs import JsonLines, check_log, read_log
from eagle_jax.parallel import wait_for_all


@dataclasses.dataclass(frozen=True)
class FeatureStore:
    """The features of a folder, read from disk as they are asked for.

    Attributes:
        folder: The folder that `write_features` filled.
        batch_size: The number of rows in every file but the last, `B`.
    """

    folder: Path
    batch_size: int

    def path_of(self, row: int) -> Path:
        """Returns the file that holds a row's features."""
        return self.folder / f"features-{row // self.batch_size:05}.safetensors"

    def read(self, row_indices: np.ndarray) -> np.ndarray:
        """Returns the features of rows, `[N, T, F]` in the stored type, 0 in padding.

        Args:
            row_indices: `[N]` int, the rows' indices.
        """
        return np.concatenate([self._read_row(row) for row in row_indices.tolist()])

    def _read_row(self, row: int) -> np.ndarray:
        from safetensors import SafetensorError, safe_open

        path, place = self.path_of(row), row % self.batch_size
        try:
            with safe_open(path, "np") as file:
                return file.get_slice("features")[place : place + 1]
        except (OSError, SafetensorError) as error:
            raise InputError(
                f"cannot read features from {path} ({first_line(error)}); remove its "
                "folder and go on with the run, which computes them again"
            ) from error


def write_features(
    folder: Path,
    rows: PackedRows,
    compute: Callable[[PackedRows], Any],
    *,
    settings: Mapping[str, Any],
    batch_size: int,
    progress: Callable[[int], None],
) -> FeatureStore:
    """Computes what a folder still lacks of the rows' features, and opens it.

    Of several processes, which share the folder, all compute and the first one writes.

    Args:
        folder: The folder, which is made if it is missing.
        rows: The rows, `[R, T]` fields.
        compute: A function from `batch_size` rows to their features, `[batch_size, T,
            F]`; it is always called with that many, so that it is compiled once.
        settings: What else determines the features, as JSON can hold it.
        batch_size: The number of rows of a call of `compute`, and of a file, `B`.
        progress: Called with the number of rows done, at the start and after each
            batch.

    Raises:
        InputError: If the folder holds features of other settings, the disk is full,
            or features are not finite.
    """
    store, log = FeatureStore(folder, batch_size), folder / "features.jsonl"
    settings = {**settings, "rows": rows.tokens.shape, "batch_size": batch_size}
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    check_log(log, settings)
    whole = list(read_log(log)) if log.exists() else []
    first = max(0, len(whole) - 1) * batch_size
    wait_for_all("all have seen which features are missing")
    progress(min(first, len(rows)))
    is_first = jax.process_index() == 0
    with JsonLines(log, settings) if is_first else contextlib.nullcontext() as lines:
        for start in range(first, len(rows), batch_size):
            numbers = range(start, min(start + batch_size, len(rows)))
            features = _compute(rows, numbers, compute, batch_size)
            if lines is not None:
                path = store.path_of(start)
                write_whole(path, functools.partial(_save, features))
                lines.append({"file": path.name})
            progress(numbers.stop)
    wait_for_all("all features are written")
    return store


def _compute(
    rows: PackedRows,
    numbers: range,
    compute: Callable[[PackedRows], Any],
    batch_size: int,
) -> np.ndarray:
    """Returns the features of up to `batch_size` rows, 0 in padding."""
    padded = np.resize(np.array(numbers), batch_size)
    features = np.asarray(compute(rows[padded]))[: len(numbers)]
    if not np.isfinite(features.astype(np.float32)).all():
        raise InputError(
            "the target's features are not finite; it is broken, or its type is too "
            "narrow for it: try another dtype"
        )
    is_token = rows.segments[numbers.start : numbers.stop, :, None] > 0
    return np.where(is_token, features, np.zeros((), features.dtype))


def _save(features: np.ndarray, path: Path) -> None:
    from safetensors.numpy import save_file

    with saving(path):
        save_file({"features": features}, path)
