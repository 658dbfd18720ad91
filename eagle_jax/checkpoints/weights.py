"""Loading weights tensor by tensor, each process the parts of its own devices."""

import functools
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from eagle_jax.checkpoints.hub import file_inside
from eagle_jax.checkpoints.names import MAPS, is_quantized, is_transposed
from eagle_jax.checkpoints.tensors import (
    Ends,
    Part,
    StoredTensor,
    blocks,
    copy_common,
    empty,
    local_parts,
    open_bin,
    open_safetensors,
    put,
    transposed,
)
from eagle_jax.errors import InputError, first_line
from eagle_jax.models.quantized import QuantizedMatrix, quantize
from eagle_jax.parsing import read_json

# Buffers that older checkpoints carry; they follow from the settings.
_DERIVED = ("rotary_emb.inv_freq",)

_FLOATS = ("float64", "float32", "float16", "bfloat16")
# Of those with two bytes: the bits that only NaN and infinite values have all set.
_EXPONENTS = {"float16": 0x7C00, "bfloat16": 0x7F80}

_READERS = min(4, os.cpu_count() or 1)


class Weights(Protocol):
    """The tensors of a checkpoint folder by name, read when asked for.

    Attributes:
        folder: Holds them.
        bits: Of its quantized matrices, `None` if it has none.
    """

    folder: Path
    bits: int | None

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

    def parts(
        self, name: str, sharding: Sharding | None = None
    ) -> tuple[tuple[int, ...], Callable[[Part], np.ndarray]]:
        """Returns the shape of a tensor, and what `read` would give of its parts.

        Args:
            name: Of the tensor.
            sharding: Of the tensor as it is stored: no other parts are asked for than
                those of this process's devices. `None` if any may be.

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
        self.bits: int | None = None
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

    def parts(
        self, name: str, sharding: Sharding | None = None
    ) -> tuple[tuple[int, ...], Callable[[Part], np.ndarray]]:
        """See `Weights.parts`."""
        del sharding
        stored = self._stored[name]

        def read(part: Part) -> np.ndarray:
            return self._checked(name, functools.partial(stored.read_part, part))

        return stored.shape, read

    def _checked(self, name: str, read: Callable[[], np.ndarray]) -> np.ndarray:
        try:
            tensor = read()
        except (OSError, RuntimeError) as error:
            raise InputError(
                f"{self.folder}: cannot read {name}: {first_line(error)}"
            ) from error
        check_tensor(self.folder, name, tensor)
        return tensor

    def _open_shards(self, index: Path) -> None:
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise InputError(f"{index} holds no weight_map")
        if not all(isinstance(shard, str) for shard in weight_map.values()):
            raise InputError(f"{index}: weight_map must give a file name per tensor")
        for shard in sorted(set(weight_map.values())):
            path = file_inside(self.folder, shard, index.name)
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
            numbers, and is no map between vocabularies and no quantized matrix.
    """
    if name in MAPS and tensor.dtype.kind in "biu":
        return
    if is_quantized(name) and tensor.dtype == np.int8:
        return
    if not jnp.issubdtype(tensor.dtype, jnp.floating):
        raise InputError(
            f"{folder}: tensor {name} holds {tensor.dtype}, no floating-point "
            "numbers; weights that others quantized are not supported"
        )
    if not _is_finite(tensor):
        raise InputError(
            f"{folder}: tensor {name} holds NaN or infinite values; the checkpoint is "
            "damaged"
        )


def common_dtype(names: Iterable[str]) -> jnp.dtype:
    """Returns the narrowest type that holds all of these floating-point types."""
    known = [jnp.dtype(name) for name in names if name in _FLOATS]
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
    if _is_finite(converted):
        return converted
    if _is_finite(tensor):
        raise InputError(
            f"{what} has values that {dtype} cannot hold; choose another dtype"
        )
    raise InputError(f"{what} holds NaN or infinite values")


