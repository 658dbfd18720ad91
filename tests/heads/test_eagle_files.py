"""EAGLE-1/2 heads: the names, shapes, settings and sizes of the published files."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import chex
import jax
import pytest
from safetensors.numpy import load_file

from eagle_jax.heads import HEADS, open_head
from eagle_jax.heads.eagle import EagleHead, EagleHeadConfig
from eagle_jax.models.rope import RopeConfig
from tests.heads.samples import table, weights, write
from tests.tiny import ROPES
from tests.tiny import head_config as head_of

KIND = HEADS["eagle2"]
_LLAMA3 = {"vocab_size": 128256, "bias": False, "rope_theta": 500000.0}
_QWEN2 = {"vocab_size": 152064, "qkv_bias": True, "rope_theta": 1000000.0}
_FAMILY = {"max_position_embeddings": 4096}


def _sizes(width: int, inner: int, heads: int, kv_heads: int) -> dict[str, int]:
    return {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": 32000,
        "num_hidden_layers": 1,
    }


# Settings, bytes per weight, and the file's size in gigabytes.
_HEADS: dict[str, tuple[dict[str, Any], int, float]] = {
    "EAGLE-Vicuna-7B-v1.3": (_sizes(4096, 11008, 32, 32), 4, 1.468),
    "EAGLE-Vicuna-13B-v1.3": (_sizes(5120, 13824, 40, 40), 4, 2.134),
    # Grouped, though its target is not; and no width of a position table.
    "EAGLE-Vicuna-33B-v1.3": (
        _sizes(6656, 17920, 52, 13) | {"max_sequence_length": 2048},
        4,
        3.081,
    ),
    "EAGLE-llama2-chat-7B": (_sizes(4096, 11008, 32, 32) | _FAMILY, 4, 1.468),
    "EAGLE-llama2-chat-13B": (_sizes(5120, 13824, 40, 40) | _FAMILY, 4, 2.134),
    "EAGLE-llama2-chat-70B": (_sizes(8192, 28672, 64, 8) | _FAMILY, 4, 5.008),
    # Not grouped, though its target is.
    "EAGLE-mixtral-instruct-8x7B": (_sizes(4096, 14336, 32, 32) | _FAMILY, 4, 1.632),
    "EAGLE-LLaMA3-Instruct-8B": (_sizes(4096, 14336, 32, 8) | _LLAMA3, 2, 1.554),
    "EAGLE-LLaMA3-Instruct-70B": (_sizes(8192, 28672, 64, 8) | _LLAMA3, 2, 4.081),
    "EAGLE-Qwen2-7B-Instruct": (_sizes(3584, 18944, 28, 28) | _QWEN2, 2, 1.652),
    "EAGLE-Qwen2-72B-Instruct": (_sizes(8192, 29568, 64, 64) | _QWEN2, 2, 4.750),
}


def _num_weights(config: EagleHeadConfig) -> int:
    """Of a head with a copy of its target's embedding table, as all of these are."""
    shapes = jax.eval_shape(
        lambda key: EagleHead(config=config).init(key), jax.random.key(0)
    )
    table = config.vocab_size * config.layer.hidden_size
    return table + sum(leaf.size for leaf in jax.tree.leaves(shapes))


@pytest.mark.parametrize("name", _HEADS)
def test_published_heads_have_the_size_of_their_files(
    tmp_path: Path, name: str
) -> None:
    fields, num_bytes, gigabytes = _HEADS[name]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields | {"model_type": "llama"}))
    config = KIND.read_config(tmp_path)
    size = _num_weights(config) * num_bytes / 1e9
    assert size == pytest.approx(gigabytes, abs=6e-4)
    assert config.layer.num_kv_heads == fields["num_key_value_heads"]
    assert config.fc_bias == fields.get("bias", True)


