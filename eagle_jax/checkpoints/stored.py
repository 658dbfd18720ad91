"""Tensors as they lie in safetensors and `.bin` files, read whole or in parts."""

import contextlib
import dataclasses
import errno
import functools
import math
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import safetensors

from eagle_jax.errors import InputError, first_line
from eagle_jax.parsing import parse_json

try:
    import resource
except ImportError:  # Not on Windows, which has no such limits.
    resource = None

Part = tuple[slice, ...]
"""Which part of a tensor: a slice with both ends for every axis."""

_DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
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
_TORCH_DTYPES = {np.dtype(kind).name for kind in _DTYPES.values()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
        dtype: Its name; something else than a floating-point type is refused when
            it is read.
        shape: As it is stored.
        read: Returns the tensor.
        read_part: Returns a part of it and reads nothing else.
    """

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]
    read_part: Callable[[Part], np.ndarray]


def open_safetensors(path: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of a safetensors file by name.

    Raises:
        InputError: If the file is broken.
    """
    try:
        with safetensors.safe_open(path, framework="np"):
            pass  # Checks the header, and that the file is as long as it says.
        with open(path, "rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = parse_json(file.read(size), f"the header of {path}")
    except (OSError, safetensors.SafetensorError) as error:
        raise InputError(f"{path} is no complete safetensors file: {error}") from error
    header.pop("__metadata__", None)
    return {name: _stored(path, 8 + size, entry) for name, entry in header.items()}


def _stored(path: Path, start: int, entry: dict[str, Any]) -> StoredTensor:
    """Returns a tensor by its entry in the header."""
    kind, shape = entry["dtype"], tuple(entry["shape"])
    offset = start + entry["data_offsets"][0]

    def read_part(part: Part) -> np.ndarray:
        if kind not in _DTYPES:
            raise OSError(f"values of type {kind} are not supported")
        return _read_part(path, offset, shape, np.dtype(_DTYPES[kind]), part)

    return StoredTensor(
        dtype=np.dtype(_DTYPES[kind]).name if kind in _DTYPES else kind,
        shape=shape,
        read=lambda: read_part(tuple(slice(0, size) for size in shape)),
        read_part=read_part,
    )


def _read_part(
    path: Path, offset: int, shape: tuple[int, ...], dtype: np.dtype, part: Part
) -> np.ndarray:
    """Reads a part with as many calls as it has pieces that lie together.

    Pages of a mapped file would count as memory of this process until all is read.

    Args:
        path: Of the file.
        offset: Of the tensor in it, in bytes.
        shape: Of the tensor.
        dtype: Likewise.
        part: What to read.
    """
    wanted = np.empty([one.stop - one.start for one in part], dtype)
    # The first axes are walked; those behind the last one that is cut lie together.
    is_cut = [size != n for size, n in zip(wanted.shape, shape, strict=True)]
    walked = max((axis for axis, cut in enumerate(is_cut) if cut), default=0)
    steps = [
        math.prod(shape[axis + 1 :]) * dtype.itemsize for axis in range(len(shape))
    ]
    offset += sum(one.start * step for one, step in zip(part, steps, strict=True))
    size = math.prod(wanted.shape[walked:]) * dtype.itemsize
    pieces = wanted.reshape(-1).view(np.uint8).data
    with open(path, "rb", buffering=0) as file:
        for index in np.ndindex(wanted.shape[:walked]):
            file.seek(offset + sum(map(int.__mul__, index, steps)))
            piece, pieces = pieces[:size], pieces[size:]
            while piece:
                count = file.readinto(piece)
                if not count:
                    raise OSError(f"{path} has become shorter")
                piece = piece[count:]
    return wanted


def open_bin(path: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of a `.bin` file by name.

    Raises:
        InputError: If the file is no table of tensors, or torch is not installed.
    """
    try:
        import torch
    except ImportError as error:
        raise InputError(
            f"{path} is a torch pickle; install the torch extra (pip install "
            "'.[torch]') or give a model.safetensors"
        ) from error

    try:
        # Mapped into memory: tensors are read from disk one by one. Files of the
        # format before torch 1.6 cannot be.
        tensors = torch.load(
            path,
            map_location="cpu",
            weights_only=True,
            mmap=zipfile.is_zipfile(path),
        )
    except Exception as error:  # A broken file ends in whatever its parser trips over.
        raise InputError(
            f"{path} is no readable torch checkpoint: {first_line(error)}"
        ) from error
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
            read=functools.partial(read, values),
            read_part=lambda part, values=values: read(values[part]),
        )
    return stored


def check_space(folder: Path, num_bytes: int, largest: int) -> None:
    """Refuses to start writing what the disk cannot take.

    Args:
        folder: To be written to.
        num_bytes: In all.
        largest: Of them, in one file.

    Raises:
        OSError: If fewer are free, or this process may not write so large a file.
    """
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        full = os.strerror(errno.ENOSPC)
        raise OSError(
            errno.ENOSPC, f"{full}: {num_bytes:,} bytes are needed, {free:,} are free"
        )
    if resource is None:
        return
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit != resource.RLIM_INFINITY and limit < largest:
        large = os.strerror(errno.EFBIG)
        raise OSError(
            errno.EFBIG,
            f"{large}: {largest:,} bytes are needed in one file, {limit:,} are allowed "
            "(ulimit -f)",
        )


@contextlib.contextmanager
def saving(path: Path) -> Iterator[None]:
    """Turns the errors of libraries that write `path` into `OSError`.

    safetensors, torch and tensorstore have an error of their own each for a full
    disk, and torch's does not say so.
    """
    try:
        yield
    except (RuntimeError, ValueError, safetensors.SafetensorError) as error:
        full = os.strerror(errno.ENOSPC)
        if full in str(error):
            raise OSError(errno.ENOSPC, full) from error
        raise OSError(
            f"writing {path.name} failed ({first_line(error)}); is the disk full?"
        ) from error
