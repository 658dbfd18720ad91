"""Reading tensors one by one from safetensors or `.bin` files."""

import dataclasses
import functools
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import safetensors

from eagle_jax.checkpoints.names import MAPS, is_transposed
from eagle_jax.checkpoints.source import first_line, read_json
from eagle_jax.errors import InputError

# Buffers that older checkpoints carry; they follow from the settings.
_DERIVED = ("rotary_emb.inv_freq",)

_FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


Part = tuple[slice, ...]
"""Which part of a tensor: a slice with both ends for every axis."""


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


class Weights(Protocol):
    """The tensors of a checkpoint folder by name, read when asked for.

    Attributes:
        folder: Holds them.
    """

    folder: Path

    def names(self) -> set[str]:
        """Returns the names of all tensors that a model may need."""
        ...

    def forget(self, name: str) -> None:
        """Leaves out a tensor that repeats another."""
        ...

    def dtype(self) -> jnp.dtype:
        """Returns the narrowest type that holds every tensor exactly."""
        ...

    def read(self, name: str) -> np.ndarray:
        """Returns one tensor of finite floating-point numbers, or one of `MAPS`.

        Raises:
            InputError: If it cannot be read, or holds something else.
        """
        ...

    def parts(self, name: str) -> tuple[tuple[int, ...], Callable[[Part], np.ndarray]]:
        """Returns the shape of a tensor, and what `read` would give of its parts.

        Raises:
            InputError: As for `read`, at the latest when a part is read.
        """
        ...


class TensorFiles:
    """The tensors of a checkpoint folder by name, read when asked for.

    `model.safetensors`, its sharded form with an index, `pytorch_model.bin` and its
    sharded form are looked for in this order. A `.bin` file is a pickle: it is read
    only through torch with `weights_only=True`.
    """

    def __init__(self, folder: Path) -> None:
        """Lists the tensors.

        Args:
            folder: Holds the weights.

        Raises:
            InputError: If there are none, or a file is missing or broken.
        """
        self.folder = folder
        self._stored: dict[str, StoredTensor] = {}
        for stem, kind in (("model", "safetensors"), ("pytorch_model", "bin")):
            index = folder / f"{stem}.{kind}.index.json"
            single = folder / f"{stem}.{kind}"
            if single.is_file():
                self._open(single, None)
            elif index.is_file():
                self._open_shards(index)
            if self._stored:
                return
        raise InputError(
            f"{folder} holds no weights: neither model.safetensors nor "
            "pytorch_model.bin, nor an index of shards"
        )

    def names(self) -> set[str]:
        """See `Weights.names`."""
        return {name for name in self._stored if not name.endswith(_DERIVED)}

    def forget(self, name: str) -> None:
        """See `Weights.forget`."""
        self._stored.pop(name, None)

    def dtype(self) -> jnp.dtype:
        """See `Weights.dtype`."""
        return common_dtype(self._stored[name].dtype for name in self.names())

    def read(self, name: str) -> np.ndarray:
        """See `Weights.read`."""
        return self._checked(name, self._stored[name].read)

    def parts(self, name: str) -> tuple[tuple[int, ...], Callable[[Part], np.ndarray]]:
        """See `Weights.parts`."""
        stored = self._stored[name]

        def read(part: Part) -> np.ndarray:
            return self._checked(name, functools.partial(stored.read_part, part))

        return stored.shape, read

    def _checked(self, name: str, read: Callable[[], np.ndarray]) -> np.ndarray:
        try:
            tensor = read()
        except (OSError, RuntimeError, safetensors.SafetensorError) as error:
            raise InputError(f"{self.folder}: cannot read {name}: {error}") from error
        check_tensor(self.folder, name, tensor)
        return tensor

    def _open_shards(self, index: Path) -> None:
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise InputError(f"{index} holds no weight_map")
        if not all(isinstance(shard, str) for shard in weight_map.values()):
            raise InputError(f"{index}: weight_map must give a file name per tensor")
        for shard in sorted(set(weight_map.values())):
            path = self.folder / shard
            if not path.is_file():
                raise InputError(f"{path} is missing, but {index.name} names it")
            self._open(path, {name for name in weight_map if weight_map[name] == shard})

    def _open(self, path: Path, wanted: set[str] | None) -> None:
        is_safetensors = path.suffix == ".safetensors"
        opened = open_safetensors(path) if is_safetensors else open_bin(path)
        missing = sorted((wanted or set()) - set(opened))
        if missing:
            raise InputError(f"{path} lacks {missing[0]}, which its index names")
        repeated = sorted(set(opened) & set(self._stored))
        if repeated:
            raise InputError(f"{path} holds {repeated[0]}, as another shard does")
        self._stored.update(opened)


