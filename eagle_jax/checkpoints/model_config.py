"""From `config.json` to the sizes of our models; what we cannot run is refused."""

import math
import warnings
from pathlib import Path
from typing import Any

from eagle_jax.checkpoints.source import read_json
from eagle_jax.errors import InputError
from eagle_jax.models.eagle_head import EagleHeadConfig
from eagle_jax.models.layers import LayerConfig
from eagle_jax.models.rope import RopeConfig
from eagle_jax.models.transformer import TransformerConfig

FAMILIES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}
"""Target families by `model_type`, with their `architectures` entry."""

DTYPES = ("float32", "bfloat16", "float16")
"""What weights may be stored in."""

_DEFAULT_ROPE_THETA = 10000.0
_MISTRAL_WINDOW = 4096

_ROPE_FIELDS = {
    *("rope_type", "type", "rope_theta", "factor", "low_freq_factor"),
    *("high_freq_factor", "original_max_position_embeddings"),
}
_READ = {
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps"),
    *("max_position_embeddings", "max_sequence_length", "tie_word_embeddings"),
    *("rope_theta", "rope_scaling", "rope_parameters", "sliding_window"),
    *("torch_dtype", "dtype", "eos_token_id", "architectures", "model_type"),
    *("bias", "qkv_bias"),
}
# These change neither the text nor the shapes, at least not in these families.
_IGNORED = {
    *("_name_or_path", "transformers_version", "initializer_range", "use_cache"),
    *("bos_token_id", "pad_token_id", "attention_dropout", "hidden_dropout"),
    *("pretraining_tp", "auto_map", "id2label", "label2id", "num_labels"),
    *("output_attentions", "output_hidden_states", "return_dict", "torchscript"),
    *("is_decoder", "is_encoder_decoder", "add_cross_attention", "max_length"),
    *(
        "written_by",
        "unsloth_version",
        "unsloth_fixed",
        "_attn_implementation",
        "use_bfloat16",
    ),
    *(
        "chunk_size_feed_forward",
        "problem_type",
        "finetuning_task",
        "task_specific_params",
    ),
    *("temperature", "top_p", "top_k", "do_sample", "repetition_penalty"),
    *("sep_token_id", "decoder_start_token_id", "cross_attention_hidden_size"),
}
# These are understood at this value only.
_REQUIRED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "layer_types": "full_attention",
}


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
    family = config.get("model_type")
    names = config.get("architectures") or []
    if family not in FAMILIES or any(name != FAMILIES[family] for name in names):
        known = ", ".join(FAMILIES.values())
        raise InputError(
            f"{path}: architecture {', '.join(names) or family!r} is not supported; "
            f"known are {known}"
        )
    _refuse_unsupported(config, path)
    window = None
    if family == "mistral" and config.get("sliding_window", 0) is not None:
        # A Mistral that names no window has one; only null means none.
        window = _size(config, "sliding_window", path, default=_MISTRAL_WINDOW)
    return TransformerConfig(
        layer=_layer_config(config, path, qkv_bias=False, rope=_rope(config, path)),
        num_layers=_size(config, "num_hidden_layers", path),
        vocab_size=_size(config, "vocab_size", path),
        max_positions=_size(config, "max_position_embeddings", path),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        sliding_window=window,
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
    if "draft_vocab_size" in config or "eagle_config" in config:
        raise InputError(
            f"{path}: this is an EAGLE-3 head; only EAGLE-1 and EAGLE-2 heads are "
            "supported"
        )
    if config.get("model_type", "llama") not in (*FAMILIES, "eagle"):
        raise InputError(
            f"{path}: model_type {config['model_type']!r} is not supported for a "
            "head; known is llama"
        )
    _refuse_unsupported(config, path)
    if config.get("num_hidden_layers", 1) != 1:
        raise InputError(
            f"{path}: num_hidden_layers = {config['num_hidden_layers']}; an EAGLE-1/2 "
            "head has 1 layer"
        )
    rope = _rope(config, path, is_head=True)
    return EagleHeadConfig(
        layer=_layer_config(
            config, path, qkv_bias=bool(config.get("qkv_bias", False)), rope=rope
        ),
        vocab_size=_size(config, "vocab_size", path),
        max_positions=_size(config, "max_position_embeddings", path, default=2048),
        fc_bias=bool(config.get("bias", True)),
    )


def stop_tokens(folder: Path) -> tuple[int, ...]:
    """Returns the ids that end a text, ascending.

    Args:
        folder: `generation_config.json` decides where it names them, otherwise
            `config.json`.

    Raises:
        InputError: If they are no integers.
    """
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        ids = read_json(path).get("eos_token_id") if path.is_file() else None
        if ids is None:
            continue
        listed = ids if isinstance(ids, list) else [ids]
        if not all(isinstance(token, int) for token in listed):
            raise InputError(
                f"{path}: eos_token_id = {ids!r} must be an integer or a list of them"
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
        InputError: If `max_length` exceeds the positions or the sliding window.
    """
    if max_length > target.max_positions:
        raise InputError(
            f"max_length = {max_length} is more than the target's "
            f"{target.max_positions} positions (max_position_embeddings)"
        )
    window = target.sliding_window
    if window is not None and max_length > window:
        raise InputError(
            f"max_length = {max_length} is more than the target's sliding_window of "
            f"{window}, which is not implemented; give at most {window}"
        )


def _layer_config(
    config: dict[str, Any], path: Path, *, qkv_bias: bool, rope: RopeConfig
) -> LayerConfig:
    num_heads = _size(config, "num_attention_heads", path)
    num_kv_heads = _size(config, "num_key_value_heads", path, default=num_heads)
    hidden_size = _size(config, "hidden_size", path)
    if config.get("head_dim") is None and hidden_size % num_heads:
        raise InputError(
            f"{path}: num_attention_heads = {num_heads} does not divide hidden_size = "
            f"{hidden_size}, and no head_dim is given"
        )
    head_dim = _size(config, "head_dim", path, default=hidden_size // num_heads)
    if head_dim % 2:
        raise InputError(
            f"{path}: head_dim = {head_dim} must be even: rotary embeddings turn pairs"
        )
    if num_heads % num_kv_heads:
        raise InputError(
            f"{path}: num_key_value_heads = {num_kv_heads} does not divide "
            f"num_attention_heads = {num_heads}"
        )
    return LayerConfig(
        hidden_size=hidden_size,
        intermediate_size=_size(config, "intermediate_size", path),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=_number(config, "rms_norm_eps", path, default=1e-6),
        rope=rope,
        qkv_bias=qkv_bias,
    )


def _rope(config: dict[str, Any], path: Path, *, is_head: bool = False) -> RopeConfig:
    """Reads `rope_theta` and `rope_scaling`, or transformers 5's `rope_parameters`."""
    scaling = _rope_scaling(config, path)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    outer, inner = config.get("rope_theta"), scaling.get("rope_theta")
    if outer is None and inner is None:
        if kind == "llama3" or config.get("rope_parameters"):
            raise InputError(
                f"{path}: rope_theta is missing beside its rope parameters"
            )
        theta = _DEFAULT_ROPE_THETA
        if not is_head:  # Published heads name none and mean 10000.
            warnings.warn(
                f"{path} names no rope_theta; taking {theta:g}, which Llama 2 and "
                "Vicuna mean by that",
                stacklevel=3,
            )
    elif None not in (outer, inner) and outer != inner:
        raise InputError(f"{path}: rope_theta is both {outer} and {inner}")
    else:
        theta = _number(config if inner is None else scaling, "rope_theta", path)
    if kind in ("linear", "llama3") and "factor" not in scaling:
        raise InputError(f"{path}: rope type {kind!r} needs a factor")
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(
            theta=theta, kind=kind, factor=_number(scaling, "factor", path)
        )
    if kind == "llama3":
        wanted = ("low_freq_factor", "high_freq_factor")
        missing = [
            name
            for name in (*wanted, "original_max_position_embeddings")
            if name not in scaling
        ]
        if missing:
            raise InputError(f"{path}: rope type 'llama3' needs {', '.join(missing)}")
        return RopeConfig(
            theta=theta,
            kind=kind,
            factor=_number(scaling, "factor", path),
            low_freq_factor=_number(scaling, "low_freq_factor", path),
            high_freq_factor=_number(scaling, "high_freq_factor", path),
            original_max_positions=_size(
                scaling, "original_max_position_embeddings", path
            ),
        )
    raise InputError(
        f"{path}: rope type {kind!r} is not supported; known are default, linear and "
        "llama3"
    )


def _rope_scaling(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """Returns what either spelling says beside the base; `{}` where neither does."""
    names = [n for n in ("rope_parameters", "rope_scaling") if config.get(n)]
    for name in names:
        if not isinstance(config[name], dict):
            raise InputError(f"{path}: {name} = {config[name]!r} must be an object")
        unknown = sorted(set(config[name]) - _ROPE_FIELDS)
        if unknown:
            raise InputError(
                f"{path}: the field {unknown[0]!r} of {name} is not supported"
            )
    scalings = [config[name] for name in names]
    if len(scalings) == 2 and scalings[0] != scalings[0] | scalings[1]:
        raise InputError(
            f"{path}: rope_parameters and rope_scaling contradict each other; leave "
            "out one of them"
        )
    return scalings[0] if scalings else {}


def _refuse_unsupported(config: dict[str, Any], path: Path) -> None:
    """Refuses fields that we neither implement nor know to be harmless."""
    for name, value in config.items():
        if name in _REQUIRED:
            values = value if isinstance(value, list) else [value]
            if any(v not in (_REQUIRED[name], None) for v in values):
                raise InputError(
                    f"{path}: {name} = {value!r} is not supported, only "
                    f"{_REQUIRED[name]!r}"
                )
        elif name not in _READ | _IGNORED and value not in (None, False):
            raise InputError(
                f"{path}: the field {name!r} is not supported; remove it if it does "
                "not change what the model computes"
            )


def _size(
    config: dict[str, Any], name: str, path: Path, *, default: int | None = None
) -> int:
    value = default if config.get(name) is None else config[name]
    if not isinstance(value, int) or value < 1:
        raise InputError(f"{path}: {name} = {value!r} must be a positive integer")
    return value


def _number(
    config: dict[str, Any], name: str, path: Path, *, default: float | None = None
) -> float:
    value = default if config.get(name) is None else config[name]
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise InputError(f"{path}: {name} = {value!r} must be a positive number")
    return float(value)
