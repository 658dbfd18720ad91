"""The tensors of a checkpoint by name, whichever way it is stored."""

import abc
import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from eagle_jax.checkpoints.hub import STORE_LIST, WEIGHT_FILES, file_inside
from eagle_jax.checkpoints.names import MAPS, is_quantized
from eagle_jax.checkpoints.tensors import (
    Part,
    StoredTensor,
    ends_of,
    local_part,
    open_bin,
    open_safetensors,
)
from eagle_jax.errors import InputError, first_line
from eagle_jax.parsing import read_json, value_at

STORE_PARAMS = "params"
"""The name of the Orbax folder in one half of a converted pair."""

# Buffers that older checkpoints carry; they follow from the settings.
_DERIVED = ("rotary_emb.inv_freq",)

_FLOATS = ("float64", "float32", "float16", "bfloat16")
# The bits that only NaN and infinite values have all set, by types of two bytes.
_EXPONENTS = {"float16": 0x7C00, "bfloat16": 0x7F80}


class Weights(abc.ABC):
    """The tensors of a checkpoint folder by name, read when asked for.

    Attributes:
        folder: The folder of the checkpoint.
        bits: The bits of its quantized matrices, 8 or 4; `None` if it has none.
    """

    def __init__(
        self, folder: Path, dtypes: dict[str, str], bits: int | None = None
    ) -> None:
        """Keeps what is known before any tensor is read: folder, bits and dtypes."""
        self.folder = folder
        self.bits = bits
        self._dtypes = dtypes

    def names(self) -> set[str]:
        """Returns the names of all tensors that a model may need."""
        return {name for name in self._dtypes if not name.endswith(_DERIVED)}

    def forget(self, name: str) -> None:
        """Leaves a tensor out of `names`, if it is there."""
        self._dtypes.pop(name, None)

    def dtype(self) -> jnp.dtype:
        """Returns the narrowest type that holds every unquantized tensor exactly."""
        return common_dtype({name: self._dtypes[name] for name in self.names()})

    def read(self, name: str) -> np.ndarray:
        """Returns one tensor of finite floating-point numbers, or one of `MAPS`.

        Raises:
            InputError: If the tensor cannot be read, or holds something else.
        """
        shape, read = self.parts(name)
        return read(tuple(slice(0, size) for size in shape))

    @abc.abstractmethod
    def parts(
        self, name: str, sharding: Sharding | None = None
    ) -> tuple[tuple[int, ...], Callable[[Part], np.ndarray]]:
        """Returns the shape of a tensor, and a function that reads its parts.

        Args:
            name: The tensor's name.
            sharding: The sharding of the tensor as it is stored, of which only the
                parts of this process's devices are read; `None` if any part may be.

        Raises:
            InputError: If the tensor cannot be read, or holds something else, at the
                latest when a part is read.
        """
        ...


def open_weights(folder: Path) -> Weights:
    """Opens the weights of a checkpoint, whichever way they are stored.

    Args:
        folder: A Hugging Face folder or one half of a converted pair, which is known
            by its `params/`.

    Raises:
        InputError: If weights are missing or broken, as far as that can be seen
            without reading them.
    """
    if (folder / STORE_PARAMS).is_dir():
        return StoreFiles(folder)
    return TensorFiles(folder)


class TensorFiles(Weights):
    """The tensors of a Hugging Face folder by name, read when asked for.

    `model.safetensors`, its sharded form with an index, `pytorch_model.bin` and its
    sharded form are looked for in this order, then the files of Medusa's and Hydra's
    heads. A `.bin` or `.pt` file is a pickle: it is read only through torch with
    `weights_only=True`.
    """

    def __init__(self, folder: Path) -> None:
        """Lists the tensors of a folder.

        Args:
            folder: The folder that holds the weights.

        Raises:
            InputError: If there are no weights, or a file is missing or broken.
        """
        self.folder = folder
        self._stored: dict[str, StoredTensor] = {}
        for stem, kind in WEIGHT_FILES:
            index = folder / f"{stem}.{kind}.index.json"
            single = folder / f"{stem}.{kind}"
            if single.is_file():
                self._open(single, None)
            elif index.is_file():
                self._open_shards(index)
            if self._stored:
                break
        else:
            raise InputError(
                f"{folder} holds no weights: neither model.safetensors nor "
                "pytorch_model.bin, nor an index of shards, nor medusa_lm_head or "
                "hydra_lm_head as .safetensors or .pt"
            )
        super().__init__(folder, {n: one.dtype for n, one in self._stored.items()})

    def parts(
        self, name: str, sharding: Sharding | None = None
    ) -> tuple[tuple[int, ...], Callable[[Part], np.ndarray]]:
        """Returns a tensor's shape and what reads its parts, see `Weights.parts`."""
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