def _is_finite(tensor: np.ndarray) -> bool:
    """Returns whether no value is NaN or infinite; for bfloat16 NumPy takes long."""
    exponent = _EXPONENTS.get(tensor.dtype.name)
    if exponent is None:
        return bool(np.isfinite(tensor).all())
    bits = tensor.view(np.uint16) & np.uint16(exponent)
    return bool(bits.max(initial=0) < exponent)


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
    sharding is given, each process reads the parts of its own devices. A CPU device
    holds what was read, and there is no second copy of it.

    Args:
        files: The checkpoint.
        names: Pytree of tensor names.
        shapes: Pytree of `jax.ShapeDtypeStruct`, of the same structure; a
            `QuantizedMatrix` of them for a matrix that is to be quantized.
        dtype: Of the result, except for the parts of quantized matrices.
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

    with ThreadPoolExecutor(_READERS) as readers:

        def load(name: str, shape: Any, sharding: Any = None) -> Any:
            if isinstance(shape, QuantizedMatrix):
                array = _load_wide(readers, files, name, shape, sharding)
            else:
                kind = shape.dtype if is_quantized(name) else dtype
                array = _load(readers, files, name, shape.shape, kind, sharding)
            return jax.block_until_ready(array)  # Else the host may hold many.

        if shardings is None or isinstance(shardings, Sharding):
            return jax.tree.map(
                lambda name, shape: load(name, shape, shardings), names, shapes
            )
        return jax.tree.map(load, names, shapes, shardings)


def _load_wide(
    readers: Executor, files: Weights, name: str, shape: QuantizedMatrix, sharding: Any
) -> QuantizedMatrix:
    """Loads one matrix and quantizes it.

    From float32, which holds what any checkpoint holds: so the integers do not depend
    on the dtype of the other weights, and those of a store are the same.
    """
    wide: Any = sharding.values if isinstance(sharding, QuantizedMatrix) else sharding
    matrix = _load(readers, files, name, shape.shape, jnp.dtype("float32"), wide)
    return jax.jit(quantize, static_argnums=1, out_shardings=sharding)(
        matrix, shape.bits
    )


def _load(
    readers: Executor,
    files: Weights,
    name: str,
    shape: tuple[int, ...],
    dtype: jnp.dtype,
    sharding: Sharding | None,
) -> jax.Array:
    """Loads one tensor."""
    is_turned = is_transposed(name)
    stored_shape, read = files.parts(
        name, transposed(sharding, len(shape)) if is_turned else sharding
    )
    _check_shape(files, name, stored_shape, shape)
    parts = {
        ends: empty([stop - start for start, stop in ends], dtype)
        for ends in local_parts(sharding, shape)
    }
    in_file = parts
    if is_turned:
        in_file = {ends[::-1]: part.T for ends, part in parts.items()}

    def fill(block: Ends) -> None:
        tensor = read(tuple(slice(*pair) for pair in block))
        if tensor.dtype != dtype:
            tensor = convert(tensor, dtype, f"{files.folder}: tensor {name}")
        for ends, part in in_file.items():
            copy_common(part, ends, tensor, block)

    for _ in readers.map(fill, blocks(in_file, dtype.itemsize)):
        pass  # Raises what a reader raised.
    return put(parts, shape, sharding)


def _check_shape(
    files: Weights, name: str, stored: tuple[int, ...], ours: tuple[int, ...]
) -> None:
    wanted = ours[::-1] if is_transposed(name) else ours
    if stored != wanted:
        raise InputError(
            f"{files.folder}: tensor {name} has shape {stored}, but config.json asks "
            f"for {wanted}"
        )


def _refuse(folder: Path, verb: str, names: Iterable[str]) -> None:
    listed = sorted(names)
    if listed:
        more = f" and {len(listed) - 8} more" if len(listed) > 8 else ""
        raise InputError(
            f"{folder} {verb} tensors: {', '.join(listed[:8])}{more}; the weights do "
            "not fit config.json"
        )
