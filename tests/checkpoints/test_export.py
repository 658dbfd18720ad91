import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from safetensors.numpy import load_file

from eagle_jax.checkpoints import (
    export_head,
    export_target,
    head_config,
    load_target,
    read_head,
    stop_tokens,
    stored_dtype,
)
from eagle_jax.heads import load_head
from eagle_jax.heads.eagle.model import EagleHeadParams
from eagle_jax.models import transformer
from eagle_jax.models.rope import RopeConfig
from tests.helpers import file_bytes, refused
from tests.tiny import (
    HEAD,
    LAYER,
    TARGET,
    random_head,
    random_like,
    random_target,
    target_config,
)
from tests.tiny import (
    head_config as head_of,
)

_FILES = ("config.json", "model.safetensors", "pytorch_model.bin")
_LLAMA3 = RopeConfig(
    theta=500000.0,
    kind="llama3",
    factor=8.0,
    low_freq_factor=1.5,
    high_freq_factor=5.0,
    original_max_positions=64,
)
_ROPES = [
    RopeConfig(theta=10000.0),
    RopeConfig(theta=5e5),
    RopeConfig(theta=1e4, kind="linear", factor=2.5),
    _LLAMA3,
]


def random_table(dtype: str = "float32") -> jax.Array:
    """An embedding table that a head may have of its own."""
    return random_like(jax.ShapeDtypeStruct((64, LAYER.hidden_size), dtype))


def _bin(folder: Path) -> dict[str, Any]:
    import torch

    return torch.load(folder / "pytorch_model.bin", weights_only=True)


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
    params = random_head(config)
    export_head(
        tmp_path / "head",
        config,
        params,
        embedding=random_table() if has_table else None,
    )
    stored = load_file(tmp_path / "head" / "model.safetensors")
    assert {name: tensor.shape for name, tensor in stored.items()} == expected

    read_config, read = read_head(tmp_path / "head")
    assert read_config == config
    wanted = dataclasses.replace(
        params, embedding=random_table() if has_table else None
    )
    chex.assert_trees_all_equal(read, wanted)


@pytest.mark.torch
def test_both_files_of_a_head_hold_the_same_tensors(tmp_path: Path) -> None:
    config = head_of(qkv_bias=True)
    folder = tmp_path / "head"
    export_head(folder, config, random_head(config), embedding=random_table())
    pickled = {name: tensor.numpy() for name, tensor in _bin(folder).items()}
    chex.assert_trees_all_equal(pickled, load_file(folder / "model.safetensors"))


def test_the_settings_of_a_head_are_those_that_the_official_code_reads(
    tmp_path: Path,
) -> None:
    config = head_of(rope=_ROPES[2], fc_bias=False)
    export_head(tmp_path / "head", config, random_head(config), dtype="bfloat16")
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


def test_qkv_bias_is_named_only_where_there_is_one(tmp_path: Path) -> None:
    # The official code asks whether the field is there.
    config = head_of(qkv_bias=True)
    export_head(tmp_path / "with", config, random_head(config))
    export_head(tmp_path / "without", HEAD, random_head())
    settings = [
        json.loads((tmp_path / name / "config.json").read_text())
        for name in ("with", "without")
    ]
    assert settings[0]["qkv_bias"] is True
    assert "qkv_bias" not in settings[1]


@pytest.mark.parametrize("rope", _ROPES, ids=["default", "base", "linear", "llama3"])
def test_every_rotary_embedding_is_read_back_as_it_was(
    tmp_path: Path, rope: RopeConfig
) -> None:
    config = head_of(rope=rope, rms_norm_eps=1e-6, max_positions=2048)
    export_head(tmp_path / "head", config, random_head(config), with_bin=False)
    assert head_config(tmp_path / "head") == config
    target = target_config(rope=rope, rms_norm_eps=1e-6)
    export_target(tmp_path / "target", target, random_target(target))
    assert load_target(tmp_path / "target")[0] == target


