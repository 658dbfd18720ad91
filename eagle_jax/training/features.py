"""The target's features of all training rows, computed once and kept on disk."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.errors import InputError, first_line
from eagle_jax.files import write_whole
from eagle_jax.heads.rows import PackedRows
from eagle_jax.parallel import wait_for_all


def cached_features(
    path: Path,
    rows: PackedRows,
    compute: Callable[[PackedRows], Any],
    *,
    batch_size: int,
    dtype: str,
    progress: Callable[[int], None],
) -> np.ndarray:
    """Returns the features of rows, mapped from a file, which is written if missing.

    Of several processes, which share the file, all compute and the first one writes.

    Args:
        path: The file of NumPy's, of integers as wide as `dtype`.
        rows: The rows, `[R, T]` fields.
        compute: A function from `batch_size` rows to their features, `[batch_size, T,
            F]`; it is always called with that many, so that it is compiled once.
        batch_size: The number of rows of a call of `compute`, `B`.
        dtype: The type of the features.
        progress: Called with the number of rows done.

    Returns:
        `[R, T, F]` in `dtype`, read from disk as it is indexed.

    Raises:
        InputError: If the file cannot be written or read.
    """
    is_missing = not path.exists()
    wait_for_all("all have looked for the features")

    def fill(place: Path | None) -> None:
        written = None
        for start in range(0, len(rows), batch_size):
            numbers = np.arange(start, min(start + batch_size, len(rows)))
            found = compute(rows[np.resize(numbers, batch_size)])[: len(numbers)]
            found = np.asarray(found).view(f"u{jnp.dtype(dtype).itemsize}")
            if place is not None and written is None:
                shape = (len(rows), *found.shape[1:])
                written = np.lib.format.open_memmap(place, "w+", found.dtype, shape)
            if written is not None:
                written[numbers] = found
            progress(int(numbers[-1]) + 1)

    if is_missing and jax.process_index() == 0:
        write_whole(path, fill)
    elif is_missing:
        fill(None)
    wait_for_all("all features are written")
    try:
        return np.load(path, mmap_mode="r").view(jnp.dtype(dtype))
    except (OSError, ValueError) as error:
        raise InputError(
            f"cannot read features from {path} ({first_line(error)}); remove it and go "
            "on with the run, which computes them again"
        ) from error
