"""The families of targets, a row each, and those that are out of reach."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from eagle_jax.checkpoints.hf_fields import Fields


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
    "llama": Family(architecture="LlamaForCausalLM", keys=_ATTENTION | {"mlp_bias"}),
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

OUT_OF_REACH = {
    "qwen3_next qwen3_5 qwen3_6 qwen3_8 nemotron_h jamba bamba falcon_h1 "
    "granitemoehybrid lfm2 kimi_linear": "its recurrent layers have one state, and "
    "every path of a tree would need its own",
    "deepseek kimi glm_moe_dsa longcat": "its attention reads a compressed cache "
    "(MLA), which is not implemented",
}
"""Beginnings of a `model_type` that many will try, and why it cannot be a target."""