@pytest.mark.parametrize("has_table", [False, True])
@pytest.mark.parametrize("fc_bias", [False, True])
@pytest.mark.parametrize("qkv_bias", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_a_head_has_the_names_and_shapes_of_the_published_ones(
    tmp_path: Path, kv_heads: int, qkv_bias: bool, fc_bias: bool, has_table: bool
) -> None:
    config = head_of(num_kv_heads=kv_heads, qkv_bias=qkv_bias, fc_bias=fc_bias)
    width, inner, kv_width = 32, 48, kv_heads * 8
    attention, mlp = "layers.0.self_attn", "layers.0.mlp"
    expected = {
        "fc.weight": (width, 2 * width),
        f"{attention}.q_proj.weight": (width, width),
        f"{attention}.k_proj.weight": (kv_width, width),
        f"{attention}.v_proj.weight": (kv_width, width),
        f"{attention}.o_proj.weight": (width, width),
        f"{mlp}.gate_proj.weight": (inner, width),
        f"{mlp}.up_proj.weight": (inner, width),
        f"{mlp}.down_proj.weight": (width, inner),
        "layers.0.post_attention_layernorm.weight": (width,),
    }
    if fc_bias:
        expected["fc.bias"] = (width,)
    if qkv_bias:
        expected[f"{attention}.q_proj.bias"] = (width,)
        expected[f"{attention}.k_proj.bias"] = (kv_width,)
        expected[f"{attention}.v_proj.bias"] = (kv_width,)
    if has_table:
        expected["embed_tokens.weight"] = (64, width)
    own = table(config) if has_table else None
    params = dataclasses.replace(weights(config), embedding=own)
    write(tmp_path / "head", config, params)
    stored = load_file(tmp_path / "head" / "model.safetensors")
    assert {name: tensor.shape for name, tensor in stored.items()} == expected
    opened = open_head(tmp_path / "head")
    assert opened.head.config == config
    chex.assert_trees_all_equal(opened.load(None, None), params)


def test_the_settings_of_a_head_are_those_that_the_official_code_reads(
    tmp_path: Path,
) -> None:
    config = head_of(rope=ROPES[2], fc_bias=False)
    write(tmp_path / "head", config, weights(config), dtype="bfloat16")
    assert json.loads((tmp_path / "head" / "config.json").read_text()) == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "bias": False,
        "hidden_act": "silu",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": 64,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "rope_scaling": {"type": "linear", "factor": 2.5},
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "written_by": "eagle_jax",
    }


def test_qkv_bias_is_named_where_there_is_one(tmp_path: Path) -> None:
    # The official code asks whether the field is there.
    config = head_of(qkv_bias=True)
    write(tmp_path / "head", config, weights(config))
    settings = json.loads((tmp_path / "head" / "config.json").read_text())
    assert settings["qkv_bias"] is True


@pytest.mark.parametrize("rope", ROPES, ids=["default", "base", "linear", "llama3"])
def test_the_official_code_takes_every_rotary_embedding_and_so_it_is_read_back(
    tmp_path: Path, rope: RopeConfig
) -> None:
    """Its `EConfig` refuses all scalings but two."""
    config = head_of(rope=rope, rms_norm_eps=1e-6, max_positions=2048)
    write(tmp_path / "head", config, weights(config))
    assert KIND.read_config(tmp_path / "head") == config
    settings = json.loads((tmp_path / "head" / "config.json").read_text())
    scaling = settings["rope_scaling"]
    if scaling is not None:
        assert set(scaling) == {"type", "factor"}
        assert scaling["type"] in ("linear", "dynamic")
        assert isinstance(scaling["factor"], float) and scaling["factor"] > 1


@pytest.mark.torch
def test_the_shared_head_is_exported_as_it_was_published(
    shared: Path, tmp_path: Path
) -> None:
    import torch

    source = shared / "models" / "stories260K-eagle"
    opened = open_head(source)
    params = opened.load(None, None)
    write(tmp_path / "head", opened.head.config, params, with_pickle=True)
    published, exported = (
        torch.load(folder / "pytorch_model.bin", weights_only=True)
        for folder in (source, tmp_path / "head")
    )
    assert exported.keys() == published.keys()
    for name, tensor in published.items():
        assert tensor.dtype == exported[name].dtype
        assert torch.equal(tensor, exported[name])
    ours, theirs = (
        load_file(folder / "model.safetensors")
        for folder in (tmp_path / "head", source)
    )
    chex.assert_trees_all_equal(ours, theirs)
    fields = json.loads((source / "config.json").read_text())
    written = json.loads((tmp_path / "head" / "config.json").read_text())
    common = fields.keys() & written.keys()
    assert {name: fields[name] for name in common} == {
        name: written[name] for name in common
    }
