"""Reading tensors one by one from safetensors or `.bin` files."""

import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors

from eagle_jax.checkpoints.source import first_line, read_json
from eagle_jax.errors import InputError

# Buffers that older checkpoints carry; they follow from the settings.
_DERIVED = ("rotary_emb.inv_freq",)


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
        self._readers: dict[str, Callable[[str], np.ndarray]] = {}
        for stem, kind in (("model", "safetensors"), ("pytorch_model", "bin")):
            index = folder / f"{stem}.{kind}.index.json"
            single = folder / f"{stem}.{kind}"
            if single.is_file():
                self._open(single, None)
            elif index.is_file():
                self._open_shards(index)
            if self._readers:
                return
        raise InputError(
            f"{folder} holds no weights: neither model.safetensors nor "
            "pytorch_model.bin, nor an index of shards"
        )

    def names(self) -> set[str]:
        """Returns the names of all tensors that a model may need."""
        return {name for name in self._readers if not name.endswith(_DERIVED)}

    def forget(self, name: str) -> None:
        """Leaves out a tensor that repeats another."""
        self._readers.pop(name, None)

    def read(self, name: str) -> np.ndarray:
        """Returns one tensor.

        Raises:
            InputError: If it cannot be read, or holds something else than finite
                floating-point numbers.
        """
        try:
            tensor = self._readers[name](name)
        except (OSError, RuntimeError, safetensors.SafetensorError) as error:
            raise InputError(f"{self.folder}: cannot read {name}: {error}") from error
        if not jnp.issubdtype(tensor.dtype, jnp.floating):
            raise InputError(
                f"{self.folder}: tensor {name} holds {tensor.dtype}, no floating-point "
                "numbers; quantized weights are not supported"
            )
        if not np.isfinite(tensor).all():
            raise InputError(
                f"{self.folder}: tensor {name} holds NaN or infinite values; the "
                "checkpoint is damaged"
            )
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
        opened = _open_safetensors(path) if is_safetensors else _open_bin(path)
        missing = sorted((wanted or set()) - set(opened))
        if missing:
            raise InputError(f"{path} lacks {missing[0]}, which its index names")
        repeated = sorted(set(opened) & set(self._readers))
        if repeated:
            raise InputError(f"{path} holds {repeated[0]}, as another shard does")
        self._readers.update(opened)


def load_params(files: TensorFiles, names: Any, shapes: Any, dtype: jnp.dtype) -> Any:
    """Loads a parameter pytree tensor by tensor.

    Each tensor is read, checked, converted and handed to the device before the
    next, so the host holds at most one more than what was asked for.

    Args:
        files: The checkpoint.
        names: Pytree of tensor names.
        shapes: Pytree of `jax.ShapeDtypeStruct`, of the same structure.
        dtype: Of the result.

    Returns:
        Pytree of device arrays.

    Raises:
        InputError: If tensors are missing, unexpected or of the wrong shape.
    """
    wanted = jax.tree.leaves(names)
    _refuse(files.folder, "lacks", set(wanted) - files.names())
    _refuse(files.folder, "holds unexpected", files.names() - set(wanted))

    def load(name: str, shape: jax.ShapeDtypeStruct) -> jax.Array:
        tensor = files.read(name)
        if tensor.shape != shape.shape:
            raise InputError(
                f"{files.folder}: tensor {name} has shape {tensor.shape}, but "
                f"config.json asks for {shape.shape}"
            )
        return jax.device_put(tensor.astype(dtype, copy=False))

    return jax.tree.map(load, names, shapes)


def _refuse(folder: Path, verb: str, names: Iterable[str]) -> None:
    listed = sorted(names)
    if listed:
        more = f" and {len(listed) - 8} more" if len(listed) > 8 else ""
        raise InputError(
            f"{folder} {verb} tensors: {', '.join(listed[:8])}{more}; the weights do "
            "not fit config.json"
        )


def _open_safetensors(path: Path) -> dict[str, Callable[[str], np.ndarray]]:
    try:
        file = safetensors.safe_open(path, framework="np")
    except (OSError, safetensors.SafetensorError) as error:
        raise InputError(f"{path} is no complete safetensors file: {error}") from error
    return dict.fromkeys(file.keys(), file.get_tensor)


def _open_bin(path: Path) -> dict[str, Callable[[str], np.ndarray]]:
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

    def read(name: str) -> np.ndarray:
        tensor = tensors[name]
        if tensor.dtype == torch.bfloat16:  # NumPy has no bfloat16 of its own.
            return tensor.view(torch.int16).numpy().view(jnp.bfloat16)
        return tensor.numpy()

    return dict.fromkeys(tensors, read)
