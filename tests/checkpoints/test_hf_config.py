"""What `config.json` and `generation_config.json` say, and what is refused by name."""

import functools
import warnings
from pathlib import Path
from typing import Any

import pytest

from eagle_jax.checkpoints import (
    check_max_length,
    hf_fields,
    stop_tokens,
    stored_dtype,
    target_config,
)
from eagle_jax.heads import HEADS
from eagle_jax.models.layers import LayerConfig
from eagle_jax.models.rope import RopeConfig
from tests.checkpoints.settings import GEMMA3, LLAMA, MISTRAL, without, write
from tests.helpers import refused

_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
_PLAIN_ROPE = RopeConfig(theta=500000.0)
_LINEAR_ROPE = RopeConfig(theta=500000.0, kind="linear", factor=2.0)
_LLAMA3_ROPE = RopeConfig(
    theta=500000.0,
    kind="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_positions=256,
)
EAGLE = HEADS["eagle2"]
_HEAD = without(LLAMA, "rope_theta", "num_hidden_layers")
_FULL, _SLIDING = "full_attention", "sliding_attention"
_PHI = {
    "model_type": "phi3",
    "architectures": ["Phi3ForCausalLM"],
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 256,
}
_SWITCHED = {"use_sliding_window": True, "sliding_window": 96, "max_window_layers": 2}


@pytest.mark.parametrize(
    ("scaling", "rope"),
    [
        ({"rope_type": "default"}, _PLAIN_ROPE),
        ({"rope_type": "linear", "factor": 2}, _LINEAR_ROPE),
        ({"rope_type": "llama3", **_SCALING}, _LLAMA3_ROPE),
    ],
)
def test_every_spelling_gives_one_config(
    tmp_path: Path, scaling: dict[str, Any], rope: RopeConfig
) -> None:
    older = without(scaling, "rope_type") | {"type": scaling["rope_type"]}
    for four in (older, scaling):
        old = target_config(write(tmp_path, LLAMA | {"rope_scaling": four}))
        assert old.layer.rope == rope
    five = {"rope_parameters": scaling | {"rope_theta": 500000.0}, "rope_theta": None}
    five |= {"dtype": "bfloat16"}
    assert target_config(write(tmp_path, LLAMA | five)) == old
    assert target_config(write(tmp_path, without(LLAMA | five, "rope_theta"))) == old


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "torch.bfloat16"}, "bfloat16"),
        ({}, "float32"),
    ],
)
def test_the_stored_dtype_is_read_in_both_spellings(
    tmp_path: Path, fields: dict[str, Any], dtype: str
) -> None:
    config = without(LLAMA, "torch_dtype") | fields
    assert stored_dtype(write(tmp_path, config)) == dtype


def test_sizes_are_taken_as_they_stand_or_follow_from_the_rest(tmp_path: Path) -> None:
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
    unnamed = without(LLAMA, "num_key_value_heads") | {"head_dim": None}
    layer = target_config(write(tmp_path, unnamed)).layer
    assert (layer.num_kv_heads, layer.head_dim) == (8, 8)
    head = EAGLE.read_config(write(tmp_path, without(_HEAD, "num_key_value_heads")))
    assert head.layer.num_kv_heads == 8 and head.fc_bias and not head.layer.qkv_bias


def test_dynamic_rope_is_the_plain_one_as_far_as_there_are_positions(
    tmp_path: Path,
) -> None:
    dynamic = {"rope_scaling": {"type": "dynamic", "factor": 4.0}}
    with pytest.warns(UserWarning, match="beyond max_position_embeddings"):
        found = target_config(write(tmp_path, LLAMA | dynamic))
    assert found == target_config(write(tmp_path, LLAMA))