class StoreFiles(Weights):
    """The tensors of one half of a converted pair, see `orbax_store`."""

    def __init__(self, folder: Path) -> None:
        """Lists the tensors of a folder.

        Args:
            folder: The folder that holds `store.json` and `params/`.

        Raises:
            InputError: If the list is missing or damaged.
        """
        listed = read_json(folder / STORE_LIST)
        bits, tensors = listed.get("bits"), listed.get("tensors")
        entries = tensors if isinstance(tensors, dict) else {"": tensors}
        dtypes = {name: value_at(entry, "dtype") for name, entry in entries.items()}
        are_dtypes = all(isinstance(dtype, str) for dtype in dtypes.values())
        if bits not in (None, 8, 4) or not are_dtypes:
            raise InputError(
                f"{folder / STORE_LIST} is damaged; convert the checkpoint again"
            )
        super().__init__(folder, dtypes, bits)

    def parts(
        self, name: str, sharding: Sharding | None = None
    ) -> tuple[tuple[int, ...], Callable[[Part], np.ndarray]]:
        """Returns a tensor's shape and what reads its parts, see `Weights.parts`."""
        array = self._restore(name, sharding)

        def read(part: Part) -> np.ndarray:
            if sharding is None:
                tensor = array[part]
            else:
                tensor = local_part(array, ends_of(part, array.shape))
            check_tensor(self.folder, name, tensor)
            return tensor

        return array.shape, read

    def _restore(self, name: str, sharding: Sharding | None) -> Any:
        """Returns a tensor as it is stored, as a NumPy array without a sharding."""
        # Imported here: it takes a second, and most checkpoints need it not.
        import orbax.checkpoint as ocp

        kind = ocp.RestoreArgs(restore_type=np.ndarray)
        if sharding is not None:
            kind = ocp.ArrayRestoreArgs(sharding=sharding)
        wanted = ocp.args.PyTreeRestore(
            item={name: 0}, restore_args={name: kind}, partial_restore=True
        )
        path = (self.folder / STORE_PARAMS).resolve()
        try:
            with quiet(), ocp.PyTreeCheckpointer() as checkpointer:
                return checkpointer.restore(path, args=wanted)[name]
        except Exception as error:  # Orbax and tensorstore have many kinds.
            raise InputError(
                f"{self.folder}: cannot read {name}: {first_line(error)}; "
                "convert the checkpoint again"
            ) from error


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
    if not is_finite(tensor):
        raise InputError(
            f"{folder}: tensor {name} holds NaN or infinite values; the checkpoint is "
            "damaged"
        )


def common_dtype(dtypes: dict[str, str]) -> jnp.dtype:
    """Returns the narrowest type that holds all tensors that are not quantized.

    Args:
        dtypes: The dtypes by tensor name; those that are no floating-point types do
            not count.
    """
    known = [
        jnp.dtype(dtype)
        for name, dtype in dtypes.items()
        if dtype in _FLOATS and not is_quantized(name)
    ]
    return functools.reduce(jnp.promote_types, known) if known else jnp.dtype("float32")


def is_finite(tensor: np.ndarray) -> bool:
    """Returns whether every value is finite, by its bits where NumPy takes long."""
    exponent = _EXPONENTS.get(tensor.dtype.name)
    if exponent is None:
        return bool(np.isfinite(tensor).all())
    bits = tensor.view(np.uint16) & np.uint16(exponent)
    return bool(bits.max(initial=0) < exponent)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps Orbax from logging its own tracebacks beside our one line."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)
