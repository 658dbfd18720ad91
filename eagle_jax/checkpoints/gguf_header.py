"""Reads GGUF files, llama.cpp's: what they say of a model, and tensors by name.

The header is read here, since no count in a broken one may take time or memory; what
quantized blocks stand for says the library `gguf`.
"""

import dataclasses
import functools
import math
import mmap
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from eagle_jax.checkpoints.tensors import NUMBERS, Part, StoredTensor
from eagle_jax.errors import InputError, shortened

_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
# The largest vocabulary and the longest list of merges have a tenth of these values.
_LONGEST = 2**22
_MOST_DIMENSIONS = 4
_MOST_PARTS = 1_000
_PART = re.compile(r"(.*-)(\d{5})-of-(\d{5})\.gguf")
# What a browser or a downloader calls what it has not finished.
_UNFINISHED = (".part", ".partial", ".incomplete", ".download", ".crdownload", ".aria2")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gguf:
    """What a GGUF file says of a model; that of several parts is one.

    Attributes:
        path: The file, the first one of several.
        fields: The metadata by key: numbers, truth values, texts, and lists of them.
        tensors: The tensors by their names in GGUF, in the order of axes of other
            formats: `[out, in]`.
    """

    path: Path
    fields: dict[str, Any]
    tensors: dict[str, StoredTensor]


def is_gguf(path: Path) -> bool:
    """Returns whether a name is that of a GGUF file, also of one half downloaded."""
    ends = tuple(f".gguf{mark}" for mark in ("", *_UNFINISHED))
    return path.name.lower().endswith(ends)


def names_of_parts(name: str) -> list[str]:
    """Returns the names of the files that belong together, of any one of them.

    >>> names_of_parts("x-00002-of-00002.gguf")
    ['x-00001-of-00002.gguf', 'x-00002-of-00002.gguf']
    """
    one = _PART.fullmatch(name)
    if one is None:
        return [name]
    numbers = range(1, min(int(one[3]), _MOST_PARTS) + 1)
    return [f"{one[1]}{number:05}-of-{one[3]}.gguf" for number in numbers]


def parts_of(path: Path) -> list[Path]:
    """Returns the files that belong together, of any one of them.

    Raises:
        InputError: If one is missing, or the file is not downloaded to its end.
    """
    if path.name.lower().endswith(_UNFINISHED):
        raise InputError(
            f"{path} is a file that is being downloaded; wait until it has its name"
        )
    names = names_of_parts(path.name) or [path.name]
    if missing := [name for name in names if not path.with_name(name).is_file()]:
        raise InputError(
            f"{path} is one of {len(names)} files, but {shortened(missing, 3)} is not "
            "beside it"
        )
    return [path.with_name(name) for name in names]


def read_gguf(paths: list[Path]) -> Gguf:
    """Reads what files say, and none of their tensors.

    Args:
        paths: The files of one model, from `parts_of`.

    Raises:
        InputError: If one is broken, cut, or holds what cannot be read.
    """
    tensors: dict[str, StoredTensor] = {}
    fields: dict[str, Any] = {}
    for number, path in enumerate(paths):
        found, more = _Header(path).read()
        fields = fields or found
        if found.get("split.no", number) != number:
            raise InputError(f"{path} is another part than its name says")
        for name in more.keys() & tensors.keys():
            raise InputError(f"{path} holds {name}, as another part does")
        tensors |= more
    count = fields.get("split.tensors.count", len(tensors))
    if count != len(tensors) or fields.get("split.count", 0) not in (0, len(paths)):
        raise InputError(
            f"{paths[0]} is one of {fields.get('split.count')} files with {count} "
            "tensors together; put all of them into one folder, named as "
            "X-00001-of-00003.gguf"
        )
    return Gguf(path=paths[0], fields=fields, tensors=tensors)