@pytest.mark.parametrize("rope", _ROPES, ids=["default", "base", "linear", "llama3"])
def test_the_official_code_takes_the_rotary_embedding_of_every_head(
    tmp_path: Path, rope: RopeConfig
) -> None:
    """Its `EConfig` refuses all other scalings."""
    config = head_of(rope=rope)
    export_head(tmp_path / "head", config, random_head(config), with_bin=False)
    settings = json.loads((tmp_path / "head" / "config.json").read_text())
    scaling = settings["rope_scaling"]
    if scaling is not None:
        assert set(scaling) == {"type", "factor"}
        assert scaling["type"] in ("linear", "dynamic")
        assert isinstance(scaling["factor"], float) and scaling["factor"] > 1


def test_a_head_without_a_table_is_read_with_its_targets(tmp_path: Path) -> None:
    target_params = random_target()
    params = random_head()
    export_head(tmp_path / "with", HEAD, params, embedding=target_params.embedding)
    export_head(tmp_path / "without", HEAD, params)
    for name in ("with", "without"):
        read = load_head(tmp_path / name, TARGET, target_params)[1]
        chex.assert_trees_all_equal(read, params)


def test_a_heads_own_table_is_written_before_the_targets(tmp_path: Path) -> None:
    own = random_table() + 1
    params = dataclasses.replace(random_head(), embedding=own)
    export_head(tmp_path / "head", HEAD, params, embedding=random_table())
    np.testing.assert_array_equal(read_head(tmp_path / "head")[1].embedding, own)


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_export_load_export_gives_the_same_bytes(tmp_path: Path, dtype: str) -> None:
    params = dataclasses.replace(
        random_head(dtype=dtype), embedding=random_table(dtype)
    )
    export_head(tmp_path / "one", HEAD, params, dtype=dtype)
    config, read = read_head(tmp_path / "one")
    chex.assert_trees_all_equal(read, params)
    export_head(tmp_path / "another name", config, read, dtype=dtype)
    first = file_bytes(tmp_path / "one")
    assert sorted(first) == sorted(_FILES)
    assert file_bytes(tmp_path / "another name") == first
    # safetensors writes several entries in an order that varies by chance.
    with safetensors.safe_open(tmp_path / "one" / _FILES[1], framework="np") as file:
        assert file.metadata() == {"format": "pt"}
    assert stored_dtype(tmp_path / "one") == dtype


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_are_rounded_to_the_dtype_asked_for(tmp_path: Path, dtype: str) -> None:
    params = random_head()
    export_head(tmp_path / "head", HEAD, params, dtype=dtype)
    rounded = jax.tree.map(lambda x: x.astype(dtype), params)
    chex.assert_trees_all_equal(read_head(tmp_path / "head")[1], rounded)
    stored = _bin(tmp_path / "head")["fc.weight"]
    assert str(stored.dtype) == f"torch.{dtype}"
    np.testing.assert_array_equal(
        stored.float().numpy(), np.asarray(rounded.fc.astype("float32")).T
    )


@pytest.mark.torch
def test_the_shared_head_is_exported_as_it_was_published(
    shared: Path, tmp_path: Path
) -> None:
    import torch

    source = shared / "models" / "stories260K-eagle"
    export_head(tmp_path / "head", *read_head(source))
    published, exported = _bin(source), _bin(tmp_path / "head")
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


def _transformers_logits(folder: Path, ids: list[int]) -> np.ndarray:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].numpy()


_WINDOW = {"sliding_window": 4, "windowed_layers": (0, 1)}


