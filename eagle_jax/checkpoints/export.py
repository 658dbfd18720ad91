"""Exports heads in the official layout, and targets as Hugging Face folders."""

import collections
import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.checkpoints import names
from eagle_jax.checkpoints.heads import with_table
from eagle_jax.checkpoints.hf_config import (
    DTYPES,
    FAMILIES,
    family_of,
    head_config,
    target_config,
)
from eagle_jax.checkpoints.hub import CALIBRATION_FILE
from eagle_jax.checkpoints.load import convert, shapes_of
from eagle_jax.checkpoints.tensors import (
    check_space,
    open_bin,
    open_safetensors,
    saving,
)
from eagle_jax.errors import InputError
from eagle_jax.files import is_left_behind, new_folder
from eagle_jax.models import eagle_head, transformer
from eagle_jax.models.eagle_head import (
    EAGLE_INPUTS,
    EagleHeadConfig,
    EagleHeadParams,
)
from eagle_jax.models.layers import LayerConfig
from eagle_jax.models.rope import RopeConfig
from eagle_jax.models.transformer import TransformerConfig, TransformerParams
from eagle_jax.parsing import read_json_if_any

WRITTEN_BY = "eagle_jax"
"""The value of `written_by` in an export, which may be replaced on request."""

Tensors = dict[str, np.ndarray]

_CONFIG, _SAFETENSORS, _BIN = "config.json", "model.safetensors", "pytorch_model.bin"
# transformers asks for this entry. A second one would come in any order.
_METADATA = {"format": "pt"}
# What an exported folder may hold; tokenizer and calibration are the caller's.
_NAMES = {
    *(_CONFIG, _SAFETENSORS, _BIN, "generation_config.json", "tokenizer.json"),
    *("tokenizer.model", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "chat_template.jinja", CALIBRATION_FILE),
}


def export_head(
    folder: Path,
    config: EagleHeadConfig,
    params: EagleHeadParams,
    *,
    embedding: jax.Array | None = None,
    dtype: str = "float32",
    with_bin: bool | None = None,
    also: Callable[[Path], object] | None = None,
    overwrite: bool = False,
) -> None:
    """Writes a head in the layout of the published ones, and reads it back.

    The same weights give the same bytes, whatever the folder's name.

    Args:
        folder: The folder to write: `config.json`, `model.safetensors` and
            `pytorch_model.bin`.
        config: The head's sizes.
        params: The head's weights.
        embedding: The target's embedding table, `[V, E]`, written where the head has
            none of its own; `None` leaves it out then. The official training code and
            EAGLE-1 want it in the file.
        dtype: The dtype of the files: "float32", "bfloat16" or "float16".
        with_bin: Whether to write `pytorch_model.bin`, which needs torch; `None`
            writes it where torch is installed.
        also: A function that is called with the unfinished folder, to add a
            calibration.
        overwrite: Whether to replace an earlier export.

    Raises:
        InputError: If the layout cannot express the head, a weight does not fit into
            `dtype`, or the folder cannot be written.
    """
    layer = config.layer
    if layer.head_dim * layer.num_heads != layer.hidden_size:
        raise InputError(
            f"a head of width {layer.hidden_size} with {layer.num_heads} attention "
            f"heads of width {layer.head_dim} cannot be exported: the official layout "
            "has no head_dim, it divides the width by the number of heads"
        )
    if params.embedding is None and embedding is not None:
        params = dataclasses.replace(params, embedding=embedding)
    shapes = shapes_of(eagle_head.init_params, config)
    if params.embedding is not None:
        shapes = with_table(shapes, config)
    tensors = _host_tensors(params, shapes, names.EAGLE_HEAD, dtype)
    if with_bin is None:
        with_bin = has_torch()
    with new_folder(folder, overwrite=overwrite, is_ours=is_export) as unfinished:
        _write(unfinished, head_fields(config, dtype), tensors, with_bin=with_bin)
        _check(unfinished, head_config, config, tensors)
        if also is not None:
            also(unfinished)


