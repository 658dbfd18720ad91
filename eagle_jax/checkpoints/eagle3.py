"""EAGLE-3 heads from Hugging Face folders: settings, weights and their vocabulary.

    fc, midlayer.*, norm, lm_head    floating-point weights; `layers.0.*` elsewhere
    embed_tokens                     only where the head's width is not the target's
    d2t [W] integers                 token i of the head is the target's i + d2t[i]
    t2d [V] bool                     whether the head has this token of the target

The last two are absent where both vocabularies are the same.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.checkpoints import names
from eagle_jax.checkpoints.hf_config import (
    check_head_keys,
    head_positions,
    layer_config,
)
from eagle_jax.checkpoints.hf_fields import flag_of, read_rope, size_of
from eagle_jax.checkpoints.load import (
    drop_equal_table,
    shapes_of,
    weights_dtype,
    with_table,
)
from eagle_jax.checkpoints.orbax_store import open_weights
from eagle_jax.checkpoints.weights import Weights, load_params
from eagle_jax.errors import InputError
from eagle_jax.models import eagle3_head
from eagle_jax.models.eagle3_head import (
    Eagle3HeadConfig,
    Eagle3HeadParams,
    feature_layers,
)
from eagle_jax.models.transformer import TransformerConfig, TransformerParams
from eagle_jax.parsing import read_json

_FEWEST_LAYERS = 7
_FIELDS = {"draft_vocab_size", "target_hidden_size", "eagle_config"}
# All that we do anyway.
_USUAL_FEATURES = {"use_aux_hidden_state": True}


def eagle3_config(folder: Path) -> Eagle3HeadConfig:
    """Reads the sizes of an EAGLE-3 head; nothing is derived from a target.

    Args:
        folder: Holds `config.json`. Its `num_hidden_layers` is not read: published
            ones name the target's.

    Returns:
        Its sizes.

    Raises:
        InputError: If a field is missing or asks for something that is not
            implemented.
    """
    path = folder / "config.json"
    config = read_json(path)
    check_head_keys(config, path, _FIELDS)
    if (config.get("eagle_config") or _USUAL_FEATURES) != _USUAL_FEATURES:
        raise InputError(
            f"{path}: eagle_config = {config['eagle_config']!r} is not supported: "
            "features are read where the published heads read them"
        )
    vocab_size = size_of(config, "vocab_size", path)
    known = size_of(config, "draft_vocab_size", path, default=vocab_size)
    if known > vocab_size:
        raise InputError(
            f"{path}: draft_vocab_size = {known} is more than vocab_size = {vocab_size}"
        )
    layer = layer_config(
        config,
        path,
        qkv_bias=flag_of(config, "qkv_bias", path, default=False),
        rope=read_rope(config, path, is_head=True),
    )
    width = size_of(config, "target_hidden_size", path, default=layer.hidden_size)
    return Eagle3HeadConfig(
        layer=layer,
        vocab_size=vocab_size,
        draft_vocab_size=known,
        max_positions=head_positions(config, path),
        feature_size=3 * width,
    )


def eagle3_target(target: TransformerConfig) -> TransformerConfig:
    """Returns a target that gives the features which EAGLE-3 heads read.

    Raises:
        InputError: If it has too few layers for three different features.
    """
    if target.num_layers < _FEWEST_LAYERS:
        raise InputError(
            f"the target has {target.num_layers} layers, and an EAGLE-3 head needs one "
            f"of at least {_FEWEST_LAYERS}: with fewer, two of its three features are "
            "the same; give an EAGLE-1/2 head"
        )
    return dataclasses.replace(target, feature_layers=feature_layers(target.num_layers))


def check_eagle3_pair(target: TransformerConfig, head: Eagle3HeadConfig) -> None:
    """Refuses an EAGLE-3 head that was made for another target.

    Raises:
        InputError: If features or vocabulary differ, or the target has too few layers.
    """
    width = eagle3_target(target).feature_size
    if head.feature_size != width:
        raise InputError(
            f"the head reads features of width {head.feature_size}, three hidden "
            f"states of the target have {width}; give the head that was trained for "
            "this target"
        )
    if head.vocab_size != target.vocab_size:
        raise InputError(
            f"the head's vocab_size is {head.vocab_size}, the target's is "
            f"{target.vocab_size}; give the head that was trained for this target"
        )


def load_eagle3_head(
    folder: Path,
    target: TransformerConfig,
    target_params: TransformerParams,
    dtype: str | None = "float32",
    shardings: Any = None,
) -> tuple[Eagle3HeadConfig, Eagle3HeadParams]:
    """Loads an EAGLE-3 head.

    A head's own copy of the target's embedding table is dropped where it is equal.

    Args:
        folder: From `resolve`.
        target: Sizes of the target.
        target_params: Its weights.
        dtype: Of the weights; `None` for the type they are stored in.
        shardings: One for each weight in an `Eagle3HeadParams`; `None` for the default
            device. An embedding table lies as the target's does.

    Returns:
        Sizes and weights.

    Raises:
        InputError: If it cannot be used, or does not fit the target.
    """
    config = eagle3_config(folder)
    check_eagle3_pair(target, config)
    files = open_weights(folder)
    offsets = _read_offsets(files, config)
    if offsets is not None and shardings is not None:
        offsets = jax.device_put(offsets, shardings.offsets)
    shapes = shapes_of(eagle3_head.init_params, config)
    shapes = dataclasses.replace(shapes, offsets=None)
    stored = files.names()
    is_official = any(name.startswith("midlayer.") for name in stored)
    table = names.EAGLE3_HEAD if is_official else names.EAGLE3_HEAD_ELSEWHERE
    if table["output_head"] not in stored:
        raise InputError(
            f"{folder} lacks {table['output_head']}: an EAGLE-3 head predicts with an "
            "output head of its own"
        )
    width = config.layer.hidden_size
    if table["embedding"] in stored:
        shapes = with_table(shapes, config)
    elif width != target.layer.hidden_size:
        raise InputError(
            f"{folder} lacks {table['embedding']}: the target's table is "
            f"{target.layer.hidden_size} wide and does not fit a head of {width}"
        )
    wanted = names.tensor_names(shapes, table)
    if shardings is not None:
        table_sharding: Any = target_params.embedding.sharding
        has_table = shapes.embedding is not None
        shardings = dataclasses.replace(
            shardings, offsets=None, embedding=table_sharding if has_table else None
        )
    params = load_params(files, wanted, shapes, weights_dtype(files, dtype), shardings)
    params = drop_equal_table(params, target_params.embedding)
    return config, dataclasses.replace(params, offsets=offsets)


def _read_offsets(files: Weights, config: Eagle3HeadConfig) -> jax.Array | None:
    """Returns `d2t` once nothing in the folder contradicts it; `None` for the same.

    Neither tensor is left in `files`.
    """
    num_known, vocab_size = config.draft_vocab_size, config.vocab_size
    found = {name: files.read(name) for name in names.MAPS if name in files.names()}
    for name in found:
        files.forget(name)
    offsets, is_known = (found.get(name) for name in names.MAPS)
    if offsets is None:
        if num_known < vocab_size:
            raise InputError(
                f"{files.folder} lacks d2t, which says where the head's {num_known} "
                f"tokens stand among the target's {vocab_size}"
            )
        offsets = np.zeros(num_known, np.int64)
    if offsets.shape != (num_known,) or offsets.dtype.kind not in "iu":
        raise InputError(
            f"{files.folder}: d2t holds {offsets.dtype} {offsets.shape}, no integer "
            f"for each of draft_vocab_size = {num_known} tokens"
        )
    tokens = np.arange(num_known) + offsets.astype(np.int64)
    if tokens[0] < 0 or tokens[-1] >= vocab_size or (np.diff(tokens) <= 0).any():
        raise InputError(
            f"{files.folder}: d2t must lead to ascending tokens of the target, "
            f"0 to {vocab_size - 1}; it holds offsets, not tokens"
        )
    in_head = np.isin(np.arange(vocab_size), tokens)
    if is_known is not None and not np.array_equal(is_known.astype(bool), in_head):
        raise InputError(
            f"{files.folder}: d2t and t2d name different tokens; the checkpoint is "
            "damaged"
        )
    same = num_known == vocab_size
    return None if same else jnp.asarray(tokens - np.arange(num_known), jnp.int32)