class _Header:
    """A place in a file that goes on with what is read, and never past its end."""

    def __init__(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # The second where it is empty.
            raise InputError(f"{path} cannot be read: {error}") from error
        self._path, self._place, self._size = path, 0, len(self._data)

    def read(self) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
        """Returns the metadata and the tensors."""
        if self._data[:4] != b"GGUF":
            raise InputError(f"{self._path} is no GGUF file: it begins otherwise")
        self._place = 4
        (version,) = self._unpack("I")
        if version & 0xFFFF == 0:
            raise self._broken("it is of the other byte order; convert it anew")
        if version not in _VERSIONS:
            raise self._broken(f"version {version} is none of {_VERSIONS}")
        num_tensors, num_fields = self._unpack("QQ")
        fields: dict[str, Any] = {}
        for _ in range(num_fields):
            name = self._text()
            if name in fields:
                raise self._broken(f"{name} is there twice")
            fields[name] = self._value(*self._unpack("I"))
        infos: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(num_tensors):
            name = self._text()
            (count,) = self._unpack("I")
            if name in infos or not 1 <= count <= _MOST_DIMENSIONS:
                raise self._broken(f"tensor {name} is there twice or of {count} axes")
            shape = self._unpack("Q" * count)[::-1]
            infos[name] = (shape, *self._unpack("IQ"))
        align = fields.get("general.alignment", 32)
        if type(align) is not int or align < 1 or align & (align - 1):
            raise self._broken(f"general.alignment = {align!r} is no power of two")
        start = -(-self._place // align) * align
        return fields, {
            name: self._tensor(name, shape, kind, start + offset)
            for name, (shape, kind, offset) in infos.items()
        }

    def _tensor(
        self, name: str, shape: tuple[int, ...], kind: int, offset: int
    ) -> StoredTensor:
        """Returns a tensor of values or of quantized blocks, which are read as float32.

        A row of blocks is read as a whole, whatever part of it is asked for.
        """
        block, size, type_name, dequantize = _type_of(kind, f"{self._path}: {name}")
        if shape[-1] % block or min(shape) < 1:
            raise self._broken(f"{name} has shape {shape}, but blocks have {block}")
        rows = (*shape[:-1], shape[-1] // block * size)
        if offset + math.prod(rows) > self._size:
            raise InputError(
                f"{self._path} has {self._size:,} bytes, but {name} ends at "
                f"{offset + math.prod(rows):,}; it is cut, or still being downloaded"
            )
        # Of what holds numbers themselves: F32, F16 and BF16.
        path, number = self._path, NUMBERS.get(type_name)

        def read_part(part: Part) -> np.ndarray:
            *outer, (first, last) = part
            # Mapped anew each time: its pages count as memory until the map is gone.
            stored = np.memmap(path, np.uint8, "r", offset, rows)
            stored = np.array(stored[tuple(slice(*ends) for ends in outer)])
            if number is not None:
                return stored.view(number)[..., first:last]
            return dequantize(stored)[..., first:last]

        # What blocks stand for has no more digits.
        dtype = "bfloat16" if number is None else np.dtype(number).name
        return StoredTensor(dtype=dtype, shape=shape, read_part=read_part)

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind in _SCALARS:
            (value,) = self._unpack(_SCALARS[kind])
            # The number that was meant: 1e-5, not 9.99999975e-6.
            return float(str(np.float32(value))) if _SCALARS[kind] == "f" else value
        if kind != _ARRAY:
            raise self._broken(f"a value is of kind {kind}")
        inner, count = self._unpack("IQ")
        if count > _LONGEST or inner not in (_STRING, *_SCALARS):
            raise self._broken(f"a list has {count:,} values of kind {inner}")
        if inner == _STRING:
            return [self._text() for _ in range(count)]
        return list(self._unpack(f"{count}{_SCALARS[inner]}"))

    def _text(self) -> str:
        (count,) = self._unpack("Q")
        return self._take(count).decode("utf-8", errors="replace")

    def _unpack(self, codes: str) -> tuple[Any, ...]:
        form = struct.Struct(f"<{codes}")
        return form.unpack(self._take(form.size))

    def _take(self, count: int) -> bytes:
        end = self._place + count
        if end > self._size:
            raise self._broken("it ends within its header")
        found = self._data[self._place : end]
        self._place = end
        return found

    def _broken(self, reason: str) -> InputError:
        return InputError(
            f"{self._path} is broken, or still being downloaded: {reason}"
        )


def _type_of(kind: int, where: str) -> tuple[int, int, str, Callable[..., np.ndarray]]:
    """Returns a type's values and bytes per block, its name and what dequantizes it."""
    try:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError as error:
        raise InputError(
            f"{where}: GGUF files need the extra gguf (pip install '.[gguf]')"
        ) from error
    name = f"{kind}"
    try:
        found = GGMLQuantizationType(kind)
        name, (block, size) = found.name, GGML_QUANT_SIZES[found]
        dequantize(np.zeros((1, size), np.uint8), found)
    except (LookupError, NotImplementedError, ValueError) as error:
        raise InputError(
            f"{where} is of type {name}, which cannot be dequantized; give a file of "
            "another type, such as Q8_0, Q4_K or F16"
        ) from error
    return block, size, name, functools.partial(dequantize, qtype=found)
