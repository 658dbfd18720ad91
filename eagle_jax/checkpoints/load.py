"""Loads targets tensor by tensor; each process reads the parts of its own devices."""

import dataclasses
import math
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from eagle_jax.checkpoints.families import FAMILIES
from eagle_jax.checkpoints.hf_config import target_config
from eagle_jax.checkpoints.hf_fields import Fields, warn_once
from eagle_jax.checkpoints.names import (
    GEMMA,
    MIXTRAL,
    TRANSFORMER,
    is_transposed,
    tensor_names,
    transposed,
)
from eagle_jax.checkpoints.scaled import read_scheme
from eagle_jax.checkpoints.tensors import Part, read_blocks
from eagle_jax.checkpoints.weights import Weights, is_finite, open_weights
from eagle_jax.errors import InputError, shortened
from eagle_jax.models import transformer
from eagle_jax.models.quantized import (
    GROUP_SIZE,
    QuantizedMatrix,
    has_groups,
    quantize,
    quantize_layers,
)
from eagle_jax.models.transformer import TransformerConfig, TransformerParams
from eagle_jax.prng import make_key

Tree = TypeVar("Tree")

_READERS = min(4, os.cpu_count() or 1)
# Rows of two tables that are compared at once.
_ROWS = 4096


def open_target(folder: Path) -> tuple[TransformerConfig, Weights]:
    """Reads the sizes of a target and lists its tensors.

    None is read, but for an output head that is stored although the settings tie it to
    the embedding table: like in transformers, it counts where the two differ.

    Args:
        folder: The target's folder, from `resolve`.

    Raises:
        InputError: If settings or files cannot be used, or the files have fewer layers
            than the settings say: as many would be planned first.
    """
    config, files = target_config(folder), open_weights(folder)
    fields = Fields.read(folder)
    if FAMILIES[fields.get("model_type", "")].is_nested:
        files.take_text()
    block = read_scheme(fields)
    try:
        if block is not None:
            files.unscale(block)
        files.arrange(config.layer)
    except InputError as error:
        raise InputError(f"{folder}: {error}") from error
    if config.tie_embeddings and not _is_tied(files):
        config = dataclasses.replace(config, tie_embeddings=False)
    last = f"model.layers.{config.num_layers - 1}."
    if not any(name.startswith(last) for name in files.names()):
        raise InputError(
            f"{folder / 'config.json'}: num_hidden_layers = {config.num_layers:,}, but "
            "the files of weights have fewer; the weights do not fit config.json"
        )
    return config, files


def load_target(
    folder: Path,
    dtype: str | None = "float32",
    shardings: Any = None,
    bits: int | None = None,
) -> tuple[TransformerConfig, TransformerParams]:
    """Loads a target's sizes and weights.

    Args:
        folder: The target's folder, from `resolve`.
        dtype: The dtype of the weights; `None` for the one they are stored in.
        shardings: A `jax.sharding.Sharding` for all weights, or one for each in a
            `TransformerParams`; `None` for the default device.
        bits: 8 or 4 to quantize the matrices of its layers as they are read; `None`
            to take them as they are stored.

    Raises:
        InputError: If the target cannot be used, naming the field or tensor.
    """
    config, files = open_target(folder)
    check_bits(config, bits)
    stored = target_shapes(config, None)
    table = GEMMA if config.layer.output_norms else TRANSFORMER
    if any(".block_sparse_moe." in name for name in files.names()):
        table = MIXTRAL
    wanted = tensor_names(stored, table)
    check_shapes(files, wanted, stored)
    kind, shapes = files.dtype(dtype), target_shapes(config, bits)
    return config, load_params(files, wanted, shapes, kind, shardings)


