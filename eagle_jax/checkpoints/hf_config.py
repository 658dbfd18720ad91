"""Reads `config.json` into our models' sizes, and refuses what we cannot run."""

from pathlib import Path
from typing import Any

from eagle_jax.checkpoints.families import FAMILIES, OUT_OF_REACH, Family
from eagle_jax.checkpoints.hf_fields import (
    MOST,
    MOST_POSITIONS,
    Fields,
    check_keys,
    read_rope,
    warn_once,
)
from eagle_jax.models.layers import LayerConfig
from eagle_jax.models.mlp import CLAMPED
from eagle_jax.models.rope import RopeConfig
from eagle_jax.models.transformer import TransformerConfig

_GELU = "gelu_pytorch_tanh"
_GPT_OSS = {"activation": CLAMPED, "has_sinks": True}
_MOST_LAYERS, _MOST_EXPERTS = 10_000, 1_024
_QWEN_FULL_LAYERS = 28
_LAYER_TYPES = FULL, SLIDING = "full_attention", "sliding_attention"
"""The kinds of layers that see everything and a window, as `layer_types` names them."""


def target_config(folder: Path) -> TransformerConfig:
    """Reads the sizes of a target.

    Args:
        folder: The target's folder, whose `config.json` is transformers 4's or 5's.

    Raises:
        InputError: If the family is unknown, or a field is missing or asks for
            something that is not implemented.
    """
    fields = Fields.read(folder)
    kind, names = fields.get("model_type"), fields.get("architectures", [])
    family = FAMILIES.get(str(kind))
    for kinds, reason in OUT_OF_REACH.items():
        if any(str(kind).startswith(one) for one in kinds.split()):
            raise fields.refusal(f"model_type {kind!r} is out of reach: {reason}")
    if family is None or names not in ([], [family.architecture]):
        raise fields.refusal(
            f"architectures = {names!r} with model_type {kind!r} is not supported; "
            f"known are {', '.join(FAMILIES)}"
        )
    fields = family.complete(fields)
    check_keys(fields, family.fields | family.keys | {"quantization_config"})
    rope, window_rope = _read_ropes(fields, family)
    layer = layer_config(fields, family, rope)
    num_layers = fields.size("num_hidden_layers", most=_MOST_LAYERS)
    window, windowed = _read_windows(fields, family, num_layers)
    positions = fields.size("max_position_embeddings", most=MOST_POSITIONS)
    if rope.kind == "longrope" and positions > rope.original_max_positions:
        positions = rope.original_max_positions
        warn_once(
            f"{fields.path}: rope type 'longrope' turns all keys anew beyond "
            f"original_max_position_embeddings = {rope.original_max_positions:,}, "
            "which kept keys cannot follow; texts end there"
        )
    return TransformerConfig(
        layer=layer,
        num_layers=num_layers,
        vocab_size=fields.size("vocab_size"),
        max_positions=positions,
        tie_embeddings=fields.flag("tie_word_embeddings"),
        sliding_window=window,
        windowed_layers=windowed,
        window_rope=window_rope,
        embedding_scale=layer.hidden_size**0.5 if family.is_gemma else 1.0,
        logit_cap=_optional(fields, "final_logit_softcapping"),
    )


def _optional(fields: Fields, name: str) -> float | None:
    """Returns a field that is a number, or null or 0 for none."""
    return fields.number(name) if fields.get(name) else None


def _read_ropes(fields: Fields, family: Family) -> tuple[RopeConfig, RopeConfig | None]:
    """Returns the rotary embedding, and that of windowed layers if it is another."""
    theta, local = family.rope_theta, fields.get("rope_local_base_freq")
    if local is None:
        return read_rope(fields, default_theta=theta), None
    values, both = fields.values, fields.get("rope_parameters")
    if isinstance(both, dict) and both.keys() == set(_LAYER_TYPES):
        alone = {name: {"rope_parameters": both[name]} for name in _LAYER_TYPES}
    else:
        alone = {FULL: {"rope_theta": theta} | values, SLIDING: {"rope_theta": local}}
    rope, window_rope = (
        read_rope(Fields(alone[name], fields.path), default_theta=base)
        for name, base in zip(_LAYER_TYPES, (theta, local), strict=True)
    )
    return rope, window_rope