def export_target(
    folder: Path,
    config: TransformerConfig,
    params: TransformerParams,
    *,
    dtype: str = "float32",
    stop_tokens: Sequence[int] = (),
    bos_token: int | None = None,
    also: Callable[[Path], object] | None = None,
    overwrite: bool = False,
) -> None:
    """Writes a target as a Hugging Face folder, and reads it back.

    Args:
        folder: The folder to write: `config.json` and `model.safetensors`.
        config: The target's sizes.
        params: The target's weights.
        dtype: The dtype of the file: "float32", "bfloat16" or "float16".
        stop_tokens: The tokens that end a text.
        bos_token: The token that begins a text; `None` for none.
        also: A function that is called with the unfinished folder, to add the
            tokenizer.
        overwrite: Whether to replace an earlier export.

    Raises:
        InputError: If the layout cannot express the target, a weight does not fit
            into `dtype`, or the folder cannot be written.
    """
    shapes = shapes_of(transformer.init_params, config)
    tensors = _host_tensors(params, shapes, names.TRANSFORMER, dtype)
    fields = target_fields(config, dtype, stop_tokens=stop_tokens, bos_token=bos_token)
    with new_folder(folder, overwrite=overwrite, is_ours=is_export) as unfinished:
        _write(unfinished, fields, tensors)
        _check(unfinished, target_config, config, tensors)
        if also is not None:
            also(unfinished)


def is_export(folder: Path) -> bool:
    """Returns whether a folder holds what this module exports and nothing else."""
    for path in folder.iterdir():
        is_known = path.name in _NAMES and not path.is_dir()
        if not is_known and not is_left_behind(path.name, [CALIBRATION_FILE]):
            return False
    fields = read_json_if_any(folder / _CONFIG) or {}
    return fields.get("written_by") == WRITTEN_BY


def has_torch() -> bool:
    """Returns whether torch can be imported, which `.bin` files need."""
    try:
        import torch
    except ImportError:
        return False
    return torch is not None


def _host_tensors(
    params: Any, shapes: Any, table: dict[str, str], dtype: str
) -> Tensors:
    """Returns copies of the weights in `dtype` by name, checked against the sizes."""
    if dtype not in DTYPES:
        raise InputError(f"dtype = {dtype!r} must be one of {', '.join(DTYPES)}")
    given, wanted = names.by_name(params, table), names.by_name(shapes, table)
    odd = sorted(set(given) ^ set(wanted))
    if odd:
        verb = "lack" if odd[0] in wanted else "hold unexpected"
        raise InputError(f"the weights {verb} {odd[0]}; they do not fit their sizes")
    tensors = {}
    for name, shape in wanted.items():
        if given[name].shape != shape.shape:
            raise InputError(
                f"{name} has shape {given[name].shape}, but its sizes ask for "
                f"{shape.shape}"
            )
        # A copy in C order: torch wants memory that it may write to.
        tensor = np.array(given[name], order="C")
        tensors[name] = convert(tensor, jnp.dtype(dtype), f"tensor {name}")
    return tensors


def _write(
    folder: Path, fields: dict[str, Any], tensors: Tensors, *, with_bin: bool = False
) -> None:
    from safetensors.numpy import save_file

    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    check_space(folder, num_bytes * (2 if with_bin else 1), num_bytes)
    text = json.dumps(fields, indent=1) + "\n"
    (folder / _CONFIG).write_text(text, encoding="utf-8")
    path = folder / _SAFETENSORS
    with saving(path):
        save_file(tensors, path, metadata=_METADATA)
    if with_bin:
        _write_bin(folder / _BIN, tensors)


def _write_bin(path: Path, tensors: Tensors) -> None:
    """Writes a state dict; torch stores the file's name in it, so that never varies."""
    try:
        import torch
    except ImportError as error:
        raise InputError(
            f"{path.name} needs torch; install the torch extra (pip install '.[torch]')"
        ) from error
    table = collections.OrderedDict()
    for name, tensor in tensors.items():
        if tensor.dtype == jnp.bfloat16:  # torch takes no bfloat16 from NumPy.
            table[name] = torch.from_numpy(tensor.view(np.int16)).view(torch.bfloat16)
        else:
            table[name] = torch.from_numpy(tensor)
    with saving(path):
        torch.save(table, path)


def _check(
    folder: Path, read_config: Callable[[Path], Any], config: Any, tensors: Tensors
) -> None:
    """Reads back what was written.

    Raises:
        InputError: If sizes or a single bit differ.
    """
    read = read_config(folder)
    if read != config:
        raise InputError(f"{config} cannot be exported: it would be read as {read}")
    for path in (folder / _SAFETENSORS, folder / _BIN):
        if not path.exists():
            continue
        is_bin = path.name == _BIN
        stored = open_bin(path) if is_bin else open_safetensors(path)
        is_equal = stored.keys() == tensors.keys() and all(
            _same_bits(stored[name].read(), tensor) for name, tensor in tensors.items()
        )
        if not is_equal:
            raise InputError(
                f"{path.name} reads back differently from what was written; is the "
                "disk failing?"
            )


