"""From `config.json` to the sizes of our models; what we cannot run is refused."""

import dataclasses
from collections.abc import Collection
from pathlib import Path
from typing import Any

from eagle_jax.checkpoints.hf_fields import (
    MOST,
    MOST_POSITIONS,
    check_keys,
    flag_of,
    number_of,
    read_rope,
    size_of,
)
from eagle_jax.errors import InputError
from eagle_jax.models.eagle_head import EagleHeadConfig
from eagle_jax.models.layers import LayerConfig
from eagle_jax.models.rope import RopeConfig
from eagle_jax.models.transformer import TransformerConfig
from eagle_jax.parsing import read_json


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """One `model_type`.

    Attributes:
        architecture: Its entry in `architectures`.
        qkv_bias: Whether q, k and v have biases.
        qk_norm: Whether queries and keys are normalised.
        is_mixture: Whether each layer is a sparse mixture of experts.
        has_window: Whether `sliding_window` means something.
        window: What it is where the field is left out; `None` for no window.
        has_switch: Whether it counts only with `use_sliding_window`, and from layer
            `max_window_layers` on.
        head_dim: What `head_dim` is where it is left out; `None` for the width over
            the number of heads.
        rope_theta: What `rope_theta` is where it is left out.
        rms_norm_eps: What `rms_norm_eps` is where it is left out.
    """

    architecture: str
    qkv_bias: bool = False
    qk_norm: bool = False
    is_mixture: bool = False
    has_window: bool = False
    window: int | None = None
    has_switch: bool = False
    head_dim: int | None = None
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6

    @property
    def fields(self) -> set[str]:
        """What `config.json` may name in this family only."""
        switch = {"use_sliding_window", "max_window_layers"}
        mixture = {"num_local_experts", "num_experts_per_tok"}
        # These two change training only.
        mixture |= {"router_aux_loss_coef", "router_jitter_noise"}
        return (switch if self.has_switch else set()) | (
            mixture if self.is_mixture else set()
        )


