"""The keys that a `config.json` may have, and how their values are checked.

A key that changes what a model computes is refused by name unless we implement it. Any
other that we do not know is warned about, as every release of transformers adds some.
"""

import dataclasses
import functools
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

# Outside of these float32 is zero or infinite.
_LEAST_NUMBER, _MOST_NUMBER = 1e-37, 1e38

_ROPE_FIELDS = {
    *("rope_type", "type", "rope_theta", "factor", "low_freq_factor"),
    *("high_freq_factor", "original_max_position_embeddings"),
}


def _each(names: str, *neutral: object) -> dict[str, tuple[object, ...]]:
    """Returns the values that each of these keys may have, by default 0 or false."""
    return dict.fromkeys(names.split(), neutral or (0,))


_KNOWN = {
    # These are read, here or elsewhere.
    *_each(
        """vocab_size hidden_size intermediate_size num_hidden_layers
        num_attention_heads num_key_value_heads head_dim rms_norm_eps
        max_position_embeddings max_sequence_length tie_word_embeddings
        rope_theta rope_scaling rope_parameters sliding_window torch_dtype dtype
        eos_token_id architectures model_type bias qkv_bias layer_types"""
    ),
    # These change neither the text nor the shapes, at least not in these families.
    *_each(
        """_name_or_path transformers_version initializer_range use_cache
        bos_token_id pad_token_id attention_dropout hidden_dropout
        pretraining_tp auto_map id2label label2id num_labels output_attentions
        output_hidden_states return_dict torchscript is_decoder
        is_encoder_decoder add_cross_attention max_length written_by
        unsloth_version unsloth_fixed _attn_implementation use_bfloat16
        chunk_size_feed_forward problem_type finetuning_task
        task_specific_params sep_token_id decoder_start_token_id temperature
        top_p top_k do_sample repetition_penalty cross_attention_hidden_size"""
    ),
}

_MATHEMATICS = {
    # Which tokens attend to which, and how sharply.
    **_each(
        """attn_logit_softcapping attn_logit_cap attention_logit_cap logits_soft_cap
        attention_multiplier attention_scale attn_scale attention_softmax_scale
        softmax_scale query_pre_attn_scalar attn_temperature_tuning use_logn_attn
        scale_attn_by_inverse_layer_idx attention_sink attention_sinks
        use_attention_sinks add_swa_attention_sink_bias add_full_attention_sink_bias
        use_sliding_window sliding_window_pattern _sliding_window_pattern
        attention_chunk_size global_attn_every_n_layers use_bidirectional_attention
        attn_output_gate use_gated_attention num_kv_shared_layers multi_query"""
    ),
    **_each("is_causal scale_attn_weights", True),
    # Positions.
    **_each("partial_rotary_factor rotary_pct rope_ratio no_rope_layers", 1),
    **_each("position_embedding_type", "rope", "rotary"),
    **_each(
        """rotary_dim rope_interleave rope_interleaved rope_local_base_freq
        no_rope_layer_interval use_dynamic_ntk alibi use_alibi"""
    ),
    # Parts of a layer.
    **_each("hidden_act hidden_activation", "silu"),
    **_each(
        """attention_bias attention_out_bias mlp_bias lm_head_bias use_bias
        add_bias_linear add_qkv_bias use_qkv_bias clip_qkv qk_norm use_qk_norm
        qk_layernorm use_qk_layernorm layernorm_zero_centered rms_norm_unit_offset
        use_parallel_residual parallel_attn use_post_norm swiglu_alpha swiglu_limit
        activation_sparsity_pattern hidden_size_per_layer_input altup_num_inputs
        laurel_rank lambda_std_dev q_lora_rank kv_lora_rank qk_nope_head_dim
        qk_rope_head_dim v_head_dim linear_key_head_dim linear_value_head_dim
        mamba_d_state attn_layer_indices layers_block_type"""
    ),
    # Factors of whole tensors.
    **_each(
        """embedding_multiplier embedding_scale scale_emb residual_multiplier
        logit_scale logits_scaling lm_head_multiplier key_multiplier mlp_multipliers
        attention_in_multiplier attention_out_multiplier mlp_alpha_factor
        mlp_beta_factor full_attn_alpha_factor full_attn_beta_factor""",
        1,
    ),
    **_each(
        """final_logit_softcapping scale_embedding scale_embeddings scale_depth
        dim_model_base mup_enabled"""
    ),
    # Mixtures of experts.
    **_each(
        """num_local_experts num_experts n_routed_experts moe_num_experts
        num_experts_per_tok experts_per_token moe_topk num_shared_experts
        n_shared_experts moe_num_shared_experts shared_expert_intermediate_size
        moe_intermediate_size mlp_only_layers first_k_dense_replace moe_layers
        num_dense_layers use_expert_bias zero_expert_num"""
    ),
    **_each("decoder_sparse_step moe_layer_freq interleave_moe_layer_step", 1),
    **_each("n_group topk_group routed_scaling_factor route_scale", 1),
    **_each("scoring_func", "softmax"),
    **_each("topk_method", "greedy"),
    **_each("norm_topk_prob", True),
    # How weights are stored.
    **_each("quantization_config compression_config quantization"),
    # Heads: EAGLE-3's, and what its variants do otherwise.
    **_each(
        """draft_vocab_size target_hidden_size eagle_config norm_before_residual
        norm_before_fc fc_norm norm_output eagle_aux_hidden_state_layer_ids"""
    ),
    **_each("inputs", "feature+shifted"),
}
"""The keys that change the result unless they have one of these values.

They are not implemented. Null and an empty list change nothing for any key.
"""