def check_tensor(folder: Path, name: str, tensor: np.ndarray) -> None:
    """Refuses weights that no model can have.

    Raises:
        InputError: If `tensor` holds something else than finite floating-point
            numbers, and is no map between vocabularies.
    """
    if name in MAPS and tensor.dtype.kind in "biu":
        return
    if not jnp.issubdtype(tensor.dtype, jnp.floating):
        raise InputError(
            f"{folder}: tensor {name} holds {tensor.dtype}, no floating-point "
            "numbers; quantized weights are not supported"
        )
    if not np.isfinite(tensor).all():
        raise InputError(
            f"{folder}: tensor {name} holds NaN or infinite values; the checkpoint is "
            "damaged"
        )


def common_dtype(names: Iterable[str]) -> jnp.dtype:
    """Returns the narrowest type that holds all of these floating-point types."""
    known = [jnp.dtype(name) for name in names if name in _FLOATS.values()]
    return functools.reduce(jnp.promote_types, known) if known else jnp.dtype("float32")


def convert(tensor: np.ndarray, dtype: jnp.dtype, what: str) -> np.ndarray:
    """Returns a tensor in another type.

    Args:
        tensor: Of finite numbers, if it was read from a file.
        dtype: Of the result.
        what: Names the tensor in a refusal.

    Raises:
        InputError: If a value is not finite, or not any more.
    """
    with np.errstate(over="ignore"):  # Told below.
        converted = tensor.astype(dtype, copy=False)
    if np.isfinite(converted).all():
        return converted
    if np.isfinite(tensor).all():
        raise InputError(
            f"{what} has values that {dtype} cannot hold; choose another dtype"
        )
    raise InputError(f"{what} holds NaN or infinite values")


def load_params(
    files: Weights,
    names: Any,
    shapes: Any,
    dtype: jnp.dtype,
    shardings: Any = None,
) -> Any:
    """Loads a parameter pytree tensor by tensor.

    Each tensor is read, checked, converted and handed to the device before the
    next, so the host holds at most one more than what was asked for. Where a
    sharding is given, each process reads the parts of its own devices.

    Args:
        files: The checkpoint.
        names: Pytree of tensor names.
        shapes: Pytree of `jax.ShapeDtypeStruct`, of the same structure.
        dtype: Of the result.
        shardings: A `jax.sharding.Sharding` for all, or a pytree of them of the same
            structure; `None` for the default device.

    Returns:
        Pytree of device arrays.

    Raises:
        InputError: If tensors are missing, unexpected, of the wrong shape or too
            large for `dtype`.
    """
    wanted = jax.tree.leaves(names)
    _refuse(files.folder, "lacks", set(wanted) - files.names())
    _refuse(files.folder, "holds unexpected", files.names() - set(wanted))

    def load(
        name: str,
        shape: jax.ShapeDtypeStruct,
        sharding: jax.sharding.Sharding | None = None,
    ) -> jax.Array:
        if sharding is not None:
            return _load_parts(files, name, shape.shape, dtype, sharding)
        tensor = files.read(name)
        _check_shape(files, name, tensor.shape, shape.shape)
        # Uncommitted: it follows what it is used with.
        return jax.device_put(_as_ours(files, name, tensor, dtype))

    if shardings is None:
        return jax.tree.map(load, names, shapes)
    if isinstance(shardings, jax.sharding.Sharding):
        return jax.tree.map(
            lambda *leaf: load(leaf[0], leaf[1], shardings), names, shapes
        )
    return jax.tree.map(load, names, shapes, shardings)