def test_a_target_without_rope_base_warns_and_a_head_does_not(tmp_path: Path) -> None:
    folder = write(tmp_path, without(LLAMA, "rope_theta"))
    with pytest.warns(UserWarning, match="names no rope_theta; taking 10000"):
        config = target_config(folder)
    assert config.layer.rope == RopeConfig(theta=10000.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        head = EAGLE.read_config(write(tmp_path, _HEAD))
    assert head.layer.rope == RopeConfig(theta=10000.0)


@pytest.mark.parametrize(
    ("base", "change", "window", "layers"),
    [
        ("mistral", {}, 96, (0, 1, 2, 3, 4)),
        ("mistral", {"sliding_window": None}, None, ()),
        ("mistral", {"layer_types": [_SLIDING] * 5}, 96, (0, 1, 2, 3, 4)),
        ("qwen3", _SWITCHED | {"layer_types": [_SLIDING] + [_FULL] * 4}, 96, (0,)),
        ("mixtral", {"sliding_window": None}, None, ()),
        ("mixtral", {"sliding_window": 8}, 8, (0, 1, 2, 3, 4)),
        ("qwen2", {"sliding_window": 96}, None, ()),
        ("qwen2", _SWITCHED, 96, (2, 3, 4)),
        ("qwen2", _SWITCHED | {"max_window_layers": 0}, 96, (0, 1, 2, 3, 4)),
        # As in the published files: 28 of 28 layers see everything.
        ("qwen2", {"use_sliding_window": True, "sliding_window": 96}, None, ()),
        ("qwen3", _SWITCHED | {"use_sliding_window": False}, None, ()),
        ("qwen3", _SWITCHED, 96, (2, 3, 4)),
    ],
)
def test_windows_are_where_the_family_has_them(
    tmp_path: Path,
    base: str,
    change: dict[str, Any],
    window: int | None,
    layers: tuple[int, ...],
) -> None:
    family = {"architectures": [f"{base.capitalize()}ForCausalLM"], "model_type": base}
    fields = without(MISTRAL, "sliding_window") if base == "mixtral" else MISTRAL
    config = target_config(write(tmp_path, fields | family | change))
    assert (config.sliding_window, config.windowed_layers) == (window, layers)
    check_max_length(
        config.max_positions, 1024
    )  # A window sets no limit to the length.


def test_a_mistral_without_a_sliding_window_has_the_usual_one(tmp_path: Path) -> None:
    config = target_config(write(tmp_path, without(MISTRAL, "sliding_window")))
    assert config.sliding_window == 4096


def test_families_differ_in_biases_norms_and_experts(tmp_path: Path) -> None:
    def layer(base: str, **change: Any) -> LayerConfig:
        name = f"{base.capitalize()}ForCausalLM"
        family = {"architectures": [name], "model_type": base}
        return target_config(write(tmp_path, LLAMA | family | change)).layer

    def qwen3_moe(**change: Any) -> LayerConfig:
        # What the published files say of windows and of dense layers.
        family = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
        usual = {"decoder_sparse_step": 1, "mlp_only_layers": []}
        switch = {"use_sliding_window": False, "max_window_layers": 48}
        fields = LLAMA | family | usual | switch | {"sliding_window": None} | change
        return target_config(write(tmp_path, fields)).layer

    assert layer("qwen2").qkv_bias
    assert not layer("qwen2").qk_norm
    assert layer("qwen3").qk_norm
    assert layer("qwen3").head_dim == 128
    assert layer("qwen3", head_dim=32).head_dim == 32
    assert not layer("qwen3").qkv_bias
    assert layer("llama", attention_bias=True).qkv_bias
    assert layer("llama", attention_bias=True).output_bias
    assert layer("mixtral").num_experts == 8
    assert layer("mixtral").experts_per_token == 2
    assert layer("mixtral", num_local_experts=4).num_experts == 4
    unnamed = {"rms_norm_eps": None, "rope_theta": None}
    with pytest.warns(UserWarning, match="names no rope_theta; taking 1e\\+06"):
        assert layer("mixtral", **unnamed).rms_norm_eps == 1e-5
    moe = qwen3_moe(num_experts=16, norm_topk_prob=True)
    assert moe.qk_norm and moe.inner_size == 768 and not moe.shares_of_all
    assert moe == qwen3_moe(num_local_experts=16, norm_topk_prob=True)
    assert (moe.num_experts, moe.experts_per_token) == (16, 8)
    assert qwen3_moe(moe_intermediate_size=24).expert_size == 24
    assert qwen3_moe().num_experts == 128 and qwen3_moe().shares_of_all
    assert qwen3_moe().plain == layer("llama", head_dim=moe.head_dim)
    for name, value in (
        ("decoder_sparse_step", 2),
        ("mlp_only_layers", [0]),
        ("use_sliding_window", True),
        ("shared_expert_intermediate_size", 8),
        ("moe_intermediate_size", 0),
    ):
        refused(functools.partial(qwen3_moe, **{name: value}), f"{name} = {value}")
    refused(lambda: layer("mixtral", moe_intermediate_size=8), "moe_intermediate_size")
    refused(lambda: layer("mixtral", num_experts_per_tok=9), "num_experts_per_tok = 9")
    refused(lambda: layer("mixtral", num_local_experts=2**24), "num_local_experts")


def test_gemma_is_read_as_published_files_leave_it_out(tmp_path: Path) -> None:
    four = target_config(write(tmp_path, GEMMA3))
    text = without(GEMMA3, "architectures") | {"model_type": "gemma3_text"}
    names = {"architectures": ["Gemma3ForConditionalGeneration"]}
    nested = {"model_type": "gemma3", "text_config": text, "boi_token_index": 5}
    assert target_config(write(tmp_path, names | nested)) == four
    assert (four.layer.num_heads, four.layer.num_kv_heads) == (8, 4)
    assert (four.layer.head_dim, four.layer.query_scalar) == (256, 256.0)
    assert (four.vocab_size, four.max_positions) == (262_208, 131_072)
    assert four.layer.rope == RopeConfig(theta=1e6, kind="linear", factor=8.0)
    assert four.window_rope == RopeConfig(theta=1e4)
    assert four.windowed_layers == (0, 1, 2, 3, 4, 6)
    assert four.embedding_scale == 8 and four.tie_embeddings
    assert four.layer.score_cap is None and four.logit_cap is None
    ropes = {
        _FULL: {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
        _SLIDING: {"rope_theta": 1e4, "rope_type": "default"},
    }
    types = [_SLIDING] * 5 + [_FULL, _SLIDING]
    five = {"rope_scaling": None, "rope_parameters": ropes, "layer_types": types}
    assert target_config(write(tmp_path, GEMMA3 | five)) == four
    short = target_config(write(tmp_path, GEMMA3 | {"sliding_window_pattern": 2}))
    assert short.windowed_layers == (0, 2, 4, 6)

    two = {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]}
    config = target_config(write(tmp_path, LLAMA | two))
    assert (config.layer.score_cap, config.logit_cap) == (50.0, 30.0)
    assert config.windowed_layers == (0, 2, 4) and config.window_rope is None
    free = two | {"final_logit_softcapping": None, "attn_logit_softcapping": 20.0}
    config = target_config(write(tmp_path, LLAMA | free))
    assert (config.layer.score_cap, config.logit_cap) == (20.0, None)


def test_gpt_oss_is_read_as_published_and_completed_as_by_transformers(
    tmp_path: Path,
) -> None:
    family = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"}
    rope = {"rope_type": "yarn", "factor": 32.0, "truncate": False}
    rope["original_max_position_embeddings"] = 4096
    published = LLAMA | family | {"num_key_value_heads": 8, "head_dim": 64}
    published |= {"num_local_experts": 128, "num_experts_per_tok": 4}
    published |= {"experts_per_token": 4, "initial_context_length": 4096}
    published |= {"attention_bias": True, "swiglu_limit": 7.0, "sliding_window": 128}
    published |= {"layer_types": [_SLIDING, _FULL] * 2 + [_SLIDING]}
    published |= {"rope_scaling": rope, "quantization_config": {}}
    config = target_config(write(tmp_path, published))
    assert config.layer.mlp_bias and config.layer.has_sinks
    five = {"rope_parameters": rope | {"rope_theta": 500000.0}, "rope_scaling": None}
    least = without(LLAMA, "num_key_value_heads", "rms_norm_eps") | family
    for other in (published | five, least):
        assert target_config(write(tmp_path, other)) == config
    write(tmp_path, least | {"swiglu_limit": 5.0})
    refused(lambda: target_config(tmp_path), "swiglu_limit = 5.0 is not supported")


def test_a_phi_ends_where_its_frequencies_would_change(tmp_path: Path) -> None:
    """Published files name lengths beside the factors, and the kind in two ways."""
    found = set()
    for kind in ("longrope", "su"):
        scaling = {"type": kind, "short_factor": [1, 2.5, 4], "long_factor": [1, 9, 9]}
        fields = LLAMA | _PHI | {"rope_scaling": scaling}
        with pytest.warns(UserWarning, match="256, which kept keys cannot follow"):
            found.add(target_config(write(tmp_path, fields)))
        hf_fields.warn_once.cache_clear()
    (config,) = found
    check_max_length(config.max_positions, 256)
    refused(lambda: check_max_length(config.max_positions, 257), "257 is more")
    rope = config.layer.rope
    assert (rope.factors, rope.fraction) == ((1.0, 2.5, 4.0), 0.75)
    assert rope.attention_factor == pytest.approx(1.25**0.5)  # 256 ** 0.25 = 4.
    assert config.layer.plain.rope == RopeConfig(theta=500000.0)


def _rope(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_scaling": {"rope_type": kind, **fields}}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        # Settings of the rotary embedding.
        ({"rope_theta": None, "rope_parameters": {"rope_type": "default"}}, "missing"),
        ({"rope_theta": None} | _rope("llama3", **_SCALING), "rope_theta is missing"),
        ({"rope_parameters": {"rope_theta": 1.5}}, "both 500000.0 and 1.5"),
        (
            {"rope_parameters": {"rope_type": "default"}} | _rope("linear", factor=2.0),
            "contradict each other",
        ),
        (_rope("longrope", factor=4.0), "original_max_position_embeddings = None"),
        (_PHI | _rope("longrope"), "short_factor = None"),
        (_PHI | _rope("longrope", short_factor=[1, -1, 2]), "short_factor = -1"),
        (_PHI | _rope("longrope", short_factor=[1.0]), "short_factor has 1 numbers"),
        (_PHI | {"partial_rotary_factor": 0.4}, "partial_rotary_factor = 0.4"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        (_rope("yarn", factor=4.0), "original_max_position_embeddings = None"),
        (_rope("yarn", factor=4.0, truncate="no"), "truncate = 'no'"),
        ({"rope_theta": 1.0} | _rope("yarn", factor=4.0), "rope_theta = 1.0"),
        ({"rope_scaling": {"type": "dynamic"}}, "factor = None"),
        (_rope("linear"), "factor = None"),
        (_rope("llama3", factor=8.0, high_freq_factor=4.0), "low_freq_factor = None"),
        (_rope("linear", factor=2.0, mscale=0.7), "mscale"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_theta": "much"}, "rope_theta"),
        ({"rope_theta": 1e300}, "rope_theta"),
        # What is not implemented.
        ({"model_type": "gemma", "architectures": ["GemmaForCausalLM"]}, "GemmaFor"),
        ({"model_type": "qwen2"}, "with model_type 'qwen2' is not"),
        ({"model_type": "qwen3_next"}, "its recurrent layers have one state"),
        ({"model_type": "deepseek_v3"}, "attention reads a compressed cache"),
        ({"model_type": ["llama"]}, "model_type"),
        ({"model_type": None, "architectures": None}, "architecture"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequence"),
        ({"architectures": "LlamaForCausalLM"}, "architectures"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        (MISTRAL | {"attention_bias": True}, "attention_bias = True"),
        ({"attention_bias": "yes"}, "attention_bias = 'yes'"),
        ({"query_pre_attn_scalar": 24}, "query_pre_attn_scalar = 24"),
        (GEMMA3 | {"hidden_activation": "gelu"}, "hidden_activation = 'gelu'"),
        (GEMMA3 | {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
        (GEMMA3 | {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (GEMMA3 | {"rope_local_base_freq": "low"}, "rope_theta = 'low'"),
        (GEMMA3 | {"rope_parameters": {_FULL: {}}}, "rope_parameters = {'full_att"),
        (
            GEMMA3 | {"model_type": "gemma3", "architectures": [], "text_config": 7},
            "text_config = 7",
        ),
        (MISTRAL | {"mlp_bias": True}, "mlp_bias = True"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"logit_scale": 0.5}, "logit_scale = 0.5 is not supported, only 1"),
        ({"is_causal": False}, "is_causal = False is not supported, only True"),
        ({"draft_vocab_size": 256}, "draft_vocab_size"),
        ({"layer_types": [_SLIDING] * 5}, "no sliding_window"),
        ({"layer_types": [_FULL] * 4}, "each of 5 layers"),
        ({"layer_types": [None] + [_FULL] * 4}, "each of 5 layers"),
        ({"layer_types": ["chunked_attention"] * 5}, "chunked_attention"),
        # A Mistral has its window in every layer, whatever its file says.
        (MISTRAL | {"layer_types": [_FULL] * 4 + [_SLIDING]}, "sliding_window = 96"),
        (MISTRAL | {"sliding_window": "4096"}, "sliding_window"),
        # Sizes.
        ({"vocab_size": None}, "vocab_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": 10_001}, "num_hidden_layers"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3"),
        ({"head_dim": 7}, "head_dim = 7"),
        ({"num_attention_heads": 12}, "head_dim = None"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"rms_norm_eps": 10**40}, "rms_norm_eps"),
        ({"max_position_embeddings": 2**31}, "max_position_embeddings"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings"),
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


def test_what_changes_nothing_is_read_over(tmp_path: Path) -> None:
    plain = target_config(write(tmp_path, LLAMA))
    harmless = {
        "attention_bias": False,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "transformers_version": "4.31.0",
        "layer_types": [_FULL] * 5,
        "never_heard_of": None,
        "not_asked_for": False,
        "partial_rotary_factor": 1.0,
        "final_logit_softcapping": None,
        "use_qk_norm": False,
        "num_experts": 0,
        "mlp_only_layers": [],
        # What transformers writes into folders that it makes of a GGUF.
        "_model_name_or_path": "Tiny Llama",
        "unk_token_id": 0,
        "num_beams": 1,
    }
    assert target_config(write(tmp_path, LLAMA | harmless)) == plain


@pytest.mark.parametrize(
    ("read", "base"), [(target_config, LLAMA), (EAGLE.read_config, _HEAD)]
)
def test_keys_that_nobody_knows_are_warned_about_once(
    tmp_path: Path, read: Any, base: dict[str, Any]
) -> None:
    plain = read(write(tmp_path, base))
    write(tmp_path, base | {"shiny": 7, "logits_to_keep": 1, "use_cache": True})
    message = r"config\.json: unknown and ignored: shiny, logits_to_keep;"
    with pytest.warns(UserWarning, match=message) as warned:
        assert read(tmp_path) == plain
    assert len(warned) == 1
    read(tmp_path)  # A warning would be an error here.


def test_lengths_end_at_the_positions(tmp_path: Path) -> None:
    target = target_config(write(tmp_path, LLAMA))
    check_max_length(target.max_positions, 1024)
    refused(
        lambda: check_max_length(target.max_positions, 1025),
        "1025 is more",
        "target's 1024",
    )


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": 7}, {"eos_token_id": 2}, (7,)),
        ({"eos_token_id": [9, 3, 9]}, {"eos_token_id": 2}, (3, 9)),
        ({"temperature": 0.6}, {"eos_token_id": 2}, (2,)),
        ({"eos_token_id": None}, {"eos_token_id": [5, 4]}, (4, 5)),
        ({"eos_token_id": []}, {"eos_token_id": 2}, (2,)),
        ({}, {}, ()),
        ({"eos_token_id": 0}, {"eos_token_id": 2}, (0,)),
    ],
)
def test_stop_tokens_come_from_the_generation_config_first(
    tmp_path: Path,
    generation: dict[str, Any],
    config: dict[str, Any],
    expected: tuple[int, ...],
) -> None:
    write(tmp_path, LLAMA | config)
    if generation:
        write(tmp_path, generation, "generation_config.json")
    assert stop_tokens(tmp_path) == expected


@pytest.mark.parametrize("ids", ["</s>", [7, -1], 2**31, [True], 1.0, {}])
def test_stop_tokens_that_are_no_ids_are_refused(tmp_path: Path, ids: Any) -> None:
    write(tmp_path, LLAMA | {"eos_token_id": ids})
    refused(lambda: stop_tokens(tmp_path), "eos_token_id", "2**31")
