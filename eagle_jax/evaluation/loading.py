"""What loading weights takes: memory beside the weights themselves, and time."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from eagle_jax.errors import InputError

_BLOCK_BYTES = 4 * 2**20
_RESET_PEAK = "5"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadingCost:
    """What one process took to load its share.

    Attributes:
        share_bytes: Of the weights that its devices hold, what several hold once.
        before_bytes: Resident before the loading.
        peak_bytes: Resident at most while loading, beyond that.
        seconds: Of the loading.
        plain_seconds: Of reading as many bytes of the same files into memory.
    """

    share_bytes: int
    before_bytes: int
    peak_bytes: int
    seconds: float
    plain_seconds: float

    @property
    def peak_ratio(self) -> float:
        """Peak per byte of the share."""
        return self.peak_bytes / max(self.share_bytes, 1)

    def summary(self) -> str:
        """Returns the figures in one line."""
        share = self.share_bytes / 1e9
        return (
            f"share {share:.3f} GB | peak {self.peak_bytes / 1e9:.3f} GB above "
            f"{self.before_bytes / 1e9:.3f} GB: {self.peak_ratio:.3f} x the share | "
            f"{self.seconds / share:.2f} s per GB | plain read "
            f"{self.plain_seconds / share:.2f} s per GB | "
            f"{self.seconds / self.plain_seconds:.1f} x as long"
        )


def measure_loading(load: Callable[[], Any], files: Sequence[Path]) -> LoadingCost:
    """Loads weights, and reads as much of their files beside it.

    Files and memory are as warm for the one as for the other: as much is read once
    before, and the memory given back.

    Args:
        load: Returns a pytree of arrays.
        files: That it reads.

    Raises:
        InputError: If the system does not say how much memory was resident.
    """
    jax.block_until_ready(jax.device_put(np.zeros(1)))  # Starts the devices.
    total = sum(path.stat().st_size for path in files)
    _read(files, total)
    before = _reset_peak()
    started = time.perf_counter()
    params = jax.block_until_ready(load())
    seconds = time.perf_counter() - started
    peak = _status("VmHWM") - before
    share = sum(map(_held, jax.tree.leaves(params)))
    del params
    return LoadingCost(
        share_bytes=share,
        before_bytes=before,
        peak_bytes=peak,
        seconds=seconds,
        plain_seconds=_read(files, min(share, total)),
    )


def _held(array: jax.Array) -> int:
    """Returns the bytes of an array that this process has."""
    parts = {str(shard.index): shard.data.nbytes for shard in array.addressable_shards}
    return sum(parts.values())


def _read(files: Sequence[Path], size: int) -> float:
    """Reads bytes from files, one after the other; returns the seconds."""
    started = time.perf_counter()
    memory = np.empty(size, np.uint8).data
    for path in files:
        with open(path, "rb", buffering=0) as file:
            while memory and (count := file.readinto(memory[:_BLOCK_BYTES])):
                memory = memory[count:]
    return time.perf_counter() - started


def _reset_peak() -> int:
    """Forgets the peak so far; returns what is resident now."""
    try:
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
    except OSError as error:
        raise InputError(f"this system does not say peaks of memory: {error}") from None
    return _status("VmRSS")


def _status(name: str) -> int:
    """Returns an entry of the process's status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        label, _, value = line.partition(":")
        if label == name:
            return int(value.split()[0]) * 1024
    raise InputError(f"this system does not say {name} of a process")
