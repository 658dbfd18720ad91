"""Loading a target and an EAGLE head, and whether they fit each other."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.checkpoints import names
from eagle_jax.checkpoints.hf_config import (
    DTYPES,
    head_config,
    target_config,
)
from eagle_jax.checkpoints.orbax_store import open_weights
from eagle_jax.checkpoints.weights import Weights, load_params
from eagle_jax.errors import InputError
from eagle_jax.models import eagle_head, transformer
from eagle_jax.models.eagle_head import EagleHeadConfig, EagleHeadParams
from eagle_jax.models.quantized import (
    GROUP_SIZE,
    has_groups,
    map_matrices,
    quantize_layers,
)
from eagle_jax.models.transformer import TransformerConfig, TransformerParams

Tree = TypeVar("Tree")


def open_target(folder: Path) -> tuple[TransformerConfig, Weights]:
    """Reads the sizes of a target and lists its tensors.

    Args:
        folder: From `resolve`; a Hugging Face folder, or half of a converted pair.

    Returns:
        Sizes and files; no tensor is read.

    Raises:
        InputError: If settings or files cannot be used, or the files have fewer layers
            or experts than the settings say: as many would be planned first.
    """
    config, files = target_config(folder), open_weights(folder)
    fields = {"layers": ("num_hidden_layers", config.num_layers)}
    if config.layer.num_experts:
        fields["experts"] = ("num_local_experts", config.layer.num_experts)
    for part, (field, wanted) in fields.items():
        found = {
            match[1]
            for name in files.names()
            if (match := re.search(rf"\.{part}\.(\d+)\.", name))
        }
        if len(found) < wanted:
            raise InputError(
                f"{folder / 'config.json'}: {field} = {wanted:,}, but the files of "
                f"weights have {len(found)} {part}; the weights do not fit config.json"
            )
    return config, files


def load_target(
    folder: Path,
    dtype: str | None = "float32",
    shardings: Any = None,
    bits: int | None = None,
) -> tuple[TransformerConfig, TransformerParams]:
    """Loads a target.

    Args:
        folder: From `resolve`; a Hugging Face folder, or half of a converted pair.
        dtype: Of the weights; `None` for the type they are stored in.
        shardings: A `jax.sharding.Sharding` for all weights, or one for each in a
            `TransformerParams`; `None` for the default device.
        bits: 8 or 4 to quantize the matrices of its layers as they are read; `None`
            to take them as they are stored, which may be quantized too.

    Returns:
        Sizes and weights.

    Raises:
        InputError: If it cannot be used, naming the field or tensor.
    """
    config, files = open_target(folder)
    bits = target_bits(files, config, bits)
    shapes = target_shapes(config, bits)
    as_stored = target_shapes(config, files.bits)
    wanted = names.tensor_names(as_stored, names.TRANSFORMER)
    if config.tie_embeddings:
        files.forget(names.TRANSFORMER["output_head"])  # Some store it all the same.
    return config, load_params(
        files, wanted, shapes, weights_dtype(files, dtype), shardings
    )


def target_shapes(config: TransformerConfig, bits: int | None) -> TransformerParams:
    """Returns the shapes of a target's weights, with the bits of `target_bits`."""
    shapes = shapes_of(transformer.init_params, config)
    return shapes if bits is None else quantize_layers(shapes, bits)


def target_bits(
    files: Weights | None, config: TransformerConfig, bits: int | None
) -> int | None:
    """Returns the bits of the matrices of a target's layers, before any is read.

    Args:
        files: The checkpoint; `None` where there is none.
        config: Sizes.
        bits: What is asked for; `None` for what is stored.

    Returns:
        8 or 4, or `None` for matrices that are not quantized.

    Raises:
        InputError: If the checkpoint is quantized in another way, or a size does not
            divide.
    """
    if files is not None and files.bits is not None:
        if bits not in (None, files.bits):
            raise InputError(
                f"{files.folder} holds int{files.bits} weights, of which no int{bits} "
                f"weights can be made; give `quantization` int{files.bits} or none, or "
                "convert the original checkpoint"
            )
        return files.bits
    if bits is None:
        return None
    shapes = target_shapes(config, None)

    def check(name: str, shape: jax.ShapeDtypeStruct) -> None:
        if not has_groups(shape.shape[0], bits):
            raise InputError(
                f"int{bits} weights have a scale for each {GROUP_SIZE} inputs, and two "
                f"such groups side by side, but {name} has {shape.shape[0]} inputs; "
                "choose `quantization` int8 or none"
            )

    wanted = names.tensor_names(shapes, names.TRANSFORMER)
    map_matrices(check, wanted, shapes)
    return bits


