"""Reads tensors from files of any kind, and the parts that a process holds."""

import dataclasses
import itertools
import math
import re
import zipfile
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from eagle_jax.checkpoints.names import transposed
from eagle_jax.checkpoints.remote import RangeReader, range_reader
from eagle_jax.errors import InputError, first_line
from eagle_jax.parsing import parse_json

Part = tuple[tuple[int, int], ...]
"""A part of a tensor: for every axis its first index and the one after its last."""

# What is read at once: much for a disk, little beside any share of a model.
_BLOCK_BYTES = 4 * 2**20
# Rows that are transposed at once: few enough that their cache lines stay at hand.
_TILE = 8
# A CPU device takes an array at a multiple of this as it is, and copies any other.
_ALIGNMENT = 64

NUMBERS: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
"""The types of numbers by their names in safetensors, some of which GGUF shares."""

_TORCH_DTYPES = {np.dtype(kind).name for kind in NUMBERS.values()} - {"float8_e4m3fn"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
        dtype: The name of its dtype; one that weights cannot have is refused when the
            tensor is read.
        shape: The shape that is stored.
        read_part: A function that returns a part and reads nothing else.
    """

    dtype: str
    shape: tuple[int, ...]
    read_part: Callable[[Part], np.ndarray]


def open_safetensors(path: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of a safetensors file by name."""
    from safetensors import SafetensorError, safe_open

    try:
        if (read := range_reader(path)) is not None:
            size = int.from_bytes(read(0, 8), "little")
            header = parse_json(read(8, 8 + size), f"the header of {path}")
        else:
            with safe_open(path, framework="np"):
                pass  # Checks the header, and that the file is as long as it says.
            with open(path, "rb") as file:
                size = int.from_bytes(file.read(8), "little")
                header = parse_json(file.read(size), f"the header of {path}")
        header.pop("__metadata__", None)
        return {name: _stored(path, 8 + size, header[name], read) for name in header}
    except (OSError, SafetensorError, LookupError, TypeError) as error:
        raise InputError(f"{path} is no complete safetensors file: {error}") from error


def _stored(
    path: Path, start: int, entry: dict[str, Any], read: RangeReader | None
) -> StoredTensor:
    """Returns the tensor that an entry in the header describes."""
    kind, shape = entry["dtype"], tuple(entry["shape"])
    offset = start + entry["data_offsets"][0]

    def read_part(part: Part) -> np.ndarray:
        if kind not in NUMBERS:
            raise OSError(f"values of type {kind} are not supported")
        dtype = np.dtype(NUMBERS[kind])
        if read is None:
            # Mapped anew each time: its pages count as memory until the map is gone.
            whole = np.memmap(path, dtype, "r", offset, shape)
            return np.array(whole[_slices(part)])
        (first, last), *others = part or ((0, 1),)
        size = math.prod(shape[1:]) * dtype.itemsize
        rows = np.frombuffer(read(offset + first * size, offset + last * size), dtype)
        rows = rows.reshape(last - first, *shape[1:])[:, *_slices(tuple(others))]
        return rows.reshape([stop - start for start, stop in part])

    return StoredTensor(
        dtype=np.dtype(NUMBERS[kind]).name if kind in NUMBERS else kind,
        shape=shape,
        read_part=read_part,
    )


def _slices(part: Part) -> tuple[slice, ...]:
    return tuple(slice(*ends) for ends in part)


def open_bin(path: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of a `.bin` or `.pt` file by name, which needs torch."""
    try:
        import torch
    except ImportError as error:
        raise InputError(
            f"{path} is a torch pickle; install the torch extra (pip install "
            "'.[torch]') or give safetensors"
        ) from error

    try:
        with path.open("rb") as file:
            is_zip = file.read(4) == b"PK\3\4"  # What torch goes by.
        if is_zip:
            with zipfile.ZipFile(path) as archive:
                entries = archive.infolist()
            size = sum(entry.file_size for entry in entries)
            if size > path.stat().st_size or any(one.compress_type for one in entries):
                raise ValueError(
                    f"its entries are compressed or larger than the file ({size:,} "
                    "bytes); save it with torch.save or as safetensors"
                )
        # Mapped into memory: tensors are read from disk one by one. Files of the
        # format before torch 1.6 cannot be.
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except Exception as error:  # A broken file ends in whatever its parser trips over.
        reason = first_line(error)
        if "weights_only" in str(error):  # torch advises to run what the file holds.
            named = re.search(r"GLOBAL ([\w.]+)", str(error))
            reason = f"it is broken or holds {named[1] if named else 'more'} as well"
        raise InputError(f"{path} is no readable torch checkpoint: {reason}") from error
    if not isinstance(tensors, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor)
        for name, tensor in tensors.items()
    ):
        raise InputError(
            f"{path} is no table of tensors by name, but some other torch file"
        )

    def read(tensor: Any) -> np.ndarray:
        if tensor.dtype == torch.bfloat16:  # NumPy has no bfloat16 of its own.
            return tensor.view(torch.int16).numpy().view(jnp.bfloat16)
        return tensor.numpy()

    stored = {}
    for name, tensor in tensors.items():
        kind = str(tensor.dtype).removeprefix("torch.")
        is_plain = tensor.layout == torch.strided and tensor.device.type == "cpu"
        if not is_plain or kind not in _TORCH_DTYPES:
            raise InputError(
                f"{path}: tensor {name} is {kind} of layout {tensor.layout} on device "
                f"{tensor.device}; give a checkpoint of plain tensors, none of them "
                "quantized or float8"
            )
        values = tensor.detach()  # What was saved as a parameter has a gradient.
        stored[name] = StoredTensor(
            dtype=kind,
            shape=tuple(values.shape),
            read_part=lambda part, values=values: read(values[_slices(part)]),
        )
    return stored


def read_blocks(
    read: Callable[[Part], np.ndarray],
    part: Part,
    dtype: jnp.dtype,
    readers: Executor,
    *,
    is_transposed: bool,
) -> np.ndarray:
    """Reads a part of a tensor in blocks of rows, several at the same time.

    Args:
        read: A function that returns a part of the tensor as it is stored, in `dtype`.
        part: The part to read, of the tensor as it is returned.
        dtype: The dtype of the result.
        readers: What runs the function.
        is_transposed: Whether a matrix, or each in a stack of them, is returned as the
            transpose of what is stored.

    Returns:
        The part, in memory that a CPU device takes over without a copy.
    """
    found = _empty([stop - start for start, stop in part], dtype)
    into = found
    if is_transposed and len(part) > 1:
        part, into = transposed(part), found.swapaxes(-1, -2)
    # Rows of one matrix after the other, where there is a stack of them.
    depth = max(len(part) - 2, 0)
    stack, (first, last), others = part[:depth], part[depth], part[depth + 1 :]
    numbers = itertools.product(*(range(*ends) for ends in stack))
    row_bytes = math.prod(stop - start for start, stop in others) * dtype.itemsize
    step = max(_BLOCK_BYTES // max(row_bytes, 1), 1)
    # They are copied as bits: NumPy copies its own types faster than bfloat16.
    bits = np.dtype(f"u{dtype.itemsize}")

    def fill(place: tuple[tuple[int, ...], int]) -> None:
        number, start = place
        index = tuple(n - ends[0] for n, ends in zip(number, stack, strict=True))
        rows = into[index][start - first : start - first + step].view(bits)
        one = tuple((n, n + 1) for n in number)
        block = read((*one, (start, min(start + step, last)), *others)).view(bits)
        block = block.reshape(rows.shape)
        tile = _TILE if is_transposed else max(len(rows), 1)
        for row in range(0, len(rows), tile):
            rows[row : row + tile] = block[row : row + tile]

    places = itertools.product(numbers, range(first, last, step))
    for _ in readers.map(fill, places):
        pass  # Raises what a reader raised.
    return found


def _empty(shape: Sequence[int], dtype: jnp.dtype) -> np.ndarray:
    """Returns memory for an array that a CPU device takes over without a copy."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)
