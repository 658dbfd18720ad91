import warnings
from pathlib import Path
from typing import Any

import pytest

from eagle_jax.checkpoints import (
    check_max_length,
    check_pair,
    head_config,
    stop_tokens,
    stored_dtype,
    target_config,
)
from eagle_jax.models.rope import RopeConfig
from tests.checkpoints.settings import LLAMA, without, write
from tests.helpers import refused

_LLAMA3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
_LLAMA3_ROPE = RopeConfig(
    theta=500000.0,
    kind="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_positions=256,
)
_HEAD = {
    name: value
    for name, value in LLAMA.items()
    if name not in ("rope_theta", "num_hidden_layers")
}


def _five(config: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    """Returns the config as transformers 5 spells it."""
    rest = without(config, "rope_theta", "rope_scaling", "torch_dtype")
    theta = {"rope_theta": config["rope_theta"]}
    return rest | {"dtype": config["torch_dtype"], "rope_parameters": rope | theta}


@pytest.mark.parametrize(
    ("four", "five"),
    [
        (None, {"rope_type": "default"}),
        ({"rope_type": "default"}, {"rope_type": "default"}),
        ({"type": "linear", "factor": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {"rope_type": "linear", "factor": 2.0},
            {"rope_type": "linear", "factor": 2.0},
        ),
        (
            {"rope_type": "llama3", **_LLAMA3_SCALING},
            {"rope_type": "llama3", **_LLAMA3_SCALING},
        ),
        (
            {"type": "llama3", **_LLAMA3_SCALING},
            {"rope_type": "llama3", **_LLAMA3_SCALING},
        ),
    ],
)
def test_both_spellings_give_one_config(
    tmp_path: Path, four: dict[str, Any] | None, five: dict[str, Any]
) -> None:
    old = target_config(write(tmp_path, LLAMA | {"rope_scaling": four}))
    new = target_config(write(tmp_path, _five(LLAMA, five)))
    assert old == new
    assert old.layer.rope.theta == 500000.0


@pytest.mark.parametrize("spelling", ["torch_dtype", "dtype"])
@pytest.mark.parametrize("value", ["bfloat16", "torch.bfloat16"])
def test_stored_dtype_is_read_in_both_spellings(
    tmp_path: Path, spelling: str, value: str
) -> None:
    config = without(LLAMA, "torch_dtype") | {spelling: value}
    assert stored_dtype(write(tmp_path, config)) == "bfloat16"


def test_stored_dtype_is_float32_where_none_is_named(tmp_path: Path) -> None:
    assert stored_dtype(write(tmp_path, without(LLAMA, "torch_dtype"))) == "float32"


def test_sizes_are_taken_as_they_stand(tmp_path: Path) -> None:
    config = target_config(write(tmp_path, LLAMA | {"head_dim": 16}))
    layer = config.layer
    assert (layer.hidden_size, layer.intermediate_size) == (64, 172)
    assert (layer.num_heads, layer.num_kv_heads, layer.head_dim) == (8, 4, 16)
    assert layer.rms_norm_eps == 1e-5
    assert not layer.qkv_bias
    assert (config.num_layers, config.vocab_size) == (5, 512)
    assert config.max_positions == 1024
    assert not config.tie_embeddings
    assert config.sliding_window is None


def test_head_width_and_kv_heads_follow_from_the_rest(tmp_path: Path) -> None:
    config = without(LLAMA, "num_key_value_heads") | {"head_dim": None}
    layer = target_config(write(tmp_path, config)).layer
    assert (layer.num_kv_heads, layer.head_dim) == (8, 8)


def test_llama3_scaling_is_parsed(tmp_path: Path) -> None:
    config = LLAMA | {"rope_scaling": {"rope_type": "llama3", **_LLAMA3_SCALING}}
    assert target_config(write(tmp_path, config)).layer.rope == _LLAMA3_ROPE


def test_linear_scaling_is_parsed(tmp_path: Path) -> None:
    config = LLAMA | {"rope_scaling": {"type": "linear", "factor": 4}}
    rope = target_config(write(tmp_path, config)).layer.rope
    assert rope == RopeConfig(theta=500000.0, kind="linear", factor=4.0)


def test_a_target_without_rope_base_warns_and_takes_10000(tmp_path: Path) -> None:
    folder = write(tmp_path, without(LLAMA, "rope_theta"))
    with pytest.warns(UserWarning, match="names no rope_theta; taking 10000"):
        config = target_config(folder)
    assert config.layer.rope == RopeConfig(theta=10000.0)


def test_a_head_without_rope_base_takes_10000_silently(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = head_config(write(tmp_path, _HEAD))
    assert config.layer.rope == RopeConfig(theta=10000.0)


def test_a_null_rope_base_beside_rope_parameters_contradicts_nothing(
    tmp_path: Path,
) -> None:
    config = _five(LLAMA, {"rope_type": "default"}) | {"rope_theta": None}
    rope = target_config(write(tmp_path, config)).layer.rope
    assert rope == RopeConfig(theta=500000.0)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        # Settings of the rotary embedding.
        ({"rope_theta": None, "rope_parameters": {"rope_type": "default"}}, "missing"),
        (
            {
                "rope_theta": None,
                "rope_scaling": {"rope_type": "llama3", **_LLAMA3_SCALING},
            },
            "rope_theta is missing",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
            "rope_theta is both 500000.0 and 10000.0",
        ),
        (
            {
                "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
                "rope_scaling": {"type": "linear", "factor": 2.0},
            },
            "rope_parameters and rope_scaling",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "'dynamic'"),
        ({"rope_scaling": {"type": "linear"}}, "needs a factor"),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "high_freq_factor": 4.0,
                }
            },
            "low_freq_factor, original_max_position_embeddings",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0, "mscale": 0.7}},
            "mscale",
        ),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_theta": "much"}, "rope_theta"),
        # What is not implemented.
        ({"model_type": "gemma", "architectures": ["GemmaForCausalLM"]}, "GemmaFor"),
        ({"model_type": "qwen2"}, "with model_type 'qwen2' is not"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequence"),
        ({"model_type": None, "architectures": None}, "architecture"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"layer_types": ["sliding_attention"] * 5}, "no sliding_window"),
        ({"layer_types": ["full_attention"] * 4}, "each of 5 layers"),
        ({"layer_types": ["chunked_attention"] * 5}, "chunked_attention"),
        ({"logit_scale": 0.5}, "logit_scale = 0.5 is not supported, only 1"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
        ({"embedding_multiplier": 12}, "embedding_multiplier = 12"),
        ({"use_qk_norm": True}, "use_qk_norm = True is not supported"),
        ({"no_rope_layers": [1, 1, 1, 0, 1]}, "no_rope_layers"),
        ({"sliding_window_pattern": 6}, "sliding_window_pattern"),
        ({"is_causal": False}, "is_causal = False is not supported, only True"),
        ({"clip_qkv": 8.0}, "clip_qkv"),
        ({"kv_lora_rank": 512}, "kv_lora_rank"),
        ({"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid'"),
        ({"draft_vocab_size": 256}, "draft_vocab_size"),
        # Sizes.
        ({"vocab_size": None}, "vocab_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3"),
        ({"num_key_value_heads": "4"}, "num_key_value_heads"),
        ({"num_key_value_heads": -4}, "num_key_value_heads"),
        ({"head_dim": "8"}, "head_dim"),
        ({"head_dim": 7}, "head_dim = 7"),
        ({"num_attention_heads": 12, "num_key_value_heads": 4}, "hidden_size"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"max_position_embeddings": 1.5}, "max_position_embeddings"),
    ],
)
def test_a_target_that_cannot_run_is_refused_by_name(
    tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    refused(
        lambda: target_config(write(tmp_path, LLAMA | change)),
        named,
        str(tmp_path / "config.json"),
    )


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"draft_vocab_size": 256}, "EAGLE-3"),
        ({"eagle_config": {"use_aux_hidden_state": True}}, "EAGLE-3"),
        ({"model_type": "gemma"}, "'gemma'"),
        ({"num_hidden_layers": 2}, "num_hidden_layers = 2"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"max_position_embeddings": "many"}, "max_position_embeddings"),
        ({"logit_scale": 0.5}, "logit_scale"),
        ({"inputs": "token"}, "inputs = 'token'"),
    ],
)
def test_a_head_that_cannot_run_is_refused_by_name(
    tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    refused(
        lambda: head_config(write(tmp_path, _HEAD | change)),
        named,
        str(tmp_path / "config.json"),
    )


def test_what_changes_nothing_is_read_over(tmp_path: Path) -> None:
    plain = target_config(write(tmp_path, LLAMA))
    harmless = {
        "attention_bias": False,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "pretraining_tp": 4,
        "transformers_version": "4.31.0",
        "use_cache": True,
        "layer_types": ["full_attention"] * 5,
        "never_heard_of": None,
        "not_asked_for": False,
        "partial_rotary_factor": 1.0,
        "embedding_multiplier": 1.0,
        "final_logit_softcapping": None,
        "use_qk_norm": False,
        "num_experts": 0,
        "mlp_only_layers": [],
        "no_rope_layers": [1, 1, 1, 1, 1],
    }
    assert target_config(write(tmp_path, LLAMA | harmless)) == plain


def test_keys_that_nobody_knows_are_warned_about_once(tmp_path: Path) -> None:
    plain = target_config(write(tmp_path, LLAMA))
    news = {"shiny": 7, "logits_to_keep": 1, "use_cache": True}
    write(tmp_path, LLAMA | news)
    message = r"config\.json: unknown and left out of account: shiny, logits_to_keep;"
    with pytest.warns(UserWarning, match=message) as warned:
        assert target_config(tmp_path) == plain
    assert len(warned) == 1
    target_config(tmp_path)  # A warning would be an error here.


def test_an_unknown_key_of_a_head_is_warned_about(tmp_path: Path) -> None:
    plain = head_config(write(tmp_path, _HEAD))
    with pytest.warns(UserWarning, match="left out of account: shiny;"):
        assert head_config(write(tmp_path, _HEAD | {"shiny": "yes"})) == plain


@pytest.mark.parametrize("text", ["", "{", "[]", '"llama"', "\udcff"])
def test_a_config_that_is_no_json_object_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    refused(lambda: target_config(tmp_path), "config.json")


def test_everything_of_a_head_is_its_own(tmp_path: Path) -> None:
    own = {
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_theta": 20000.0,
        "max_position_embeddings": 2048,
        "bias": False,
        "qkv_bias": True,
    }
    head = head_config(write(tmp_path, _HEAD | own))
    assert head.layer.num_kv_heads == 2
    assert head.layer.rms_norm_eps == 1e-6
    assert head.layer.rope == RopeConfig(theta=20000.0)
    assert head.layer.qkv_bias
    assert head.max_positions == 2048
    assert not head.fc_bias


def test_a_head_without_kv_heads_has_one_per_query_head(tmp_path: Path) -> None:
    head = head_config(write(tmp_path, without(_HEAD, "num_key_value_heads")))
    assert head.layer.num_kv_heads == 8
    assert head.fc_bias
    assert not head.layer.qkv_bias


@pytest.mark.parametrize(("name", "given"), [("hidden_size", 48), ("vocab_size", 500)])
def test_a_head_of_another_target_is_refused(
    tmp_path: Path, name: str, given: int
) -> None:
    target = target_config(write(tmp_path, LLAMA))
    check_pair(target, head_config(write(tmp_path, _HEAD)))
    stranger = head_config(write(tmp_path, _HEAD | {name: given}))
    refused(lambda: check_pair(target, stranger), f"{name} is {given}, the target's is")


def test_lengths_end_at_the_positions(tmp_path: Path) -> None:
    target = target_config(write(tmp_path, LLAMA))
    check_max_length(target, 1024)
    refused(
        lambda: check_max_length(target, 1025), "1025 is more than the target's 1024"
    )


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": 7}, {"eos_token_id": 2}, (7,)),
        ({"eos_token_id": [9, 3, 9]}, {"eos_token_id": 2}, (3, 9)),
        ({"temperature": 0.6}, {"eos_token_id": 2}, (2,)),
        ({"eos_token_id": None}, {"eos_token_id": [5, 4]}, (4, 5)),
        ({"eos_token_id": []}, {"eos_token_id": 2}, (2,)),
        (None, {"eos_token_id": 2}, (2,)),
        (None, {}, ()),
        ({"eos_token_id": 0}, {"eos_token_id": 2}, (0,)),
    ],
)
def test_stop_tokens_come_from_the_generation_config_first(
    tmp_path: Path,
    generation: dict[str, Any] | None,
    config: dict[str, Any],
    expected: tuple[int, ...],
) -> None:
    write(tmp_path, LLAMA | config)
    if generation is not None:
        write(tmp_path, generation, "generation_config.json")
    assert stop_tokens(tmp_path) == expected


