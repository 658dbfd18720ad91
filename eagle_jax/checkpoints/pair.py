"""Loading a target and an EAGLE head."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.checkpoints import names
from eagle_jax.checkpoints.model_config import check_pair, head_config, target_config
from eagle_jax.checkpoints.weights import TensorFiles, load_params
from eagle_jax.models import eagle_head, transformer
from eagle_jax.models.eagle_head import EagleHeadConfig, EagleHeadParams
from eagle_jax.models.transformer import TransformerConfig, TransformerParams

Weights = TypeVar("Weights")


def load_target(
    folder: Path, dtype: str = "float32"
) -> tuple[TransformerConfig, TransformerParams]:
    """Loads a target.

    Args:
        folder: From `resolve`.
        dtype: Of the weights.

    Returns:
        Sizes and weights.

    Raises:
        InputError: If it cannot be used, naming the field or tensor.
    """
    config = target_config(folder)
    files = TensorFiles(folder)
    shapes = _shapes(functools.partial(transformer.init_params, config=config))
    wanted = names.tensor_names(shapes, names.TRANSFORMER)
    if config.tie_embeddings:
        files.forget(names.TRANSFORMER["output_head"])  # Some store it all the same.
    return config, load_params(files, wanted, shapes, jnp.dtype(dtype))


def load_head(
    folder: Path,
    target: TransformerConfig,
    target_params: TransformerParams,
    dtype: str = "float32",
) -> tuple[EagleHeadConfig, EagleHeadParams]:
    """Loads an EAGLE-1/2 head.

    A head's own copy of the target's embedding table is dropped where it is equal,
    so that the table is in memory once.

    Args:
        folder: From `resolve`.
        target: Sizes of the target.
        target_params: Its weights.
        dtype: Of the weights.

    Returns:
        Sizes and weights.

    Raises:
        InputError: If it cannot be used, or does not fit the target.
    """
    config = head_config(folder)
    check_pair(target, config)
    files = TensorFiles(folder)
    shapes = _shapes(functools.partial(eagle_head.init_params, config=config))
    table = names.EAGLE_HEAD["embedding"]
    if table in files.names():
        shape = (config.vocab_size, config.layer.hidden_size)
        own_table = jax.ShapeDtypeStruct(shape, jnp.float32)
        shapes = dataclasses.replace(shapes, embedding=own_table)
    wanted = names.tensor_names(shapes, names.EAGLE_HEAD)
    params = load_params(files, wanted, shapes, jnp.dtype(dtype))
    if params.embedding is not None and np.array_equal(
        np.asarray(params.embedding), np.asarray(target_params.embedding)
    ):
        params = dataclasses.replace(params, embedding=None)
    return config, params


def _shapes(init: Callable[[jax.Array], Weights]) -> Weights:
    """Returns the shapes of the weights, without making any."""
    return jax.eval_shape(init, jax.random.key(0))