@pytest.mark.torch
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope": _LLAMA3, "tie_embeddings": True},
        {"rope": _ROPES[2], "head_dim": 16},
        _WINDOW,
        {"num_experts": 3, "experts_per_token": 2},
        _WINDOW | {"qkv_bias": True, "windowed_layers": (1,)},
        {"qk_norm": True},
    ],
    ids=lambda changes: " ".join(changes) or "plain",
)
def test_transformers_computes_the_same_from_an_exported_target(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    config = target_config(**changes)
    params = random_target(config)
    folder = tmp_path / "target"
    export_target(folder, config, params, stop_tokens=(2,), bos_token=1)

    read_config, read = load_target(folder)
    assert read_config == config
    chex.assert_trees_all_equal(read, params)
    ids = [1, 17, 4, 63, 9, 9, 30]
    model = transformer.Transformer(config=config)
    output = model.forward(
        params,
        jnp.array([ids]),
        jnp.arange(len(ids))[None],
        None,
        model.init_cache(1, 0),
    )
    ours = model.unembed(params, output.hidden)[0]
    theirs = _transformers_logits(folder, ids)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_targets_are_exported_with_the_same_bytes_again(tmp_path: Path) -> None:
    export_target(
        tmp_path / "one", TARGET, random_target(dtype="bfloat16"), dtype="bfloat16"
    )
    config, params = load_target(tmp_path / "one", None)
    chex.assert_trees_all_equal(params, random_target(dtype="bfloat16"))
    export_target(tmp_path / "two", config, params, dtype="bfloat16")
    assert file_bytes(tmp_path / "one") == file_bytes(tmp_path / "two")


def test_targets_name_what_ends_a_text(tmp_path: Path) -> None:
    export_target(tmp_path / "one", TARGET, random_target(), stop_tokens=(5, 9))
    assert stop_tokens(tmp_path / "one") == (5, 9)


def test_the_caller_adds_a_tokenizer_before_a_target_appears(tmp_path: Path) -> None:
    folder = tmp_path / "target"

    def add(unfinished: Path) -> None:
        assert not folder.exists()
        (unfinished / "tokenizer.json").write_text("{}")

    export_target(folder, TARGET, random_target(), also=add)
    assert (folder / "tokenizer.json").read_text() == "{}"
    export_target(folder, TARGET, random_target(), overwrite=True)
    assert sorted(file_bytes(folder)) == ["config.json", "model.safetensors"]


def test_what_the_layouts_cannot_express_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "head"
    config = head_of(head_dim=16)
    refused(
        lambda: export_head(folder, config, random_head(config)), "head_dim", "width 16"
    )
    both = target_config(qkv_bias=True, qk_norm=True)
    refused(
        lambda: export_target(folder, both, random_target(both)), "cannot be exported"
    )
    # Fields that no kind of rotary embedding reads would come back as their defaults.
    odd = head_of(rope=dataclasses.replace(LAYER.rope, factor=3.0))
    refused(lambda: export_head(folder, odd, random_head(odd)), "would be read as")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda p: dataclasses.replace(p, fc_bias=None), "lack fc.bias"),
        (lambda p: dataclasses.replace(p, fc=p.fc[1:]), "(32, 63)"),
        (lambda p: dataclasses.replace(p, embedding=p.fc.T), "embed_tokens.weight"),
        (lambda p: dataclasses.replace(p, fc=p.fc.at[3, 4].set(jnp.nan)), "NaN"),
    ],
)
def test_weights_that_are_no_head_are_refused(
    tmp_path: Path, change: Callable[[EagleHeadParams], EagleHeadParams], named: str
) -> None:
    params = change(random_head())
    refused(lambda: export_head(tmp_path / "head", HEAD, params), named)
    assert not list(tmp_path.iterdir())


def test_unexpected_weights_are_refused(tmp_path: Path) -> None:
    config = dataclasses.replace(HEAD, fc_bias=False)
    refused(
        lambda: export_head(tmp_path / "head", config, random_head()),
        "unexpected fc.bias",
    )


def test_values_that_a_dtype_cannot_hold_are_refused(tmp_path: Path) -> None:
    params = random_head()
    params = dataclasses.replace(params, fc=params.fc.at[0, 0].set(1e5))
    folder = tmp_path / "head"
    refused(
        lambda: export_head(folder, HEAD, params, dtype="float16"),
        "fc.weight",
        "float16 cannot hold",
    )
    refused(lambda: export_head(folder, HEAD, params, dtype="int8"), "'int8'")
    assert not list(tmp_path.iterdir())


def test_without_torch_there_is_no_torch_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    export_head(tmp_path / "head", HEAD, random_head())
    assert sorted(file_bytes(tmp_path / "head")) == ["config.json", "model.safetensors"]
    refused(
        lambda: export_head(tmp_path / "other", HEAD, random_head(), with_bin=True),
        "pytorch_model.bin",
        "torch extra",
    )
    assert not (tmp_path / "other").exists()