def _is_tied(files: Weights) -> bool:
    """Returns whether one table is all that is stored, and leaves out a copy of it."""
    table, head = (TRANSFORMER[name] for name in ("embedding", "output_head"))
    if not files.names() >= {table, head}:
        return True
    size, *others = files.shape(table)
    rows = [(n, min(n + _ROWS, size)) for n in range(0, size, _ROWS)]
    parts = [(some, *((0, n) for n in others)) for some in rows]
    is_same = files.shape(table) == files.shape(head) and all(
        np.array_equal(files.read(table, x), files.read(head, x)) for x in parts
    )
    if is_same:
        files.forget(head)
    else:
        warn_once(
            f"{files.folder}: tie_word_embeddings = true, but {head} is stored and is "
            f"not {table}; it counts, as in transformers: set the field to false"
        )
    return is_same


def target_shapes(config: TransformerConfig, bits: int | None) -> TransformerParams:
    """Returns the shapes of a target's weights, quantized to the bits, if any."""
    shapes = shapes_of(transformer.init_params, config)
    if bits is None:
        return shapes
    return jax.eval_shape(lambda params: quantize_layers(params, bits), shapes)


def check_bits(config: TransformerConfig, bits: int | None) -> None:
    """Refuses bits of quantized matrices, 8 or 4, that a target's sizes do not allow.

    Those of `None` are not quantized.
    """
    if bits is None:
        return
    prefix = "moe_" if config.layer.expert_size else ""
    sizes = {
        "hidden_size": config.layer.hidden_size,
        f"{prefix}intermediate_size": config.layer.inner_size,
        "heads times head_dim": config.layer.num_heads * config.layer.head_dim,
    }
    for name, size in sizes.items():
        if not has_groups(size, bits):
            raise InputError(
                f"int{bits} weights have a scale for each {GROUP_SIZE} inputs, which "
                f"do not divide {name} = {size}; choose `quantization` int8 or none"
            )


def read_embedding(folder: Path, dtype: str) -> jax.Array:
    """Loads a target's embedding table, `[V, E]` of `dtype`, and nothing else."""
    config, files = open_target(folder)
    name = TRANSFORMER["embedding"]
    for other in files.names() - {name}:
        files.forget(other)
    shape = target_shapes(config, None).embedding
    check_shapes(files, name, shape)
    return load_params(files, name, shape, jnp.dtype(dtype))


def check_max_length(
    max_positions: int, max_length: int, name: str = "max_length"
) -> None:
    """Refuses a length, by its setting's name, beyond the target's positions."""
    if max_length > max_positions:
        raise InputError(
            f"{name} = {max_length} is more than the target's "
            f"{max_positions} positions (max_position_embeddings)"
        )


def shapes_of(init: Callable[..., Tree], *sizes: Any) -> Tree:
    """Returns the shapes of the weights that `init` makes, without making any."""
    return jax.eval_shape(lambda: init(make_key(0), *sizes))


