"""The keys that a `config.json` may have, and how their values are checked.

A key that changes what a model computes is refused by name unless we implement it. Any
other that we do not know is warned about, as every release of transformers adds some.
"""

import dataclasses
import functools
import math
import warnings
from pathlib import Path
from typing import Any, Self

from eagle_jax.errors import InputError, one_line
from eagle_jax.models.rope import RopeConfig
from eagle_jax.parsing import read_json

MOST = 2**24
"""The largest number that may size a tensor; no checkpoint holds a larger one."""

MOST_POSITIONS = 2**31 - 1
"""The largest number of positions, which are int32."""

DTYPES = ("float32", "bfloat16", "float16")
"""The dtypes that weights may be stored in."""

# Outside of these float32 is zero or infinite.
_LEAST_NUMBER, _MOST_NUMBER = 1e-37, 1e38

_ROPE_FIELDS = (
    "rope_type, type, rope_theta, factor, low_freq_factor, high_freq_factor, "
    "original_max_position_embeddings"
)
_YARN_FIELDS = (
    f"{_ROPE_FIELDS}, beta_fast, beta_slow, truncate, attention_factor, mscale, "
    "mscale_all_dim"
)
_LONG = ("longrope", "su")  # The second is how the first Phi-3 called it.
_LONG_FIELDS = f"{_ROPE_FIELDS}, attention_factor, short_factor, long_factor"


def _each(names: str, neutral: object = 0) -> dict[str, object]:
    """Returns the value at which each of these keys changes nothing, 0 or false."""
    return dict.fromkeys(names.split(), neutral)


# These are read, here or elsewhere, or change neither the text nor the shapes.
_KNOWN = _each(
    """vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
    num_key_value_heads head_dim rms_norm_eps max_position_embeddings
    max_sequence_length tie_word_embeddings rope_theta rope_scaling rope_parameters
    sliding_window torch_dtype dtype eos_token_id architectures model_type bias qkv_bias
    layer_types

    _name_or_path _model_name_or_path _commit_hash transformers_version
    initializer_range use_cache bos_token_id unk_token_id tokenizer_class prefix
    pruned_heads pad_token_id attention_dropout hidden_dropout pretraining_tp auto_map
    id2label label2id num_labels output_attentions output_hidden_states return_dict
    torchscript is_decoder is_encoder_decoder add_cross_attention max_length written_by
    unsloth_version unsloth_fixed attn_implementation _attn_implementation
    _attn_implementation_autoset use_bfloat16 tf_legacy_loss
    chunk_size_feed_forward problem_type finetuning_task task_specific_params
    sep_token_id decoder_start_token_id temperature top_p top_k do_sample
    repetition_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size min_length
    length_penalty diversity_penalty typical_p num_beams num_beam_groups
    num_return_sequences cross_attention_hidden_size"""
)


_MATHEMATICS = {
    **_each(
        """attention_bias mlp_bias lm_head_bias qk_norm use_qk_norm clip_qkv
        attn_logit_softcapping final_logit_softcapping use_sliding_window
        query_pre_attn_scalar rope_local_base_freq use_bidirectional_attention
        sliding_window_pattern attention_chunk_size rope_interleaved use_dynamic_ntk
        num_local_experts num_experts num_experts_per_tok moe_intermediate_size
        shared_expert_intermediate_size
        quantization_config compression_config quantization"""
    ),
    **_each("partial_rotary_factor decoder_sparse_step logit_scale", 1),
    **_each("hidden_act hidden_activation", "silu"),
    **_each("swiglu_limit", 7),
    **_each("swiglu_alpha", 1.702),
    **_each("mlp_only_layers", None),  # Layer 0 is one, too.
    **_each("norm_topk_prob is_causal", True),
    # Heads: EAGLE-3's, and what its variants do otherwise.
    **_each(
        """draft_vocab_size target_hidden_size eagle_config norm_before_residual
        norm_before_fc fc_norm norm_output eagle_aux_hidden_state_layer_ids"""
    ),
    **_each("inputs", "feature+shifted"),
}
"""The keys that change the result unless they have this value.

They are not implemented. Null and an empty list change nothing for any key.
"""