FAMILIES = {
    "llama": Family(architecture="LlamaForCausalLM"),
    "mistral": Family(architecture="MistralForCausalLM", has_window=True, window=4096),
    "mixtral": Family(
        architecture="MixtralForCausalLM",
        has_window=True,
        is_mixture=True,
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
}
"""Target families by `model_type`."""


def family_of(config: TransformerConfig) -> str:
    """Returns the family that a model is exported as."""
    layer = config.layer
    if layer.qk_norm:
        return "qwen3"
    if layer.qkv_bias:
        return "qwen2"
    if layer.num_experts:
        return "mixtral"
    return "llama" if config.sliding_window is None else "mistral"


DTYPES = ("float32", "bfloat16", "float16")
"""What weights may be stored in."""

_MOST_LAYERS = 10_000
_QWEN_FULL_LAYERS = 28
_SLIDING = "sliding_attention"
_LAYER_TYPES = ("full_attention", _SLIDING)


def target_config(folder: Path) -> TransformerConfig:
    """Reads the sizes of a target.

    Args:
        folder: Holds `config.json`, in the spelling of transformers 4 or 5.

    Returns:
        Its sizes.

    Raises:
        InputError: If the family is unknown, or a field is missing or asks for
            something that is not implemented.
    """
    path = folder / "config.json"
    config = read_json(path)
    kind = config.get("model_type")
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        raise InputError(f"{path}: architectures = {names!r} must be a list of names")
    family = FAMILIES.get(str(kind))
    if family is None or any(name != family.architecture for name in names):
        known = ", ".join(family.architecture for family in FAMILIES.values())
        raise InputError(
            f"{path}: architecture {', '.join(names) or None!r} with model_type "
            f"{kind!r} is not supported; known are {known}"
        )
    check_keys(config, path, family.fields)
    layer = layer_config(
        config,
        path,
        qkv_bias=family.qkv_bias,
        rope=read_rope(config, path, default_theta=family.rope_theta),
        head_dim=family.head_dim,
        rms_norm_eps=family.rms_norm_eps,
    )
    if family.is_mixture:
        layer = dataclasses.replace(
            layer,
            num_experts=size_of(config, "num_local_experts", path, default=8),
            experts_per_token=size_of(config, "num_experts_per_tok", path, default=2),
        )
        if layer.experts_per_token > layer.num_experts:
            raise InputError(
                f"{path}: num_experts_per_tok = {layer.experts_per_token} is more than "
                f"num_local_experts = {layer.num_experts}"
            )
    num_layers = size_of(config, "num_hidden_layers", path, most=_MOST_LAYERS)
    window, windowed = read_windows(config, family, num_layers, path)
    return TransformerConfig(
        layer=dataclasses.replace(layer, qk_norm=family.qk_norm),
        num_layers=num_layers,
        vocab_size=size_of(config, "vocab_size", path),
        max_positions=size_of(
            config, "max_position_embeddings", path, most=MOST_POSITIONS
        ),
        tie_embeddings=flag_of(config, "tie_word_embeddings", path, default=False),
        sliding_window=window,
        windowed_layers=windowed,
    )


def head_config(folder: Path) -> EagleHeadConfig:
    """Reads the sizes of an EAGLE-1/2 head; nothing is derived from a target.

    Args:
        folder: Holds `config.json`.

    Returns:
        Its sizes.

    Raises:
        InputError: As for `target_config`.
    """
    path = folder / "config.json"
    config = read_json(path)
    if is_eagle3(folder):
        raise InputError(
            f"{path}: this is an EAGLE-3 head, which can be run and nothing else so "
            "far; give an EAGLE-1/2 head here"
        )
    check_head_keys(config, path)
    if config.get("num_hidden_layers", 1) != 1:
        raise InputError(
            f"{path}: num_hidden_layers = {config['num_hidden_layers']}; an EAGLE-1/2 "
            "head has 1 layer"
        )
    rope = read_rope(config, path, is_head=True)
    has_bias = flag_of(config, "qkv_bias", path, default=False)
    return EagleHeadConfig(
        layer=layer_config(config, path, qkv_bias=has_bias, rope=rope),
        vocab_size=size_of(config, "vocab_size", path),
        max_positions=head_positions(config, path),
        fc_bias=flag_of(config, "bias", path, default=True),
    )


def head_positions(config: dict[str, Any], path: Path) -> int:
    """Returns the positions that a head was trained for, 2,048 where none are named.

    Raises:
        InputError: If they are no positive integer.
    """
    name = "max_position_embeddings"
    return size_of(config, name, path, default=2048, most=MOST_POSITIONS)


def is_eagle3(folder: Path) -> bool:
    """Returns whether the settings in a folder are those of an EAGLE-3 head.

    Raises:
        InputError: If `config.json` cannot be read.
    """
    config = read_json(folder / "config.json")
    return "draft_vocab_size" in config or "eagle_config" in config


def check_head_keys(
    config: dict[str, Any], path: Path, more: Collection[str] = ()
) -> None:
    """Refuses a head that cannot be run, as `check_keys` does.

    Args:
        config: What `config.json` holds.
        path: Of that file.
        more: Keys that are known in this kind of head only.

    Raises:
        InputError: If so, or if its `model_type` is one that nobody gives to a head.
    """
    if config.get("model_type", "llama") not in (*FAMILIES, "eagle"):
        raise InputError(
            f"{path}: model_type {config['model_type']!r} is not supported for a "
            f"head; known are {', '.join((*FAMILIES, 'eagle'))}"
        )
    # What a head's config says about its target's family does not concern the head.
    check_keys(config, path, {*more}.union(*(f.fields for f in FAMILIES.values())))


def stored_dtype(folder: Path) -> str:
    """Returns the dtype that `config.json` names; "float32" where it names none."""
    config = read_json(folder / "config.json")
    given = config.get("dtype") or config.get("torch_dtype") or "float32"
    name = str(given).removeprefix("torch.")
    if name not in DTYPES:
        raise InputError(
            f"{folder / 'config.json'}: dtype = {given!r} is not supported; choose one "
            "with `dtype`"
        )
    return name


def layer_config(
    config: dict[str, Any],
    path: Path,
    *,
    qkv_bias: bool,
    rope: RopeConfig,
    head_dim: int | None = None,
    rms_norm_eps: float = 1e-6,
) -> LayerConfig:
    """Reads the sizes of a layer.

    Args:
        config: The fields of `config.json`.
        path: Of that file, for refusals.
        qkv_bias: As in the result.
        rope: As in the result.
        head_dim: What `head_dim` is where it is left out; `None` for the width over
            the number of heads.
        rms_norm_eps: What `rms_norm_eps` is where it is left out.

    Raises:
        InputError: If a size is missing, or does not fit the others.
    """
    num_heads = size_of(config, "num_attention_heads", path)
    num_kv_heads = size_of(config, "num_key_value_heads", path, default=num_heads)
    hidden_size = size_of(config, "hidden_size", path)
    if head_dim is None and config.get("head_dim") is None and hidden_size % num_heads:
        raise InputError(
            f"{path}: num_attention_heads = {num_heads} does not divide hidden_size = "
            f"{hidden_size}, and no head_dim is given"
        )
    head_dim = head_dim or hidden_size // num_heads
    head_dim = size_of(config, "head_dim", path, default=head_dim)
    if head_dim % 2:
        raise InputError(
            f"{path}: head_dim = {head_dim} must be even: rotary embeddings turn pairs"
        )
    if num_heads * head_dim > MOST:
        raise InputError(
            f"{path}: num_attention_heads = {num_heads} of head_dim = {head_dim} are "
            f"more than {MOST:,} values"
        )
    if num_heads % num_kv_heads:
        raise InputError(
            f"{path}: num_key_value_heads = {num_kv_heads} does not divide "
            f"num_attention_heads = {num_heads}"
        )
    return LayerConfig(
        hidden_size=hidden_size,
        intermediate_size=size_of(config, "intermediate_size", path),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=number_of(config, "rms_norm_eps", path, default=rms_norm_eps),
        rope=rope,
        qkv_bias=qkv_bias,
    )


def read_windows(
    config: dict[str, Any], family: Family, num_layers: int, path: Path
) -> tuple[int | None, tuple[int, ...]]:
    """Returns the sliding window and the layers that have it.

    Args:
        config: The fields of `config.json`.
        family: Of the target.
        num_layers: `L`.
        path: Of that file, for refusals.

    Returns:
        Tokens that a layer looks back, `None` where no layer has a window, and the
        numbers of the layers that do.

    Raises:
        InputError: If fields contradict each other or are of another kind.
    """
    types = config.get("layer_types")
    is_list = isinstance(types, list) and len(types) == num_layers
    if types and (not is_list or any(name not in _LAYER_TYPES for name in types)):
        raise InputError(
            f"{path}: layer_types must name {' or '.join(_LAYER_TYPES)} for each of "
            f"{num_layers} layers, not {types!r}"
        )
    window = None
    is_on = not family.has_switch or flag_of(
        config, "use_sliding_window", path, default=False
    )
    # A field that is left out means the family's own; only null means none.
    if family.has_window and is_on and config.get("sliding_window", 0) is not None:
        default = family.window
        if default is not None or "sliding_window" in config:
            window = size_of(
                config, "sliding_window", path, default=default, most=MOST_POSITIONS
            )
    sliding = [number for number, name in enumerate(types or ()) if name == _SLIDING]
    if window is None and sliding:
        raise InputError(
            f"{path}: layer_types asks for sliding_attention, but there is no "
            "sliding_window"
        )
    is_everywhere = not types or len(sliding) == num_layers
    if window is not None and not family.has_switch and not is_everywhere:
        raise InputError(
            f"{path}: layer_types contradicts sliding_window = {window}, which this "
            "family has in every layer"
        )
    start = 0
    if family.has_switch:
        start = size_of(
            config, "max_window_layers", path, default=_QWEN_FULL_LAYERS, least=0
        )
    windowed = tuple(sliding if types else range(start, num_layers))
    if window is None or not windowed:
        return None, ()
    return window, windowed
