"""The tensors of a checkpoint by name, whichever way it is stored."""

import functools
from collections.abc import Iterable
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from eagle_jax.checkpoints.gguf_folder import open_gguf
from eagle_jax.checkpoints.hf_fields import DTYPES, warn_once
from eagle_jax.checkpoints.hub import WEIGHT_FILES
from eagle_jax.checkpoints.names import MAPS
from eagle_jax.checkpoints.scaled import LEFT_OUT, Block, unscaled
from eagle_jax.checkpoints.stacks import parted, split, stacked
from eagle_jax.checkpoints.tensors import Part, StoredTensor, open_bin, open_safetensors
from eagle_jax.errors import InputError, first_line, shortened
from eagle_jax.models.layers import LayerConfig
from eagle_jax.models.mlp import CLAMPED
from eagle_jax.parsing import read_json

# Buffers that older checkpoints carry; they follow from the settings.
_DERIVED = ("rotary_emb.inv_freq",)
# What a Gemma 3 has beside its text model.
_VISION = ("vision_tower.", "multi_modal_projector.")

_FLOATS = ("float64", *DTYPES)
# The bits that only NaN and infinite values have all set, by types of two bytes.
_EXPONENTS = {"float16": 0x7C00, "bfloat16": 0x7F80}


class Weights:
    """The tensors of a checkpoint folder by name, read when asked for.

    Attributes:
        folder: The folder of the checkpoint.
    """

    def __init__(self, folder: Path, stored: dict[str, StoredTensor]) -> None:
        """Keeps what is known before any tensor is read."""
        self.folder = folder
        self._stored = stored

    def names(self) -> set[str]:
        """Returns the names of all tensors that a model may need."""
        return {name for name in self._stored if not name.endswith(_DERIVED)}

    def forget(self, name: str) -> None:
        """Leaves a tensor out of `names`, if it is there."""
        self._stored.pop(name, None)

    def leave_out(self, names: Iterable[str], reason: str) -> None:
        """Leaves tensors out of `names` that nobody reads; one warning names them."""
        if listed := self.names().intersection(names):
            told = f"{self.folder} holds tensors that are not read, as {reason}"
            warn_once(f"{told}: {shortened(listed, 3)}")
        for name in listed:
            self.forget(name)

    def take_text(self) -> None:
        """Leaves out what reads images, and names the rest as if it were alone."""
        vision = [name for name in self._stored if name.startswith(_VISION)]
        self.leave_out(vision, "prompts are text alone")
        self._stored = {
            name.removeprefix("language_model."): tensor
            for name, tensor in self._stored.items()
        }

    def unscale(self, block: Block) -> None:
        """Reads matrices of 8 bits as what they stand for, see `scaled`."""
        others = [name for name in self._stored if name.endswith(LEFT_OUT)]
        self.leave_out(others, "only weights are quantized here")
        self._stored = unscaled(self._stored, block)

    def arrange(self, layer: LayerConfig) -> None:
        """Names the experts' tensors together and joined matrices apart: `stacks`."""
        if layer.activation == CLAMPED:
            self._stored = parted(self._stored)
        else:
            self._stored = stacked(split(self._stored, layer))

    def dtype(self, asked: str | None) -> jnp.dtype:
        """Returns the dtype asked for, or else the narrowest that holds all tensors."""
        if asked is not None:
            return jnp.dtype(asked)
        kinds = {self._stored[name].dtype for name in self.names()}
        known = [jnp.dtype(kind) for kind in kinds.intersection(_FLOATS)]
        found = functools.reduce(jnp.promote_types, known or [jnp.dtype("float32")])
        if found.name not in DTYPES:
            raise InputError(
                f"{self.folder} holds {found}; choose one of {', '.join(DTYPES)} with "
                "`dtype`"
            )
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor."""
        return self._stored[name].shape

    def read(self, name: str, part: Part | None = None) -> np.ndarray:
        """Reads a tensor of finite floating-point numbers, or one of `MAPS`.

        Args:
            name: The tensor's name.
            part: The part of it to read, alone; `None` for all of it.

        Raises:
            InputError: If the part cannot be read, or holds something else.
        """
        if part is None:
            part = tuple((0, size) for size in self.shape(name))
        try:
            tensor = self._stored[name].read_part(part)
        except (OSError, RuntimeError, ValueError, LookupError) as error:
            raise InputError(
                f"{self.folder}: cannot read {name}: {first_line(error)}"
            ) from error
        if name in MAPS and tensor.dtype.kind in "biu":
            return tensor
        if not jnp.issubdtype(tensor.dtype, jnp.floating) or tensor.itemsize == 1:
            raise InputError(
                f"{self.folder}: tensor {name} holds {tensor.dtype}, no floating-point "
                "numbers; weights that others quantized are read only with the "
                "quantization_config that says how"
            )
        if not is_finite(tensor):
            raise InputError(
                f"{self.folder}: tensor {name} holds NaN or infinite values; the "
                "checkpoint is damaged"
            )
        return tensor


def open_weights(folder: Path) -> Weights:
    """Opens the weights of a checkpoint, whichever way they are stored.

    In a Hugging Face folder `model.safetensors`, its sharded form with an index,
    `pytorch_model.bin` and its sharded form are looked for in this order, then the
    files of Medusa's and Hydra's heads, and GGUF files. A `.bin` or `.pt` file is a
    pickle: it is read only through torch with `weights_only=True`.

    Args:
        folder: A Hugging Face folder.

    Raises:
        InputError: If weights are missing or broken, as far as that can be seen
            without reading them.
    """
    for stem, kind in WEIGHT_FILES:
        index = folder / f"{stem}.{kind}.index.json"
        if (folder / f"{stem}.{kind}").is_file():
            if index.is_file():
                warn_once(
                    f"{folder} holds {stem}.{kind} and the shards of {index.name}; the "
                    "single file is read, as by transformers: remove the other ones"
                )
            return Weights(folder, _open_file(folder / f"{stem}.{kind}"))
        if index.is_file():
            return Weights(folder, _open_shards(index))
    if (stored := open_gguf(folder)) is not None:
        return Weights(folder, stored)
    raise InputError(
        f"{folder} holds no weights: neither model.safetensors nor pytorch_model.bin, "
        "nor an index of shards, nor medusa_lm_head or hydra_lm_head as .safetensors "
        "or .pt, nor a .gguf file"
    )


def _open_file(path: Path) -> dict[str, StoredTensor]:
    return (open_safetensors if path.suffix == ".safetensors" else open_bin)(path)


def _open_shards(index: Path) -> dict[str, StoredTensor]:
    found = read_json(index).get("weight_map")
    weight_map = found if isinstance(found, dict) else {}
    if not weight_map or not all(isinstance(x, str) for x in weight_map.values()):
        raise InputError(f"{index}: weight_map must give a file name per tensor")
    stored: dict[str, StoredTensor] = {}
    for shard in sorted(set(weight_map.values())):
        path = _file_inside(index, shard)
        opened = _open_file(path)
        for name in opened.keys() & stored.keys():
            raise InputError(f"{path} holds {name}, as another shard does")
        for name, place in weight_map.items():
            if place == shard and name not in opened:
                raise InputError(f"{path} lacks {name}, which its index names")
        stored |= opened
    return stored


def _file_inside(index: Path, name: str) -> Path:
    """Returns a file that an index names by a path relative to the index.

    It must lie in the checkpoint's folder, also where links lead; those of the hub's
    cache lead from `snapshots/REVISION` to `blobs`, the only place outside.
    """
    path, where = index.parent / name, f"{index} names {name!r}"
    try:
        homes = [index.parent.resolve()]
        real, is_file = path.resolve(), path.is_file()
    except (OSError, RuntimeError, ValueError) as error:
        raise InputError(f"{where}: {error}") from error
    if homes[0].parent.name == "snapshots":
        homes.append((homes[0].parent.parent / "blobs").resolve())
    if not any(real.is_relative_to(home) for home in homes):
        raise InputError(f"{where}, which lies outside its folder; put the file there")
    if not is_file:
        raise InputError(f"{where}, but {path} is missing")
    return path


def is_finite(tensor: np.ndarray) -> bool:
    """Returns whether every value is finite, by its bits where NumPy takes long."""
    exponent = _EXPONENTS.get(tensor.dtype.name)
    if exponent is None:
        return bool(np.isfinite(tensor).all())
    bits = tensor.view(np.uint16) & np.uint16(exponent)
    return bool(bits.max(initial=0) < exponent)