@dataclasses.dataclass(frozen=True)
class Fields:
    """The fields of a `config.json`, or of an object in it; null counts as missing.

    Attributes:
        values: The fields by name.
        path: The file that holds them.
    """

    values: dict[str, Any]
    path: Path

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Reads the `config.json` in a folder."""
        path = folder / "config.json"
        return cls(read_json(path), path)

    def get(self, name: str, default: Any = None) -> Any:
        """Returns a field unchecked, or `default` where it is missing."""
        value = self.values.get(name)
        return default if value is None else value

    def size(
        self, name: str, *, default: int | None = None, least: int = 1, most: int = MOST
    ) -> int:
        """Returns a field that must be an integer from `least` to `most`."""
        value = self.get(name, default)
        if type(value) is not int or not least <= value <= most:
            raise self.refusal(
                f"{name} = {value!r} must be an integer from {least} to {most:,}"
            )
        return value

    def number(self, name: str, *, default: float | None = None) -> float:
        """Returns a field that must be a positive number that float32 can hold."""
        value = self.get(name, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not _LEAST_NUMBER < value < _MOST_NUMBER:
            raise self.refusal(
                f"{name} = {value!r} must be a positive number that float32 holds"
            )
        return float(value)

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Returns a field that must be true or false."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.refusal(f"{name} = {value!r} must be true or false")
        return value

    def unnested(self, name: str, *left_out: str) -> "Fields":
        """Returns the fields of an object in these, beside the others of these.

        Args:
            name: The field that holds the object; it may be missing.
            left_out: The names of fields of these to leave out.
        """
        nested = self.get(name, {})
        if not isinstance(nested, dict):
            raise self.refusal(f"{name} = {nested!r} must be an object")
        outer = {k: x for k, x in self.values.items() if k not in (name, *left_out)}
        return Fields(outer | nested, self.path)

    def refusal(self, text: str) -> InputError:
        """Returns the error to raise where a field cannot be used."""
        return InputError(f"{self.path}: {text}")


def check_keys(fields: Fields, more: set[str]) -> None:
    """Refuses keys that change the result and are not implemented.

    One warning names all other keys that are not known; `more` are known in this kind
    of model only.
    """
    unknown = []
    for name, value in fields.values.items():
        if name in _KNOWN or name in more or value is None:
            continue
        if name not in _MATHEMATICS:
            unknown += [] if value is False else [name]
            continue
        neutral = _MATHEMATICS[name]
        values = value if isinstance(value, list) else [value]
        if any(one != neutral for one in values):
            only = f", only {neutral!r}" if neutral else ""
            raise fields.refusal(f"{name} = {value!r} is not supported{only}")
    if unknown:
        warn_once(
            f"{fields.path}: unknown and ignored: {', '.join(unknown)}; the text is "
            "another one if they change what the model computes"
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


def stop_tokens(folder: Path) -> tuple[int, ...]:
    """Returns the ids that end a text, ascending.

    Args:
        folder: The target's folder. Its `generation_config.json` decides where it
            names any, otherwise `config.json`; an empty list names none.
    """
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        fields = Fields(read_json(path) if path.is_file() else {}, path)
        ids = fields.get("eos_token_id", [])
        listed = ids if isinstance(ids, list) else [ids]
        if not all(type(token) is int and 0 <= token < 2**31 for token in listed):
            raise fields.refusal(
                f"eos_token_id = {ids!r} must be an id or a list of them, integers "
                "from 0 to 2**31 - 1"
            )
        if listed:
            return tuple(sorted(set(listed)))
    return ()


@functools.cache
def warn_once(message: str) -> None:
    """Warns, once in a process however often a file is read."""
    warnings.warn(one_line(message), stacklevel=2)


def read_rope(
    fields: Fields, *, default_theta: float = 10000.0, is_head: bool = False
) -> RopeConfig:
    """Reads `rope_theta` and `rope_scaling`, or transformers 5's `rope_parameters`.

    Args:
        fields: The fields of a model.
        default_theta: The rotary base that a file without `rope_theta` means.
        is_head: Whether the file describes a head.
    """
    scaling = _rope_scaling(fields)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    known = ["default", "linear", "llama3", "yarn", "dynamic"]
    known += () if is_head else _LONG
    if kind not in known:
        raise fields.refusal(
            f"rope type {kind!r} is not supported; known are {', '.join(known)}"
        )
    if kind == "dynamic":
        scaling.number("factor")
        warn_once(
            f"{fields.path}: rope type 'dynamic' turns all keys anew beyond "
            "max_position_embeddings, which kept keys cannot follow; up to there it is "
            "the plain one"
        )
        kind = "default"
    holders = [one for one in (fields, scaling) if one.get("rope_theta") is not None]
    bases = [one.number("rope_theta") for one in holders] or [default_theta]
    if len(set(bases)) > 1:
        raise fields.refusal(f"rope_theta is both {bases[0]} and {bases[1]}")
    if not holders and (kind in ("llama3", "yarn") or fields.get("rope_parameters")):
        raise fields.refusal("rope_theta is missing beside its rope parameters")
    if not holders and not is_head:  # Published heads name none and mean 10000.
        warn_once(
            f"{fields.path} names no rope_theta; taking {default_theta:g}, which this "
            "family means by that"
        )
    numbers = {
        "linear": ["factor"],
        "llama3": ["factor", "low_freq_factor", "high_freq_factor"],
        "yarn": ["factor"],
    }
    given: dict[str, Any] = {n: scaling.number(n) for n in numbers.get(kind, [])}
    if kind == "yarn":
        if bases[0] <= 1:
            raise fields.refusal(f"rope_theta = {bases[0]} must be above 1 for yarn")
        given |= _yarn(scaling, given["factor"])
    if kind in ("llama3", "yarn"):
        given["original_max_positions"] = scaling.size(
            "original_max_position_embeddings", most=MOST_POSITIONS
        )
    if kind in _LONG:
        kind, given = _LONG[0], _longrope(fields, scaling)
    fraction = fields.number("partial_rotary_factor", default=1.0)
    return RopeConfig(theta=bases[0], kind=kind, fraction=fraction, **given)


def _longrope(fields: Fields, scaling: Fields) -> dict[str, Any]:
    """Returns what "longrope" has; Phi names the original length beside it."""
    name, long = "original_max_position_embeddings", "max_position_embeddings"
    original = scaling.size(name, default=fields.get(name), least=2)
    stretch = fields.size(long, most=MOST_POSITIONS) / original
    stretch = scaling.number("factor", default=stretch)
    usual = math.sqrt(1 + math.log(max(stretch, 1)) / math.log(original))
    factors = scaling.get("short_factor")
    if not isinstance(factors, list) or not factors:
        raise fields.refusal(f"short_factor = {factors!r} must be a list of numbers")
    return {
        "original_max_positions": original,
        "attention_factor": scaling.number("attention_factor", default=usual),
        "factors": tuple(
            Fields({"short_factor": one}, fields.path).number("short_factor")
            for one in factors
        ),
    }


def _yarn(scaling: Fields, factor: float) -> dict[str, Any]:
    """Returns what "yarn" has beside its factor; transformers says the defaults."""

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    usual = scale(1.0)
    weights = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if all(weights):
        own, other = (scaling.number(name) for name in ("mscale", "mscale_all_dim"))
        usual = scale(own) / scale(other)
    return {
        "beta_fast": scaling.number("beta_fast", default=32.0),
        "beta_slow": scaling.number("beta_slow", default=1.0),
        "truncate": scaling.flag("truncate", default=True),
        "attention_factor": scaling.number("attention_factor", default=usual),
    }


def _rope_scaling(fields: Fields) -> Fields:
    """Returns `rope_parameters` or `rope_scaling`, empty where there is neither."""
    names = ("rope_parameters", "rope_scaling")
    given = {name: fields.get(name) for name in names if fields.get(name)}
    for name, scaling in given.items():
        is_object = isinstance(scaling, dict)
        kinds = [scaling.get("rope_type"), scaling.get("type")] if is_object else []
        known = _YARN_FIELDS if "yarn" in kinds else _ROPE_FIELDS
        known = _LONG_FIELDS if {*_LONG}.intersection(kinds) else known
        if not is_object or scaling.keys() - known.split(", "):
            raise fields.refusal(f"{name} = {scaling!r} must be an object of {known}")
    new, old = (given.get(name, {}) for name in names)
    if new and new != new | old:
        raise fields.refusal("rope_parameters and rope_scaling contradict each other")
    return Fields(new or old, fields.path)