@dataclasses.dataclass(frozen=True)
class Fields:
    """The fields of a `config.json`, or of an object in it; null is as good as none.

    Attributes:
        values: The fields by name.
        path: The file that holds them.
    """

    values: dict[str, Any]
    path: Path

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Reads the `config.json` in a folder.

        Raises:
            InputError: If there is none, or it is no JSON object.
        """
        path = folder / "config.json"
        return cls(read_json(path), path)

    def get(self, name: str, default: Any = None) -> Any:
        """Returns a field unchecked, or `default` where it is missing."""
        value = self.values.get(name)
        return default if value is None else value

    def size(
        self,
        name: str,
        *,
        default: int | None = None,
        least: int = 1,
        most: int = MOST,
    ) -> int:
        """Returns a field that must be an integer from `least` to `most`.

        Raises:
            InputError: If the field is something else, or missing without a default.
        """
        value = self.get(name, default)
        if type(value) is not int or not least <= value <= most:
            raise self.refusal(
                f"{name} = {value!r} must be an integer from {least} to {most:,}"
            )
        return value

    def number(self, name: str, *, default: float | None = None) -> float:
        """Returns a field that must be a positive number that float32 can hold.

        Raises:
            InputError: If the field is something else, or missing without a default.
        """
        value = self.get(name, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not _LEAST_NUMBER < value < _MOST_NUMBER:
            raise self.refusal(
                f"{name} = {value!r} must be a positive number that float32 holds"
            )
        return float(value)

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Returns a field that must be true or false.

        Raises:
            InputError: If the field is something else.
        """
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.refusal(f"{name} = {value!r} must be true or false")
        return value

    def refusal(self, text: str) -> InputError:
        """Returns the error to raise where a field cannot be used."""
        return InputError(f"{self.path}: {text}")


