"""Reads `config.json` into our models' sizes, and refuses what we cannot run."""

import dataclasses
from pathlib import Path
from typing import Any

from eagle_jax.checkpoints.hf_fields import (
    MOST,
    MOST_POSITIONS,
    Fields,
    check_keys,
    read_rope,
)
from eagle_jax.models.layers import LayerConfig
from eagle_jax.models.rope import RopeConfig
from eagle_jax.models.transformer import TransformerConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A family of targets, which share a `model_type`.

    Attributes:
        architecture: The family's name in the field `architectures`.
        qkv_bias: Whether q, k and v have biases.
        qk_norm: Whether queries and keys are normalised.
        counts: The names of the number of experts; none for dense layers.
        num_experts: The number of experts where it is left out.
        experts_per_token: How many of them read a token where that is left out.
        expert_size: The width of an expert where `moe_intermediate_size` is left out;
            0 where it is `intermediate_size` and the shares always add up to 1.
        has_window: Whether the family reads `sliding_window`.
        window: The window in tokens if `sliding_window` is missing; `None` for none.
        has_switch: Whether windows count only with `use_sliding_window`, and from
            layer `max_window_layers` on.
        head_dim: The width of a head where `head_dim` is left out; `None` for the
            model's width over the number of heads.
        rope_theta: The rotary base where `rope_theta` is left out.
        rms_norm_eps: The epsilon of the norms where `rms_norm_eps` is left out.
    """

    architecture: str
    qkv_bias: bool = False
    qk_norm: bool = False
    counts: tuple[str, ...] = ()
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    has_window: bool = False
    window: int | None = None
    has_switch: bool = False
    head_dim: int | None = None
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6

    @property
    def fields(self) -> set[str]:
        """The keys that `config.json` may have in this family only."""
        known = _SWITCH if self.has_switch else set()
        known = known | (_MIXTURE | set(self.counts) if self.counts else set())
        return known | (_NARROW if self.expert_size else set())


_SWITCH = {"use_sliding_window", "max_window_layers"}
# The last two change training only.
_MIXTURE = {"num_experts_per_tok", "router_aux_loss_coef", "router_jitter_noise"}
# The last says nothing where no layer has a window.
_NARROW = {"moe_intermediate_size", "norm_topk_prob", "max_window_layers"}

FAMILIES = {
    "llama": Family(architecture="LlamaForCausalLM"),
    "mistral": Family(architecture="MistralForCausalLM", has_window=True, window=4096),
    "mixtral": Family(
        architecture="MixtralForCausalLM",
        has_window=True,
        counts=("num_local_experts",),
        num_experts=8,
        experts_per_token=2,
        rope_theta=1e6,
        rms_norm_eps=1e-5,
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
        has_window=True,
        window=4096,
        has_switch=True,
        head_dim=128,
    ),
    # A window in every layer would be `use_sliding_window`: none published has it.
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        qk_norm=True,
        counts=("num_experts", "num_local_experts"),
        num_experts=128,
        experts_per_token=8,
        expert_size=768,
    ),
}
"""The families of targets by `model_type`."""


DTYPES = ("float32", "bfloat16", "float16")
"""The dtypes that weights may be stored in."""

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
_LAYER_TYPES = ("full_attention", _SLIDING)


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
        known = ", ".join(family.architecture for family in FAMILIES.values())
        raise fields.refusal(
            f"architectures = {names!r} with model_type {kind!r} is not supported; "
            f"known are {known}"
        )
    check_keys(fields, family.fields | {"quantization_config"})
    rope = read_rope(fields, default_theta=family.rope_theta)
    layer = layer_config(fields, family, rope)
    num_layers = fields.size("num_hidden_layers", most=_MOST_LAYERS)
    window, windowed = _read_windows(fields, family, num_layers)
    return TransformerConfig(
        layer=layer,
        num_layers=num_layers,
        vocab_size=fields.size("vocab_size"),
        max_positions=fields.size("max_position_embeddings", most=MOST_POSITIONS),
        tie_embeddings=fields.flag("tie_word_embeddings"),
        sliding_window=window,
        windowed_layers=windowed,
    )


def stored_dtype(folder: Path) -> str:
    """Returns the dtype that `config.json` names; "float32" where it names none."""
    fields = Fields.read(folder)
    given = fields.get("dtype") or fields.get("torch_dtype") or "float32"
    name = str(given).removeprefix("torch.")
    if name not in DTYPES:
        raise fields.refusal(
            f"dtype = {given!r} is not supported; choose one with `dtype`"
        )
    return name


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
    return LayerConfig(
        hidden_size=hidden_size,
        intermediate_size=fields.size("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", default=family.rms_norm_eps),
        rope=rope,
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        **(_read_experts(fields, family) if family.counts else {}),
    )


def _read_experts(fields: Fields, family: Family) -> dict[str, Any]:
    """Returns the fields of `LayerConfig` that are about experts."""
    given = [name for name in family.counts if fields.get(name) is not None]
    sizes = {
        fields.size(name, default=family.num_experts, most=_MOST_EXPERTS)
        for name in given or family.counts
    }
    if len(sizes) > 1:
        raise fields.refusal(f"{' and '.join(given)} are not the same")
    (num_experts,) = sizes
    chosen = fields.size(
        "num_experts_per_tok", default=family.experts_per_token, most=num_experts
    )
    read = {"num_experts": num_experts, "experts_per_token": chosen}
    if not family.expert_size:
        return read
    return read | {
        "expert_size": fields.size("moe_intermediate_size", default=family.expert_size),
        "shares_of_all": not fields.flag("norm_topk_prob"),
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
    windowed = tuple(range(start, num_layers))
    if types:
        named = tuple(n for n, name in enumerate(types) if name == _SLIDING)
        if window is None and named:
            raise fields.refusal(
                f"layer_types asks for {_SLIDING}, but there is no sliding_window"
            )
        if not family.has_switch and window is not None and named != windowed:
            raise fields.refusal(
                f"layer_types contradicts sliding_window = {window}, which this "
                "family has in every layer"
            )
        windowed = named
    return (window, windowed) if window and windowed else (None, ())