def load_params(
    files: Weights, names: Any, shapes: Any, dtype: jnp.dtype, shardings: Any = None
) -> Any:
    """Loads a parameter pytree of device arrays tensor by tensor.

    Each tensor is read, checked, converted and handed to the device before the
    next, so the host holds at most one more than what was asked for. Each process
    reads the parts of its own devices. A CPU device holds what was read, and there is
    no second copy of it.

    Args:
        files: The checkpoint.
        names: A pytree of tensor names, checked by `check_shapes`.
        shapes: A pytree of `jax.ShapeDtypeStruct`, of the same structure; a
            `QuantizedMatrix` of them for a matrix that is to be quantized.
        dtype: The dtype of the result, except for the parts of quantized matrices.
        shardings: A `jax.sharding.Sharding` for all, or a pytree of them of the same
            structure; `None` for the default device.

    Raises:
        InputError: If a tensor cannot be read, or is too large for `dtype`.
    """
    from tqdm import tqdm

    sizes = [math.prod(files.shape(name)) for name in jax.tree.leaves(names)]
    bar = tqdm(
        desc=f"loading {files.folder.name}",
        total=sum(sizes) * dtype.itemsize,
        unit="B",
        unit_scale=True,
        delay=2,  # Seconds within which nothing is shown.
        disable=None,  # Where there is no terminal.
    )
    with bar, ThreadPoolExecutor(_READERS) as readers:

        def load(name: str, shape: Any, sharding: Any = None) -> Any:
            if not isinstance(shape, QuantizedMatrix):
                array = _load(readers, files, name, shape.shape, dtype, sharding)
            else:  # In float32: the integers do not depend on the dtype of the others.
                is_split = isinstance(sharding, QuantizedMatrix)
                wide: Any = sharding.values if is_split else sharding
                kind = jnp.dtype("float32")
                matrix = _load(readers, files, name, shape.shape, kind, wide)
                narrow = jax.jit(quantize, static_argnums=1, out_shardings=sharding)
                array = narrow(matrix, shape.bits)
            jax.block_until_ready(array)  # Else the host may hold many.
            bar.update(math.prod(shape.shape) * dtype.itemsize)
            return array

        if shardings is None or isinstance(shardings, Sharding):
            return jax.tree.map(
                lambda name, shape: load(name, shape, shardings), names, shapes
            )
        return jax.tree.map(load, names, shapes, shardings)


def check_shapes(files: Weights, names: Any, shapes: Any) -> None:
    """Refuses a checkpoint before any tensor is read.

    Args:
        files: The checkpoint.
        names: A pytree of tensor names.
        shapes: A pytree of `jax.ShapeDtypeStruct`, of the same structure.

    Raises:
        InputError: If tensors are missing, unexpected or of the wrong shape.
    """
    wanted = dict(zip(jax.tree.leaves(names), jax.tree.leaves(shapes), strict=True))
    _refuse(files.folder, "lacks", wanted.keys() - files.names())
    _refuse(files.folder, "holds unexpected", files.names() - wanted.keys())
    for name, ours in wanted.items():
        stored = files.shape(name)
        shape = transposed(ours.shape) if is_transposed(name) else ours.shape
        if stored != shape:
            raise InputError(
                f"{files.folder}: tensor {name} has shape {stored}, but its sizes ask "
                f"for {shape}"
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

    def read_converted(block: Part) -> np.ndarray:
        tensor = files.read(name, block)
        if tensor.dtype == dtype:
            return tensor
        return convert(tensor, dtype, f"{files.folder}: tensor {name}")

    parts: dict[Part, np.ndarray] = {}  # Several devices may hold the same one.

    def read_part(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        sizes = zip(index, shape, strict=True)
        part = tuple(one.indices(size)[:2] for one, size in sizes)
        if part not in parts:
            parts[part] = read_blocks(
                read_converted, part, dtype, readers, is_transposed=is_transposed(name)
            )
        return parts[part]

    if sharding is not None:
        return jax.make_array_from_callback(shape, sharding, read_part)
    # Uncommitted: it follows what it is used with.
    return jax.device_put(read_part((slice(None),) * len(shape)))


def convert(tensor: np.ndarray, dtype: jnp.dtype, what: str) -> np.ndarray:
    """Returns a tensor in another dtype.

    Args:
        tensor: The tensor, whose numbers are finite if it was read from a file.
        dtype: The dtype of the result.
        what: The tensor's name in a refusal.

    Raises:
        InputError: If a value is not finite, or not after the conversion.
    """
    with np.errstate(over="ignore"):  # Refused below.
        converted = tensor.astype(dtype, copy=False)
    if is_finite(converted):
        return converted
    if is_finite(tensor):
        raise InputError(
            f"{what} has values that {dtype} cannot hold; choose another dtype"
        )
    raise InputError(f"{what} holds NaN or infinite values")


def _refuse(folder: Path, verb: str, names: Iterable[str]) -> None:
    if listed := shortened(names, 8):
        raise InputError(
            f"{folder} {verb} tensors: {listed}; the weights do not fit config.json"
        )