def test_stop_tokens_that_are_no_ids_are_refused(tmp_path: Path) -> None:
    write(tmp_path, LLAMA | {"eos_token_id": "</s>"})
    refused(lambda: stop_tokens(tmp_path), "eos_token_id")


@pytest.mark.parametrize("ids", [[7, -1], 2**31, [True], 1.0, {}])
def test_stop_tokens_outside_int32_are_refused(tmp_path: Path, ids: Any) -> None:
    write(tmp_path, LLAMA | {"eos_token_id": ids})
    refused(lambda: stop_tokens(tmp_path), "eos_token_id", "2**31")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("architectures", 7),
        ("architectures", [7]),
        ("architectures", "LlamaForCausalLM"),
        ("num_hidden_layers", 2**31),
        ("num_hidden_layers", 10_001),
        ("num_hidden_layers", True),
        ("hidden_size", 2**25),
        ("vocab_size", 10**40),
        ("head_dim", 2**24),
        ("max_position_embeddings", 2**31),
        ("tie_word_embeddings", "false"),
        ("rms_norm_eps", 10**40),
        ("rms_norm_eps", True),
        ("rope_theta", 1e300),
        ("model_type", ["llama"]),
    ],
)
def test_a_field_of_another_kind_or_size_is_refused(
    tmp_path: Path, field: str, value: Any
) -> None:
    write(tmp_path, LLAMA | {field: value})
    refused(lambda: target_config(tmp_path), field)
