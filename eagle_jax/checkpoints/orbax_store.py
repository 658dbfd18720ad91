"""Converted pairs: settings as they were, weights in an Orbax folder.

    DIR/target/  config.json, the tokenizer's files, params/ (Orbax), store.json
    DIR/head/    config.json, params/, store.json

The Orbax tree is flat: tensors by the names they have in a Hugging Face folder; of a
quantized matrix its integers, `NAME.values`, and `NAME.scales`, as models hold them.
`store.json` is written last and lists what belongs to the store, so whatever was cut
short is seen before anything is read.
"""

import contextlib
import json
import logging
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from eagle_jax.checkpoints import names
from eagle_jax.checkpoints.calibration import CALIBRATION_FILE
from eagle_jax.checkpoints.hub import STORE_LIST, TEXT_FILES, file_inside
from eagle_jax.checkpoints.tensors import (
    Part,
    blocks,
    check_space,
    ends_of,
    local_part,
    saving,
)
from eagle_jax.checkpoints.weights import (
    TensorFiles,
    Weights,
    check_tensor,
    common_dtype,
)
from eagle_jax.errors import InputError, first_line
from eagle_jax.models.quantized import bits_of
from eagle_jax.parsing import read_json

_PARAMS = "params"
_FORMAT, _VERSION = "eagle_jax store", 1
_COMMIT_MARK = "_CHECKPOINT_METADATA"
# Slices of a large tensor can be read alone, and none outgrows a compressor.
_CHUNK_BYTES = 256 * 2**20
# About the largest that Orbax makes.
_FILE_BYTES = 2**31


class StoreFiles:
    """The tensors of one half of a converted pair, behind `Weights`."""

    def __init__(self, folder: Path) -> None:
        """Lists the tensors.

        Args:
            folder: Holds `store.json` and `params/`.

        Raises:
            InputError: If the store is not whole.
        """
        self.folder = folder
        listed = _read_list(folder)
        self._tensors: dict[str, dict[str, Any]] = dict(listed["tensors"])
        self.bits: int | None = listed.get("bits")

    def names(self) -> set[str]:
        """See `Weights.names`."""
        return set(self._tensors)

    def forget(self, name: str) -> None:
        """See `Weights.forget`."""
        self._tensors.pop(name, None)

    def dtype(self) -> jnp.dtype:
        """See `Weights.dtype`."""
        return _common_dtype(self._tensors)

    def read(self, name: str) -> np.ndarray:
        """See `Weights.read`."""
        tensor = self._restore(name, None)
        if describe(tensor) != self._tensors[name]:
            raise self._damaged(name)
        check_tensor(self.folder, name, tensor)
        return tensor

    def parts(
        self, name: str, sharding: Sharding | None = None
    ) -> tuple[tuple[int, ...], Callable[[Part], np.ndarray]]:
        """See `Weights.parts`; a checksum is that of a whole tensor.

        So it is checked by a process that has all parts, and by no other.
        """
        if sharding is None:
            tensor = self.read(name)
            return tensor.shape, lambda part: tensor[part]
        array = self._restore(name, sharding)
        stored = {"shape": list(array.shape), "dtype": str(array.dtype)}
        if array.is_fully_addressable:
            stored["crc32"] = _checksum(array)
        listed = self._tensors[name]
        if any(listed[key] != value for key, value in stored.items()):
            raise self._damaged(name)

        def read(part: Part) -> np.ndarray:
            tensor = local_part(array, ends_of(part, array.shape))
            check_tensor(self.folder, name, tensor)
            return tensor

        return array.shape, read

    def _restore(self, name: str, sharding: Sharding | None) -> Any:
        """Returns a tensor as it is stored, of NumPy where there is no sharding."""
        # Imported here: it takes a second, and most checkpoints need it not.
        import orbax.checkpoint as ocp

        kind = ocp.RestoreArgs(restore_type=np.ndarray)
        if sharding is not None:
            kind = ocp.ArrayRestoreArgs(sharding=sharding)
        wanted = ocp.args.PyTreeRestore(
            item={name: 0}, restore_args={name: kind}, partial_restore=True
        )
        path = (self.folder / _PARAMS).resolve()
        try:
            with _quiet(), ocp.PyTreeCheckpointer() as checkpointer:
                return checkpointer.restore(path, args=wanted)[name]
        except Exception as error:  # Orbax and tensorstore have many kinds.
            raise InputError(
                f"{self.folder}: cannot read {name}: {first_line(error)}; "
                "convert the checkpoint again"
            ) from error

    def _damaged(self, name: str) -> InputError:
        return InputError(
            f"{self.folder}: tensor {name} is not what was stored; the store is "
            "damaged, convert the checkpoint again"
        )


def open_weights(folder: Path) -> Weights:
    """Opens the weights of a checkpoint, whichever way they are stored.

    Args:
        folder: A Hugging Face folder or one half of a converted pair, which is known
            by its `params/` or `store.json`.

    Raises:
        InputError: If weights are missing or broken, as far as that can be seen
            without reading them.
    """
    if (folder / _PARAMS).is_dir() or (folder / STORE_LIST).exists():
        return StoreFiles(folder)
    return TensorFiles(folder)


