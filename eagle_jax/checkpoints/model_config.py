"""From `config.json` to the sizes of our models; what we cannot run is refused."""

import dataclasses
from pathlib import Path
from typing import Any

from eagle_jax.checkpoints.families import FAMILIES
from eagle_jax.checkpoints.fields import (
    MOST,
    MOST_POSITIONS,
    check_keys,
    flag_of,
    number_of,
    size_of,
)
from eagle_jax.checkpoints.rope_json import read_rope
from eagle_jax.checkpoints.window_json import read_windows
from eagle_jax.errors import InputError
from eagle_jax.models.eagle_head import EagleHeadConfig
from eagle_jax.models.layers import LayerConfig
from eagle_jax.models.rope import RopeConfig
from eagle_jax.models.transformer import TransformerConfig
from eagle_jax.parsing import read_json

DTYPES = ("float32", "bfloat16", "float16")
"""What weights may be stored in."""

_MOST_LAYERS = 10_000


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
    check_head_type(config, path)
    # What a head's config says about its target's family does not concern the head.
    others = set().union(*(family.fields for family in FAMILIES.values()))
    check_keys(config, path, others)
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


def check_head_type(config: dict[str, Any], path: Path) -> None:
    """Refuses a head whose `model_type` nobody gives to a head.

    Raises:
        InputError: If so.
    """
    if config.get("model_type", "llama") not in (*FAMILIES, "eagle"):
        raise InputError(
            f"{path}: model_type {config['model_type']!r} is not supported for a "
            f"head; known are {', '.join((*FAMILIES, 'eagle'))}"
        )


def stop_tokens(folder: Path) -> tuple[int, ...]:
    """Returns the ids that end a text, ascending.

    Args:
        folder: `generation_config.json` decides where it names any, otherwise
            `config.json`; an empty list names none.

    Raises:
        InputError: If they are no ids.
    """
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        ids = read_json(path).get("eos_token_id") if path.is_file() else None
        if ids is None or ids == []:
            continue
        listed = ids if isinstance(ids, list) else [ids]
        if not all(type(token) is int and 0 <= token < 2**31 for token in listed):
            raise InputError(
                f"{path}: eos_token_id = {ids!r} must be an id or a list of them, "
                "integers from 0 to 2**31 - 1"
            )
        return tuple(sorted(set(listed)))
    return ()


def stored_dtype(folder: Path) -> str:
    """Returns the dtype that `config.json` names; "float32" where it names none."""
    config = read_json(folder / "config.json")
    given = config.get("dtype") or config.get("torch_dtype") or "float32"
    name = str(given).removeprefix("torch.")
    if name not in DTYPES:
        raise InputError(
            f"{folder / 'config.json'}: dtype = {given!r} is not supported; choose one "
            "with --dtype"
        )
    return name


def check_pair(target: TransformerConfig, head: EagleHeadConfig) -> None:
    """Refuses a head that was made for another target.

    Raises:
        InputError: If width or vocabulary differ.
    """
    sizes = {
        "hidden_size": (head.layer.hidden_size, target.layer.hidden_size),
        "vocab_size": (head.vocab_size, target.vocab_size),
    }
    for name, (given, wanted) in sizes.items():
        if given != wanted:
            raise InputError(
                f"the head's {name} is {given}, the target's is {wanted}; give the "
                "head that was trained for this target"
            )


def check_small_model(target: TransformerConfig, small: TransformerConfig) -> None:
    """Refuses a small model that cannot draft for this target.

    Raises:
        InputError: If the vocabularies differ.
    """
    if small.vocab_size != target.vocab_size:
        raise InputError(
            f"the small model has {small.vocab_size} tokens, the target "
            f"{target.vocab_size}; give a model with the target's tokenizer"
        )


def check_max_length(target: TransformerConfig, max_length: int) -> None:
    """Refuses lengths that the target cannot attend over.

    Raises:
        InputError: If `max_length` exceeds the positions.
    """
    if max_length > target.max_positions:
        raise InputError(
            f"max_length = {max_length} is more than the target's "
            f"{target.max_positions} positions (max_position_embeddings)"
        )


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
