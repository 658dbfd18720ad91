"""From the sizes of our models back to `config.json`; `model_config` reads it."""

from collections.abc import Sequence
from typing import Any

from eagle_jax.checkpoints.families import FAMILIES, family_of
from eagle_jax.models.eagle_head import EagleHeadConfig
from eagle_jax.models.layers import LayerConfig
from eagle_jax.models.rope import RopeConfig
from eagle_jax.models.transformer import TransformerConfig

WRITTEN_BY = "eagle_jax"
"""Value of the field `written_by`: such a folder may be replaced on request."""


def target_fields(
    config: TransformerConfig,
    dtype: str,
    *,
    stop_tokens: Sequence[int] = (),
    bos_token: int | None = None,
) -> dict[str, Any]:
    """Returns the `config.json` of a model in the family that has its parts.

    Args:
        config: Sizes.
        dtype: Of the stored weights.
        stop_tokens: Ids that end a text.
        bos_token: Id that begins one.
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
        # Reading it takes the first one, and all behind it.
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
        config: Sizes.
        dtype: Of the stored weights.
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
    """Returns `rope_scaling`; older code calls its kind `type`, later `rope_type`."""
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