def check_keys(fields: Fields, more: set[str]) -> None:
    """Refuses keys that change the result and are not implemented.

    One warning names all other keys that are not known.

    Args:
        fields: The fields of a model.
        more: The keys that are known in this kind of model only.

    Raises:
        InputError: If there is such a key, at a value that changes the result.
    """
    known, unknown = _KNOWN | more, []
    for name, value in fields.values.items():
        if name in known or value is None:
            continue
        neutral = _MATHEMATICS.get(name)
        if neutral is None:
            unknown += [] if value is False else [name]
            continue
        values = value if isinstance(value, list) else [value]
        if any(one not in neutral for one in values):
            only = f", only {neutral[0]!r}" if neutral[0] else ""
            raise fields.refusal(f"{name} = {value!r} is not supported{only}")
    if unknown:
        warn_once(
            f"{fields.path}: unknown and left out of account: {', '.join(unknown)}; "
            "the text is another one if they change what the model computes"
        )


def stop_tokens(folder: Path) -> tuple[int, ...]:
    """Returns the ids that end a text, ascending.

    Args:
        folder: The target's folder. Its `generation_config.json` decides where it
            names any, otherwise `config.json`; an empty list names none.

    Raises:
        InputError: If what a file names are no ids.
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

    Raises:
        InputError: If a field is missing, contradicts another or is not implemented.
    """
    scaling = _rope_scaling(fields)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    theta = _rope_theta(fields, scaling, kind, default_theta, is_head=is_head)
    if kind not in ("default", "linear", "llama3"):
        raise fields.refusal(
            f"rope type {kind!r} is not supported; known are default, linear and llama3"
        )
    if kind == "default":
        return RopeConfig(theta=theta)
    if "factor" not in scaling:
        raise fields.refusal(f"rope type {kind!r} needs a factor")
    given = Fields(scaling, fields.path)
    rope = RopeConfig(theta=theta, kind=kind, factor=given.number("factor"))
    if kind == "linear":
        return rope
    positions = "original_max_position_embeddings"
    wanted = ("low_freq_factor", "high_freq_factor", positions)
    missing = [name for name in wanted if name not in scaling]
    if missing:
        raise fields.refusal(f"rope type {kind!r} needs {', '.join(missing)}")
    return dataclasses.replace(
        rope,
        low_freq_factor=given.number("low_freq_factor"),
        high_freq_factor=given.number("high_freq_factor"),
        original_max_positions=given.size(positions, most=MOST_POSITIONS),
    )


def _rope_theta(
    fields: Fields,
    scaling: dict[str, Any],
    kind: Any,
    default: float,
    *,
    is_head: bool,
) -> float:
    """Returns the rotary base, a field of the model or of its scaling."""
    outer, inner = fields.get("rope_theta"), scaling.get("rope_theta")
    if None not in (outer, inner) and outer != inner:
        raise fields.refusal(f"rope_theta is both {outer} and {inner}")
    if outer is not None or inner is not None:
        scaled = Fields(scaling, fields.path)
        return (fields if inner is None else scaled).number("rope_theta")
    if kind == "llama3" or fields.get("rope_parameters"):
        raise fields.refusal("rope_theta is missing beside its rope parameters")
    if not is_head:  # Published heads name none and mean 10000.
        warn_once(
            f"{fields.path} names no rope_theta; taking {default:g}, which this family "
            "means by that"
        )
    return default


def _rope_scaling(fields: Fields) -> dict[str, Any]:
    """Returns `rope_parameters` or `rope_scaling`; `{}` where there is neither."""
    given = {
        name: fields.values[name]
        for name in ("rope_parameters", "rope_scaling")
        if fields.values.get(name)
    }
    for name, scaling in given.items():
        if not isinstance(scaling, dict):
            raise fields.refusal(f"{name} = {scaling!r} must be an object")
        unknown = sorted(set(scaling) - _ROPE_FIELDS)
        if unknown:
            raise fields.refusal(f"the field {unknown[0]!r} of {name} is not supported")
    scalings = list(given.values())
    if len(scalings) == 2 and scalings[0] != scalings[0] | scalings[1]:
        raise fields.refusal(
            "rope_parameters and rope_scaling contradict each other; leave out one of "
            "them"
        )
    return scalings[0] if scalings else {}
