"""Which parts of a tensor a process needs, and how they are filled block by block."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

Ends = tuple[tuple[int, int], ...]
"""Which part of a tensor: first index and the one behind the last, for every axis."""

# What is read at once: much for a disk, little beside any share of a model.
_BLOCK_BYTES = 4 * 2**20
# Rows that are transposed at once: few enough that their cache lines stay at hand.
_TILE = 8
# A CPU device takes an array at a multiple of this as it is, and copies any other.
_ALIGNMENT = 64


def ends_of(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> Ends:
    """Returns the part of a tensor that an index is.

    Args:
        index: Slices whose ends may be missing; `None` for all.
        shape: Of the tensor.
    """
    slices = index or (slice(None),) * len(shape)
    return tuple(one.indices(size)[:2] for one, size in zip(slices, shape, strict=True))


def local_parts(sharding: Sharding | None, shape: tuple[int, ...]) -> list[Ends]:
    """Returns the parts that this process's devices hold, each once.

    Args:
        sharding: Of the tensor; `None` for one device that holds it whole.
        shape: Of the tensor.
    """
    if sharding is None:
        return [ends_of(None, shape)]
    indices = sharding.addressable_devices_indices_map(shape).values()
    return list(dict.fromkeys(ends_of(index, shape) for index in indices))


def transposed(sharding: Sharding | None, num_axes: int) -> Sharding | None:
    """Returns where a tensor's transpose lies, so that each device has the same."""
    if not isinstance(sharding, NamedSharding) or sharding.is_fully_replicated:
        return sharding
    axes = (*sharding.spec, *(None,) * num_axes)[:num_axes]
    return NamedSharding(sharding.mesh, PartitionSpec(*axes[::-1]))


def blocks(parts: Iterable[Ends], itemsize: int) -> Iterator[Ends]:
    """Cuts what parts cover along the first axis, to be read one after the other.

    Parts with the same rows are read together: side by side in a file, they would
    otherwise take as many reads as there are devices.

    Args:
        parts: As the tensor is stored.
        itemsize: Bytes of a value.
    """
    by_rows: dict[Ends, list[Ends]] = {}
    for part in parts:
        by_rows.setdefault(part[:1], []).append(part)
    for rows, same in by_rows.items():
        behind = tuple(
            (min(start for start, _ in axis), max(stop for _, stop in axis))
            for axis in zip(*(part[1:] for part in same), strict=True)
        )
        ((start, stop),) = rows
        row_bytes = math.prod(b - a for a, b in behind) * itemsize
        step = max(_BLOCK_BYTES // max(row_bytes, 1), 1)
        for first in range(start, stop, step):
            yield ((first, min(first + step, stop)), *behind)


def copy_common(into: np.ndarray, at: Ends, block: np.ndarray, block_at: Ends) -> None:
    """Copies what two parts of a tensor have in common from one to the other.

    Args:
        into: The part to fill.
        at: Which it is.
        block: The part to take from, of the same type.
        block_at: Which it is.
    """
    common = [
        (max(a, c), min(b, d)) for (a, b), (c, d) in zip(at, block_at, strict=True)
    ]
    if any(start >= stop for start, stop in common):
        return
    # As bits: NumPy copies its own types faster than bfloat16.
    bits = np.dtype(f"u{into.itemsize}")
    into = into[_relative(common, at)].view(bits)
    block = block[_relative(common, block_at)].view(bits)
    is_turned = into.ndim > 1 and into.strides[0] == into.itemsize
    tile = _TILE if is_turned else max(len(block), 1)
    for row in range(0, len(block), tile):
        into[row : row + tile] = block[row : row + tile]


def local_part(array: jax.Array, part: Ends) -> np.ndarray:
    """Returns a part of an array that this process's devices hold together.

    Args:
        array: At least one axis.
        part: Which part.
    """
    held = {
        ends_of(shard.index, array.shape): shard.data
        for shard in array.addressable_shards
    }
    found = empty([stop - start for start, stop in part], array.dtype)
    for ends, data in held.items():
        copy_common(found, part, np.asarray(data), ends)
    return found


def _relative(ends: Iterable[tuple[int, int]], at: Ends) -> tuple[slice, ...]:
    return tuple(
        slice(start - first, stop - first)
        for (start, stop), (first, _) in zip(ends, at, strict=True)
    )


def empty(shape: Iterable[int], dtype: Any) -> np.ndarray:
    """Returns memory for an array that a CPU device takes over without a copy."""
    shape, kind = tuple(shape), np.dtype(dtype)
    size = math.prod(shape) * kind.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(kind).reshape(shape)


def put(
    parts: dict[Ends, np.ndarray], shape: tuple[int, ...], sharding: Sharding | None
) -> jax.Array:
    """Returns the tensor of which this process has the parts of its devices.

    Args:
        parts: Those of `local_parts`, never to be written again.
        shape: Of the tensor.
        sharding: As for `local_parts`.
    """
    if sharding is None:
        (whole,) = parts.values()
        return jax.device_put(whole)  # Uncommitted: it follows what it is used with.
    return jax.make_array_from_callback(
        shape, sharding, lambda index: parts[ends_of(index, shape)]
    )