def layer_config(fields: Fields, family: Family, rope: RopeConfig) -> LayerConfig:
    """Reads the sizes of a layer."""
    num_heads = fields.size("num_attention_heads")
    num_kv_heads = fields.size("num_key_value_heads", default=num_heads)
    hidden_size = fields.size("hidden_size")
    head_dim = family.head_dim
    if head_dim is None and hidden_size % num_heads == 0:
        head_dim = hidden_size // num_heads
    head_dim = fields.size("head_dim", default=head_dim)
    if head_dim % 2:
        raise fields.refusal(
            f"head_dim = {head_dim} must be even: rotary embeddings turn pairs"
        )
    turned = rope.width(head_dim)
    if rope.fraction > 1 or turned % 2 or not turned:
        raise fields.refusal(
            f"partial_rotary_factor = {rope.fraction} of head_dim = {head_dim} must "
            "be an even number of dimensions"
        )
    if rope.factors and 2 * len(rope.factors) != turned:
        raise fields.refusal(
            f"short_factor has {len(rope.factors)} numbers, but {turned} dimensions "
            "are rotated in pairs"
        )
    if num_heads * head_dim > MOST:
        raise fields.refusal(
            f"num_attention_heads = {num_heads} of head_dim = {head_dim} are "
            f"more than {MOST:,} values"
        )
    if num_heads % num_kv_heads:
        raise fields.refusal(
            f"num_key_value_heads = {num_kv_heads} does not divide "
            f"num_attention_heads = {num_heads}"
        )
    has_biases = "attention_bias" in family.keys and fields.flag("attention_bias")
    has_more = "mlp_bias" in family.keys and fields.flag("mlp_bias")
    return LayerConfig(
        hidden_size=hidden_size,
        intermediate_size=fields.size("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", default=family.rms_norm_eps),
        rope=rope,
        qkv_bias=family.qkv_bias or has_biases,
        output_bias=has_biases,
        mlp_bias=has_more or family.is_gpt_oss,
        qk_norm=family.qk_norm,
        **(_read_experts(fields, family) if family.experts else {}),
        **(_read_gemma(fields) if family.is_gemma else {}),
        **(_GPT_OSS if family.is_gpt_oss else {}),
    )


def _read_experts(fields: Fields, family: Family) -> dict[str, Any]:
    """Returns what layers of experts have that others have not."""
    # Published files of Qwen3-MoE have the first name, those of transformers 5 another.
    is_first = fields.get("num_experts") is not None
    name = "num_experts" if is_first else "num_local_experts"
    num_experts = fields.size(name, most=_MOST_EXPERTS)
    read: dict[str, Any] = {
        "num_experts": num_experts,
        "experts_per_token": fields.size("num_experts_per_tok", most=num_experts),
    }
    if "moe_intermediate_size" in family.experts:
        read["expert_size"] = fields.size("moe_intermediate_size")
        read["shares_of_all"] = not fields.flag("norm_topk_prob")
    return read


def _read_gemma(fields: Fields) -> dict[str, Any]:
    """Returns what the layers of Gemma have that others have not."""
    for name in ("hidden_act", "hidden_activation"):
        if fields.get(name) not in (None, _GELU):
            raise fields.refusal(f"{name} = {fields.get(name)!r} is not {_GELU!r}")
    return {
        "activation": _GELU,
        "norm_offset": True,
        "output_norms": True,
        "query_scalar": fields.number("query_pre_attn_scalar"),
        "score_cap": _optional(fields, "attn_logit_softcapping"),
    }


def _read_windows(
    fields: Fields, family: Family, num_layers: int
) -> tuple[int | None, tuple[int, ...]]:
    """Returns the sliding window in tokens, and the layers that have it."""
    types = fields.get("layer_types", [])
    is_list = isinstance(types, list) and len(types) in (0, num_layers)
    if not is_list or any(name not in _LAYER_TYPES for name in types):
        raise fields.refusal(
            f"layer_types must name {' or '.join(_LAYER_TYPES)} for each of "
            f"{num_layers} layers, not {types!r}"
        )
    window, start = None, 0
    # A field that is left out means the family's own window; only null means none.
    has_size = fields.values.get("sliding_window", family.window) is not None
    is_on = not family.has_switch or fields.flag("use_sliding_window")
    if family.has_window and has_size and is_on:
        window = fields.size(
            "sliding_window", default=family.window, most=MOST_POSITIONS
        )
    if family.has_switch:
        start = fields.size("max_window_layers", default=_QWEN_FULL_LAYERS, least=0)
    pattern = num_layers + 1
    if family.pattern:
        pattern = fields.size("sliding_window_pattern", default=family.pattern)
    windowed = tuple(n for n in range(start, num_layers) if (n + 1) % pattern)
    if types:
        named = tuple(n for n, name in enumerate(types) if name == SLIDING)
        if window is None and named:
            raise fields.refusal(
                f"layer_types asks for {SLIDING}, but there is no sliding_window"
            )
        is_fixed = not (family.has_switch or family.pattern)
        if is_fixed and window is not None and named != windowed:
            raise fields.refusal(
                f"layer_types contradicts sliding_window = {window}, which this "
                "family has in every layer"
            )
        windowed = named
    return (window, windowed) if window and windowed else (None, ())