def _same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    """Returns whether two arrays agree in dtype, shape and every bit."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    # Not as numbers: negative zero equals zero.
    kind = f"u{one.dtype.itemsize}"
    mine, theirs = (np.ascontiguousarray(x).view(kind) for x in (one, other))
    return np.array_equal(mine, theirs)


def target_fields(
    config: TransformerConfig,
    dtype: str,
    *,
    stop_tokens: Sequence[int] = (),
    bos_token: int | None = None,
) -> dict[str, Any]:
    """Returns the `config.json` of a model in the family that has its parts.

    Args:
        config: The target's sizes.
        dtype: The dtype of the stored weights.
        stop_tokens: The tokens that end a text.
        bos_token: The token that begins a text; `None` for none.
    """
    family = family_of(config)
    fields = {
        "architectures": [FAMILIES[family].architecture],
        "model_type": family,
        **_layer_fields(config.layer),
        "head_dim": config.layer.head_dim,
        "num_hidden_layers": config.num_layers,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tie_embeddings,
        "rope_theta": config.layer.rope.theta,
        "rope_scaling": _rope_scaling(config.layer.rope, kind_field="rope_type"),
        "torch_dtype": dtype,
        "written_by": WRITTEN_BY,
    }
    if FAMILIES[family].has_window:
        fields["sliding_window"] = config.sliding_window
    if FAMILIES[family].has_switch:
        fields["use_sliding_window"] = config.sliding_window is not None
        # Reading it takes the first one, and all after it.
        fields["max_window_layers"] = min(config.windowed_layers, default=0)
    if FAMILIES[family].is_mixture:
        fields["num_local_experts"] = config.layer.num_experts
        fields["num_experts_per_tok"] = config.layer.experts_per_token
    if bos_token is not None:
        fields["bos_token_id"] = bos_token
    if stop_tokens:
        ids = list(stop_tokens)
        fields["eos_token_id"] = ids[0] if len(ids) == 1 else ids
    return fields


def head_fields(config: EagleHeadConfig, dtype: str) -> dict[str, Any]:
    """Returns the `config.json` of a head, in the official implementation's fields.

    That implementation refuses every `rope_scaling` but `{type, factor}` of the kinds
    "linear" and "dynamic". Another kind stands in `rope_parameters`, which it does not
    read: it runs such a head with plain rotary embeddings.

    Args:
        config: The head's sizes.
        dtype: The dtype of the stored weights.
    """
    fields = {
        "architectures": [FAMILIES["llama"].architecture],
        "model_type": "llama",
        "bias": config.fc_bias,
        **_layer_fields(config.layer),
        "num_hidden_layers": 1,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": False,
        "rope_theta": config.layer.rope.theta,
        "rope_scaling": None,
        "torch_dtype": dtype,
        "written_by": WRITTEN_BY,
    }
    if config.inputs != EAGLE_INPUTS:
        fields["inputs"] = config.inputs
    if config.layer.rope.kind == "linear":
        fields["rope_scaling"] = _rope_scaling(config.layer.rope, kind_field="type")
    elif config.layer.rope.kind != "default":
        fields["rope_parameters"] = _rope_scaling(
            config.layer.rope, kind_field="rope_type"
        )
    if config.layer.qkv_bias:  # Its presence counts there, not its value.
        fields["qkv_bias"] = True
    return fields


def _layer_fields(layer: LayerConfig) -> dict[str, Any]:
    return {
        "hidden_act": "silu",
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.num_kv_heads,
        "rms_norm_eps": layer.rms_norm_eps,
    }


def _rope_scaling(rope: RopeConfig, *, kind_field: str) -> dict[str, Any] | None:
    """Returns `rope_scaling`; older code reads the kind as `type`, not `rope_type`."""
    if rope.kind == "default":
        return None
    scaling = {kind_field: rope.kind, "factor": rope.factor}
    if rope.kind == "linear":
        return scaling
    return scaling | {
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_max_positions,
    }