def _load_parts(
    files: Weights,
    name: str,
    shape: tuple[int, ...],
    dtype: jnp.dtype,
    sharding: jax.sharding.Sharding,
) -> jax.Array:
    stored_shape, read = files.parts(name)
    _check_shape(files, name, stored_shape, shape)
    known: dict[tuple[tuple[int, int], ...], np.ndarray] = {}

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        ends = [one.indices(n)[:2] for one, n in zip(index or (), shape, strict=True)]
        key = tuple(ends)
        if key not in known:  # Devices that hold the same read it once.
            in_file = ends[::-1] if is_transposed(name) else ends
            tensor = read(tuple(slice(*pair) for pair in in_file))
            known[key] = _as_ours(files, name, tensor, dtype)
        return known[key]

    return jax.make_array_from_callback(shape, sharding, part)


def _check_shape(
    files: Weights, name: str, stored: tuple[int, ...], ours: tuple[int, ...]
) -> None:
    wanted = ours[::-1] if is_transposed(name) else ours
    if stored != wanted:
        raise InputError(
            f"{files.folder}: tensor {name} has shape {stored}, but config.json asks "
            f"for {wanted}"
        )


def _as_ours(
    files: Weights, name: str, tensor: np.ndarray, dtype: jnp.dtype
) -> np.ndarray:
    """Returns a stored tensor, or a part of one, as models hold it."""
    if is_transposed(name):
        tensor = np.ascontiguousarray(tensor.T)
    if tensor.dtype != dtype:
        tensor = convert(tensor, dtype, f"{files.folder}: tensor {name}")
    return tensor


def _refuse(folder: Path, verb: str, names: Iterable[str]) -> None:
    listed = sorted(names)
    if listed:
        more = f" and {len(listed) - 8} more" if len(listed) > 8 else ""
        raise InputError(
            f"{folder} {verb} tensors: {', '.join(listed[:8])}{more}; the weights do "
            "not fit config.json"
        )


def open_safetensors(path: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of a safetensors file by name.

    Raises:
        InputError: If the file is broken.
    """
    try:
        file = safetensors.safe_open(path, framework="np")
    except (OSError, safetensors.SafetensorError) as error:
        raise InputError(f"{path} is no complete safetensors file: {error}") from error

    def stored(name: str) -> StoredTensor:
        view = file.get_slice(name)
        return StoredTensor(
            dtype=_FLOATS.get(view.get_dtype(), "other"),
            shape=tuple(view.get_shape()),
            read=functools.partial(file.get_tensor, name),
            read_part=lambda part: view[part],
        )

    return {name: stored(name) for name in file.keys()}  # noqa: SIM118  No dictionary.


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
        # Mapped into memory: tensors are read from disk one by one.
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise InputError(
            f"{path} is no readable torch checkpoint: {first_line(error)}"
        ) from error
    if not isinstance(tensors, dict) or not all(
        isinstance(tensor, torch.Tensor) for tensor in tensors.values()
    ):
        raise InputError(f"{path} is no table of tensors, but some other torch file")

    def read(tensor: Any) -> np.ndarray:
        if tensor.dtype == torch.bfloat16:  # NumPy has no bfloat16 of its own.
            return tensor.view(torch.int16).numpy().view(jnp.bfloat16)
        return tensor.numpy()

    return {
        name: StoredTensor(
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            read=functools.partial(read, tensor),
            read_part=lambda part, tensor=tensor: read(tensor[part]),
        )
        for name, tensor in tensors.items()
    }
