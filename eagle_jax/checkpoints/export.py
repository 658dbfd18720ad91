"""Exports heads in the official layout, and targets as Hugging Face folders."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from eagle_jax.checkpoints import names
from eagle_jax.checkpoints.export_files import (
    WRITTEN_BY,
    host_tensors,
    write_export,
)
from eagle_jax.checkpoints.heads import with_table
from eagle_jax.checkpoints.hf_config import (
    FAMILIES,
    family_of,
    head_config,
    target_config,
)
from eagle_jax.checkpoints.load import shapes_of
from eagle_jax.errors import InputError
from eagle_jax.models import eagle_head, transformer
from eagle_jax.models.eagle3_head import Eagle3HeadConfig
from eagle_jax.models.eagle_head import (
    EagleHeadConfig,
    EagleHeadParams,
)
from eagle_jax.models.layers import LayerConfig
from eagle_jax.models.rope import RopeConfig
from eagle_jax.models.transformer import TransformerConfig, TransformerParams


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
    check_exportable(config)
    if params.embedding is None and embedding is not None:
        params = dataclasses.replace(params, embedding=embedding)
    shapes = shapes_of(eagle_head.init_params, config)
    if params.embedding is not None:
        shapes = with_table(shapes, config)
    tensors = host_tensors(params, shapes, names.EAGLE_HEAD, dtype)
    write_export(
        folder,
        head_fields(config, dtype),
        tensors,
        config,
        head_config,
        with_pickle=with_bin,
        also=also,
        overwrite=overwrite,
    )


def check_exportable(config: EagleHeadConfig) -> None:
    """Refuses an EAGLE-1/2 head that the official layout cannot express.

    Raises:
        InputError: If its attention heads together are not as wide as it is.
    """
    layer = config.layer
    if layer.head_dim * layer.num_heads != layer.hidden_size:
        raise InputError(
            f"a head of width {layer.hidden_size} with {layer.num_heads} attention "
            f"heads of width {layer.head_dim} cannot be exported: the official layout "
            "has no head_dim, it divides the width by the number of heads"
        )


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
    tensors = host_tensors(params, shapes, names.TRANSFORMER, dtype)
    fields = target_fields(config, dtype, stop_tokens=stop_tokens, bos_token=bos_token)
    write_export(
        folder,
        fields,
        tensors,
        config,
        target_config,
        with_pickle=False,
        also=also,
        overwrite=overwrite,
    )


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
    """Returns the `config.json` of an EAGLE-1/2 head, see `plain_head_fields`."""
    return plain_head_fields(config, dtype) | {"bias": config.fc_bias}


def plain_head_fields(
    config: EagleHeadConfig | Eagle3HeadConfig, dtype: str
) -> dict[str, Any]:
    """Returns the `config.json` of any EAGLE head, in the official code's fields.

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