def write_store(
    folder: Path, source: Path, params: Any, table: dict[str, str], *, with_text: bool
) -> None:
    """Writes one half of a converted pair, and reads it back.

    Args:
        folder: Empty.
        source: The checkpoint whose settings are kept.
        params: Weights.
        table: Their names, from `names`.
        with_text: Copy the tokenizer's and generation settings too.

    Raises:
        InputError: If what is read back differs.
        OSError: If something cannot be written.
    """
    import orbax.checkpoint as ocp

    tensors = names.by_name(params, table)
    path = folder / _PARAMS
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    check_space(folder, num_bytes, min(num_bytes, _FILE_BYTES))
    save_args = {name: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES) for name in tensors}
    with _quiet(), saving(path), ocp.PyTreeCheckpointer() as checkpointer:
        arguments = ocp.args.PyTreeSave(
            tensors,
            save_args=save_args,
            ocdbt_target_data_file_size=_FILE_BYTES,
        )
        checkpointer.save(path.resolve(), args=arguments)
    described = {name: describe(tensors[name]) for name in sorted(tensors)}
    if with_text:
        _copy_text(source, folder)
    if (source / CALIBRATION_FILE).is_file():
        shutil.copyfile(source / CALIBRATION_FILE, folder / CALIBRATION_FILE)
    settings = read_json(source / "config.json")
    given = "dtype" if "dtype" in settings else "torch_dtype"
    dtype = str(_common_dtype(described))
    _write_json(folder / "config.json", settings | {given: dtype})
    listed = {
        "format": _FORMAT,
        "version": _VERSION,
        "bits": bits_of(params),
        "tensors": described,
        "files": _sizes(folder),
    }
    _write_json(folder / STORE_LIST, listed)
    written = StoreFiles(folder)
    for name in tensors:
        written.read(name)


def describe(tensor: Any) -> dict[str, Any]:
    """Returns shape, dtype and checksum of an array: equal ones are equal bit for bit.

    Args:
        tensor: NumPy's or JAX's.
    """
    array = np.ascontiguousarray(np.asarray(tensor))
    return {
        "shape": list(array.shape),
        "dtype": str(array.dtype),
        "crc32": zlib.crc32(array.reshape(-1).view(np.uint8).data),
    }


def _checksum(array: jax.Array) -> int:
    """Returns the checksum that `describe` gives, without a copy of the whole."""
    checksum = 0
    for block in blocks([ends_of(None, array.shape)], array.dtype.itemsize):
        piece = local_part(array, block)
        checksum = zlib.crc32(piece.reshape(-1).view(np.uint8).data, checksum)
    return checksum


def is_store(folder: Path) -> bool:
    """Returns whether a folder holds one half of a converted pair and nothing else."""
    try:
        listed = read_json(folder / STORE_LIST)
    except InputError:
        return False
    files = listed.get("files")
    if listed.get("format") != _FORMAT or not isinstance(files, dict):
        return False
    return _sizes(folder).keys() <= files.keys() | {STORE_LIST}


def _common_dtype(tensors: dict[str, dict[str, Any]]) -> jnp.dtype:
    """Returns the narrowest type that holds all tensors that are not quantized."""
    return common_dtype(
        entry["dtype"]
        for name, entry in tensors.items()
        if not names.is_quantized(name)
    )


def _read_list(folder: Path) -> dict[str, Any]:
    """Returns what `store.json` says, once nothing is missing."""
    path = folder / STORE_LIST
    advice = "the store is not whole, convert the checkpoint again"
    if not path.is_file():
        raise InputError(f"{folder} has {_PARAMS}/ but no {STORE_LIST}; {advice}")
    listed = read_json(path)
    if listed.get("format") != _FORMAT or listed.get("version") != _VERSION:
        raise InputError(
            f"{path} is no list of an {_FORMAT}, version {_VERSION}; {advice}"
        )
    tensors: Any = listed.get("tensors")
    files: Any = listed.get("files")
    if not _is_well_formed(tensors, files) or listed.get("bits") not in (None, 8, 4):
        raise InputError(f"{path} is damaged; {advice}")
    if f"{_PARAMS}/{_COMMIT_MARK}" not in files:
        raise InputError(f"{path} lists no finished {_PARAMS}/; {advice}")
    for name, size in files.items():
        if not name.startswith(f"{_PARAMS}/"):
            continue  # Settings may be edited.
        file = file_inside(folder, name, STORE_LIST)
        if file.stat().st_size != size:
            raise InputError(
                f"{file} has {file.stat().st_size} bytes instead of {size}; {advice}"
            )
    return listed


def _is_well_formed(tensors: Any, files: Any) -> bool:
    return (
        isinstance(files, dict)
        and isinstance(tensors, dict)
        and all(
            isinstance(entry, dict) and entry.keys() == {"shape", "dtype", "crc32"}
            for entry in tensors.values()
        )
    )


def _copy_text(source: Path, folder: Path) -> None:
    """Copies the tokenizer's files, the chat template and the generation settings."""
    for pattern in TEXT_FILES:
        for path in sorted(source.glob(pattern)):
            is_replaced = path.name in ("config.json", STORE_LIST)
            if path.is_file() and not (is_replaced or path.match("*.index.json")):
                shutil.copyfile(path, folder / path.name)


def _sizes(folder: Path) -> dict[str, int]:
    """Returns the size in bytes of each file below a folder, by its relative path."""
    return {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if not path.is_dir()
    }


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps Orbax from logging its own tracebacks beside our one line."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)
