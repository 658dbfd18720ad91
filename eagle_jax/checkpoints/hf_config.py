"""Reads `config.json` into our models' sizes, and refuses what we cannot run."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A family of targets, which share a `model_type`.

    Attributes:
        architecture: The family's name in the field `architectures`.
        qkv_bias: Whether q, k and v have biases.
        qk_norm: Whether queries and keys are normalised.
        experts: The keys about experts; `()` where layers are dense.
        is_gemma: Whether layers have four norms that add one to their weights, GeGLU
            and scaled embeddings.
        is_gpt_oss: Whether heads have sinks, and mixtures biases and clamped gates.
        is_nested: Whether `text_config` holds the fields of the text model.
        keys: The keys that its targets may have, but no head.
        has_window: Whether the family reads `sliding_window`.
        window: The window in tokens if `sliding_window` is missing; `None` for none.
        has_switch: Whether windows count only with `use_sliding_window`, and from
            layer `max_window_layers` on.
        pattern: The number of layers of which the last sees everything, unless the file
            says otherwise; `None` where all are alike.
        head_dim: The width of a head where `head_dim` is left out; `None` for the
            model's width over the number of heads.
        rope_theta: The rotary base where `rope_theta` is left out.
        rms_norm_eps: The epsilon of the norms where `rms_norm_eps` is left out.
        defaults: What other keys mean where they are left out.
    """

    architecture: str
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: tuple[str, ...] = ()
    is_gemma: bool = False
    is_gpt_oss: bool = False
    is_nested: bool = False
    keys: frozenset[str] = frozenset()
    has_window: bool = False
    window: int | None = None
    has_switch: bool = False
    pattern: int | None = None
    head_dim: int | None = None
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def fields(self) -> set[str]:
        """The keys that `config.json` may have in this family only."""
        return {*self.experts, *(_SWITCH if self.has_switch else ())}

    def complete(self, fields: Fields) -> Fields:
        """Returns the fields of the text model, with what is left out."""
        text = fields.get("text_config", {}) if self.is_nested else {}
        if not isinstance(text, dict):
            raise fields.refusal(f"text_config = {text!r} must be an object")
        given = {**text, **fields.values}
        for name, usual in self.defaults.items():
            if name == "rope_scaling" and given.get("rope_parameters"):
                continue
            # A cap of null is none; elsewhere null counts as missing.
            if name not in given or (given[name] is None and name not in _CAPS):
                given[name] = usual
        ropes = given.get("rope_parameters")
        if _PARTIAL in self.keys and isinstance(ropes, dict) and _PARTIAL in ropes:
            ropes = given["rope_parameters"] = {**ropes}
            given[_PARTIAL] = ropes.pop(_PARTIAL)
        return Fields(given, fields.path)


_SWITCH = ("use_sliding_window", "max_window_layers")
# The last two change training only.
_EXPERTS = (
    "num_local_experts",
    "num_experts_per_tok",
    "router_aux_loss_coef",
    "router_jitter_noise",
)
_GELU = "gelu_pytorch_tanh"
_GPT_OSS = {"activation": CLAMPED, "has_sinks": True, "mlp_bias": True}
_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_ATTENTION = frozenset(["attention_bias"])
_PARTIAL = "partial_rotary_factor"
_PHI_KEYS = """original_max_position_embeddings embd_pdrop resid_pdrop full_attn_mod
    interpolate_factor"""
_GEMMA_KEYS = """attention_bias hidden_act hidden_activation query_pre_attn_scalar
    cache_implementation"""
# Those of the last line belong to what reads images.
_GEMMA3_KEYS = """rope_local_base_freq sliding_window_pattern _sliding_window_pattern
    text_config
    vision_config mm_tokens_per_image boi_token_index eoi_token_index image_token_index
"""
_GEMMA2 = Family(
    architecture="Gemma2ForCausalLM",
    is_gemma=True,
    keys=frozenset([*_GEMMA_KEYS.split(), *_CAPS]),
    has_window=True,
    window=4096,
    pattern=2,
    head_dim=256,
    defaults={"query_pre_attn_scalar": 256, "tie_word_embeddings": True, **_CAPS},
)
# Published files leave much out.
_GEMMA3 = dataclasses.replace(
    _GEMMA2,
    architecture="Gemma3ForCausalLM",
    keys=frozenset(f"{_GEMMA_KEYS} {_GEMMA3_KEYS}".split()),
    qk_norm=True,
    pattern=6,
    rope_theta=1e6,
    defaults={
        "query_pre_attn_scalar": 256,
        "tie_word_embeddings": True,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "rope_local_base_freq": 1e4,
    },
)

