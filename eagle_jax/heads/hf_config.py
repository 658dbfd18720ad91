"""The fields of `config.json` that heads of decoder layers have in common."""

import dataclasses
from typing import Any

from eagle_jax.checkpoints.export_files import WRITTEN_BY
from eagle_jax.checkpoints.families import FAMILIES
from eagle_jax.checkpoints.hf_config import SLIDING, layer_config
from eagle_jax.checkpoints.hf_fields import (
    MOST_POSITIONS,
    Fields,
    check_keys,
    read_rope,
)
from eagle_jax.models.layers import LayerConfig
from eagle_jax.models.rope import RopeConfig

# Heads that name no positions were trained for so many.
_HEAD_POSITIONS = 2048


def read_sizes(fields: Fields, *more: str) -> dict[str, Any]:
    """Reads the sizes that these heads have in common; none is derived from a target.

    Args:
        fields: The fields of the head.
        more: The keys that are known in this kind of head only.

    Raises:
        InputError: If a key asks for something that is not implemented.
    """
    kind = fields.values.get("model_type", "llama")
    kinds = [*(name for name, one in FAMILIES.items() if not one.is_gemma), "eagle"]
    if kind not in kinds:
        raise fields.refusal(
            f"model_type {kind!r} is not supported for a head; known are "
            f"{', '.join(kinds)}"
        )
    # What a head's config says about its target's family does not concern the head.
    check_keys(fields, {*more}.union(*(f.fields for f in FAMILIES.values())))
    return {
        "layer": layer_config(
            fields,
            dataclasses.replace(FAMILIES["llama"], qkv_bias=fields.flag("qkv_bias")),
            read_rope(fields, is_head=True),
        ),
        "vocab_size": fields.size("vocab_size"),
        "max_positions": fields.size(
            "max_position_embeddings", default=_HEAD_POSITIONS, most=MOST_POSITIONS
        ),
    }


def read_window(fields: Fields) -> int | None:
    """Returns the sliding window of all layers; `None` for none.

    Args:
        fields: The fields of the head, whose `layer_types` must ask for it.

    Raises:
        InputError: If the layers are of several kinds, or the window is no size.
    """
    types = fields.get("layer_types", [])
    if not isinstance(types, list) or any(one != types[0] for one in types):
        raise fields.refusal(f"layer_types = {types!r} must name one kind of layer")
    if SLIDING not in types:
        return None
    return fields.size("sliding_window", most=MOST_POSITIONS)


def common_fields(config: Any, dtype: str) -> dict[str, Any]:
    """Returns the `config.json` of any such head, in the official code's fields.

    That implementation refuses every `rope_scaling` but `{type, factor}` of the kinds
    "linear" and "dynamic". Another kind stands in `rope_parameters`, which it does not
    read: it runs such a head with plain rotary embeddings.

    Args:
        config: The head's sizes.
        dtype: The dtype of the stored weights.
    """
    rope = config.layer.rope
    fields = {
        "architectures": [FAMILIES["llama"].architecture],
        "model_type": "qwen3" if config.layer.qk_norm else "llama",
        **layer_fields(config.layer),
        "num_hidden_layers": getattr(config, "num_layers", 1),
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": False,
        "rope_theta": rope.theta,
        "rope_scaling": None,
        "torch_dtype": dtype,
        "written_by": WRITTEN_BY,
    }
    if rope.kind == "linear":
        fields["rope_scaling"] = rope_scaling(rope, kind_field="type")
    elif rope.kind != "default":
        fields["rope_parameters"] = rope_scaling(rope, kind_field="rope_type")
    if config.layer.qkv_bias:  # Its presence counts there, not its value.
        fields["qkv_bias"] = True
    return fields


def layer_fields(layer: LayerConfig) -> dict[str, Any]:
    """Returns the fields of `config.json` that say the sizes of a layer."""
    return {
        "hidden_act": "silu",
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.num_kv_heads,
        "rms_norm_eps": layer.rms_norm_eps,
    }


def rope_scaling(rope: RopeConfig, *, kind_field: str) -> dict[str, Any] | None:
    """Returns `rope_scaling`; older code reads the kind as `type`, not `rope_type`.

    Args:
        rope: The rotary embedding.
        kind_field: The field that says the kind.
    """
    if rope.kind == "default":
        return None
    scaling = {kind_field: rope.kind, "factor": rope.factor}
    if rope.kind == "linear":
        return scaling
    names = ["beta_fast", "beta_slow", "truncate", "attention_factor"]
    if rope.kind == "llama3":
        names = ["low_freq_factor", "high_freq_factor"]
    scaling |= {name: getattr(rope, name) for name in names}
    return scaling | {"original_max_position_embeddings": rope.original_max_positions}
