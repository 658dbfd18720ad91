"""Exports targets as Hugging Face folders."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle_jax.checkpoints import names
from eagle_jax.checkpoints.export_files import (
    WRITTEN_BY,
    Export,
    host_tensors,
    write_export,
)
from eagle_jax.checkpoints.families import FAMILIES
from eagle_jax.checkpoints.hf_config import target_config
from eagle_jax.checkpoints.load import shapes_of
from eagle_jax.heads.hf_config import layer_fields, rope_scaling
from eagle_jax.models import transformer
from eagle_jax.models.transformer import TransformerConfig, TransformerParams


def export_target(
    folder: Path,
    config: TransformerConfig,
    params: TransformerParams,
    how: Export | None = None,
    *,
    stop_tokens: Sequence[int] = (),
    bos_token: int | None = None,
) -> None:
    """Writes a target as a Hugging Face folder, and reads it back.

    Args:
        folder: The folder to write: `config.json` and `model.safetensors`.
        config: The target's sizes.
        params: The target's weights.
        how: How it is written; without a pickle.
        stop_tokens: The tokens that end a text.
        bos_token: The token that begins a text; `None` for none.

    Raises:
        InputError: If the layout cannot express the target, a weight does not fit
            into the dtype, or the folder cannot be written.
    """
    how = dataclasses.replace(how or Export(), with_pickle=False)
    shapes = shapes_of(transformer.init_params, config)
    fields = target_fields(
        config, how.dtype, stop_tokens=stop_tokens, bos_token=bos_token
    )
    is_mixtral = _family_of(config) == "mixtral"
    table = names.MIXTRAL if is_mixtral else names.TRANSFORMER
    tensors = host_tensors(params, shapes, table, how.dtype)
    write_export(folder, fields, tensors, config, target_config, how)


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
    family = _family_of(config)
    fields = {
        "architectures": [FAMILIES[family].architecture],
        "model_type": family,
        **layer_fields(config.layer),
        "head_dim": config.layer.head_dim,
        "num_hidden_layers": config.num_layers,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tie_embeddings,
        "rope_theta": config.layer.rope.theta,
        "rope_scaling": rope_scaling(config.layer.rope, kind_field="rope_type"),
        "torch_dtype": dtype,
        "written_by": WRITTEN_BY,
    }
    if FAMILIES[family].has_window:
        fields["sliding_window"] = config.sliding_window
    if FAMILIES[family].has_switch:
        fields["use_sliding_window"] = config.sliding_window is not None
        # Reading it takes the first one, and all after it.
        fields["max_window_layers"] = min(config.windowed_layers, default=0)
    if config.layer.num_experts:
        fields["num_local_experts"] = config.layer.num_experts
        fields["num_experts_per_tok"] = config.layer.experts_per_token
    if config.layer.expert_size:
        fields["moe_intermediate_size"] = config.layer.expert_size
        fields["norm_topk_prob"] = not config.layer.shares_of_all
    if bos_token is not None:
        fields["bos_token_id"] = bos_token
    if stop_tokens:
        ids = list(stop_tokens)
        fields["eos_token_id"] = ids[0] if len(ids) == 1 else ids
    return fields


def _family_of(config: TransformerConfig) -> str:
    if config.layer.qk_norm:
        return "qwen3_moe" if config.layer.num_experts else "qwen3"
    if config.layer.qkv_bias:
        return "qwen2"
    if config.layer.num_experts:
        return "mixtral"
    return "llama" if config.sliding_window is None else "mistral"