FAMILIES = {
    "llama": Family(architecture="LlamaForCausalLM", keys=_ATTENTION),
    "mistral": Family(architecture="MistralForCausalLM", has_window=True, window=4096),
    "mixtral": Family(
        architecture="MixtralForCausalLM",
        has_window=True,
        experts=_EXPERTS,
        rope_theta=1e6,
        rms_norm_eps=1e-5,
        defaults={"num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "qwen2": Family(
        architecture="Qwen2ForCausalLM",
        qkv_bias=True,
        has_window=True,
        window=4096,
        has_switch=True,
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        qk_norm=True,
        keys=_ATTENTION,
        has_window=True,
        window=4096,
        has_switch=True,
        head_dim=128,
    ),
    # `use_sliding_window` would mean a window in every layer: none published has one.
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        qk_norm=True,
        experts=(
            *_EXPERTS,
            *("num_experts", "moe_intermediate_size", "norm_topk_prob"),
            "max_window_layers",
        ),
        defaults={
            "num_local_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
    ),
    "gpt_oss": Family(
        architecture="GptOssForCausalLM",
        is_gpt_oss=True,
        experts=_EXPERTS,
        keys=_ATTENTION | {"experts_per_token", "initial_context_length"},
        has_window=True,
        window=128,
        pattern=2,
        head_dim=64,
        rms_norm_eps=1e-5,
        defaults={
            "attention_bias": True,
            "num_key_value_heads": 8,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
    ),
    "phi3": Family(
        architecture="Phi3ForCausalLM",
        keys=frozenset([_PARTIAL, *_PHI_KEYS.split()]),
        has_window=True,
        rms_norm_eps=1e-5,
    ),
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA3,
    "gemma3": dataclasses.replace(
        _GEMMA3, architecture="Gemma3ForConditionalGeneration", is_nested=True
    ),
}
"""The families of targets by `model_type`."""

_OUT_OF_REACH = {
    "qwen3_next qwen3_5 qwen3_6 qwen3_8 nemotron_h jamba bamba falcon_h1 "
    "granitemoehybrid lfm2 kimi_linear": "its recurrent layers have one state, and "
    "every path of a tree would need its own",
    "deepseek kimi glm_moe_dsa longcat": "its attention reads a compressed cache "
    "(MLA), which is not implemented",
}
"""Beginnings of a `model_type` that many will try, and why it cannot be a target."""

_MOST_LAYERS, _MOST_EXPERTS = 10_000, 1_024
_QWEN_FULL_LAYERS = 28
_SLIDING = "sliding_attention"
_FULL = "full_attention"
_LAYER_TYPES = (_FULL, _SLIDING)


def target_config(folder: Path) -> TransformerConfig:
    """Reads the sizes of a target.

    Args:
        folder: The target's folder, whose `config.json` is transformers 4's or 5's.

    Returns:
        The target's sizes.

    Raises:
        InputError: If the family is unknown, or a field is missing or asks for
            something that is not implemented.
    """
    fields = Fields.read(folder)
    kind, names = fields.get("model_type"), fields.get("architectures", [])
    family = FAMILIES.get(str(kind))
    for kinds, reason in _OUT_OF_REACH.items():
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
    if rope.kind == "longrope":
        positions = min(positions, rope.original_max_positions)
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
        alone = {_FULL: {"rope_theta": theta} | values, _SLIDING: {"rope_theta": local}}
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
            f"{_PARTIAL} = {rope.fraction} of head_dim = {head_dim} must be an even "
            "number of dimensions"
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
        named = tuple(n for n, name in enumerate(types) if name == _SLIDING)
        if window is None and named:
            raise fields.refusal(
                f"layer_types asks for {_SLIDING}, but there is no sliding_window"
            )
        is_fixed = not (family.has_switch or family.pattern)
        if is_fixed and window is not None and named != windowed:
            raise fields.refusal(
                f"layer_types contradicts sliding_window = {window}, which this "
                "family has in every layer"
            )
        windowed = named
    return (window, windowed) if window and windowed else (None, ())