def load_head(
    folder: Path,
    target: TransformerConfig,
    target_params: TransformerParams,
    dtype: str | None = "float32",
    shardings: Any = None,
) -> tuple[EagleHeadConfig, EagleHeadParams]:
    """Loads an EAGLE-1/2 head.

    A head's own copy of the target's embedding table is dropped where it is equal,
    so that the table is in memory once.

    Args:
        folder: From `resolve`.
        target: Sizes of the target.
        target_params: Its weights.
        dtype: Of the weights; `None` for the type they are stored in.
        shardings: A `jax.sharding.Sharding` for all weights, or one for each in an
            `EagleHeadParams`; `None` for the default device. An embedding table for
            which it names none lies as the target's does.

    Returns:
        Sizes and weights.

    Raises:
        InputError: If it cannot be used, or does not fit the target.
    """
    config = head_config(folder)
    check_pair(target, config)
    if isinstance(shardings, EagleHeadParams) and shardings.embedding is None:
        table_sharding: Any = target_params.embedding.sharding
        shardings = dataclasses.replace(shardings, embedding=table_sharding)
    params = _head_params(folder, config, dtype, shardings)
    return config, drop_equal_table(params, target_params.embedding)


def drop_equal_table(params: Any, embedding: jax.Array) -> Any:
    """Returns a head's weights without an embedding table that equals the target's."""
    own = params.embedding
    if own is None:
        return params
    if own.is_fully_addressable and embedding.is_fully_addressable:
        is_equal = np.array_equal(np.asarray(own), np.asarray(embedding))
    else:  # No process has them whole.
        is_equal = bool(jnp.array_equal(own, embedding))
    return dataclasses.replace(params, embedding=None) if is_equal else params


def read_head(
    folder: Path, dtype: str | None = None
) -> tuple[EagleHeadConfig, EagleHeadParams]:
    """Loads an EAGLE-1/2 head as it is stored, without its target.

    Args:
        folder: From `resolve`.
        dtype: Of the weights; `None` for the type they are stored in.

    Returns:
        Sizes and weights, with the embedding table if the folder holds one.

    Raises:
        InputError: If it cannot be used.
    """
    config = head_config(folder)
    return config, _head_params(folder, config, dtype, None)


def read_embedding(folder: Path, dtype: str) -> jax.Array:
    """Loads nothing of a target but its embedding table.

    Args:
        folder: From `resolve`.
        dtype: Of the table.

    Returns:
        `[V, E]`.

    Raises:
        InputError: If there is none, or not of the size that `config.json` names.
    """
    config, files = open_target(folder)
    name = names.TRANSFORMER["embedding"]
    for other in files.names() - {name}:
        files.forget(other)
    shape = target_shapes(config, None).embedding
    return load_params(files, name, shape, jnp.dtype(dtype))


def check_pair(target: TransformerConfig, head: EagleHeadConfig) -> None:
    """Refuses a head that was made for another target.

    Raises:
        InputError: If width or vocabulary differ.
    """
    sizes = {
        "hidden_size": (head.layer.hidden_size, target.layer.hidden_size),
        "vocab_size": (head.vocab_size, target.vocab_size),
    }
    for name, (given, wanted) in sizes.items():
        if given != wanted:
            raise InputError(
                f"the head's {name} is {given}, the target's is {wanted}; give the "
                "head that was trained for this target"
            )


def check_small_model(target: TransformerConfig, small: TransformerConfig) -> None:
    """Refuses a small model that cannot draft for this target.

    Raises:
        InputError: If the vocabularies differ.
    """
    if small.vocab_size != target.vocab_size:
        raise InputError(
            f"the small model has {small.vocab_size} tokens, the target "
            f"{target.vocab_size}; give a model with the target's tokenizer"
        )


def check_max_length(target: TransformerConfig, max_length: int) -> None:
    """Refuses lengths that the target cannot attend over.

    Raises:
        InputError: If `max_length` exceeds the positions.
    """
    if max_length > target.max_positions:
        raise InputError(
            f"max_length = {max_length} is more than the target's "
            f"{target.max_positions} positions (max_position_embeddings)"
        )


def _head_params(
    folder: Path, config: EagleHeadConfig, dtype: str | None, shardings: Any
) -> EagleHeadParams:
    files = open_weights(folder)
    shapes = shapes_of(eagle_head.init_params, config)
    table = names.EAGLE_HEAD["embedding"]
    if table in files.names():
        shapes = with_table(shapes, config)
    elif isinstance(shardings, EagleHeadParams):
        shardings = dataclasses.replace(shardings, embedding=None)
    wanted = names.tensor_names(shapes, names.EAGLE_HEAD)
    return load_params(files, wanted, shapes, weights_dtype(files, dtype), shardings)


def with_table(shapes: Any, config: Any) -> Any:
    """Returns the shapes of a head that has an embedding table of its own."""
    shape = (config.vocab_size, config.layer.hidden_size)
    return dataclasses.replace(
        shapes, embedding=jax.ShapeDtypeStruct(shape, jnp.float32)
    )


def weights_dtype(files: Weights, dtype: str | None) -> jnp.dtype:
    """Returns the dtype asked for, or else the stored one if JAX can keep it.

    Raises:
        InputError: If it cannot.
    """
    if dtype is not None:
        return jnp.dtype(dtype)
    kind = files.dtype()
    if kind.name not in DTYPES:
        raise InputError(
            f"{files.folder} holds {kind}; choose one of {', '.join(DTYPES)} with "
            "`dtype`"
        )
    return kind


def shapes_of(init: Callable[..., Tree], config: Any) -> Tree:
    """Returns the shapes of the weights that `init` makes, without making any."""
    return jax.eval_shape(lambda: init(jax.random.key(0), config))
