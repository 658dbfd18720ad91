"""Heads of every kind in their published layouts: written, read and refused by name."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import pytest
import safetensors.numpy

from eagle_jax.checkpoints import stored_dtype
from eagle_jax.engine.open import open_pair
from eagle_jax.heads import HEADS, find_head, open_head
from eagle_jax.methods import METHODS
from tests import tiny
from tests.checkpoints.folders import change_config, change_weights
from tests.heads.samples import (
    SAMPLES,
    TARGET,
    USUAL,
    load_head,
    read,
    table,
    weights,
    write,
)
from tests.helpers import file_bytes, refused, settings_of

HEAD = tiny.HEAD

_DEEP = tiny.target_config(num_layers=7)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", SAMPLES)
def test_an_exported_head_is_read_as_it_was(
    tmp_path: Path, name: str, dtype: str
) -> None:
    config, params = SAMPLES[name], weights(SAMPLES[name], dtype)
    for layout in tiny.head_of(config).tensor_names():
        folder = write(tmp_path / "one", config, params, layout, dtype=dtype)
        assert find_head(folder) is type(tiny.head_of(config))
        assert stored_dtype(folder) == dtype
        found, stored = read(folder)
        assert found == config
        chex.assert_trees_all_equal(stored, params)
        write(tmp_path / "another name", found, stored, layout, dtype=dtype)
        assert file_bytes(tmp_path / "another name") == file_bytes(folder)
        for path in tmp_path.iterdir():
            shutil.rmtree(path)


@pytest.mark.torch
@pytest.mark.parametrize("name", SAMPLES)
def test_the_pickle_alone_holds_the_same_head(tmp_path: Path, name: str) -> None:
    import torch

    config, params = SAMPLES[name], weights(SAMPLES[name], "bfloat16")
    folder = write(
        tmp_path / "head", config, params, dtype="bfloat16", with_pickle=True
    )
    safe, pickled = (folder / file for file in tiny.head_of(config).files)
    stored = torch.load(pickled, weights_only=True)
    floats = [tensor for tensor in stored.values() if tensor.is_floating_point()]
    assert floats and all(tensor.dtype == torch.bfloat16 for tensor in floats)
    assert stored.keys() == safetensors.numpy.load_file(safe).keys()
    safe.unlink()
    chex.assert_trees_all_equal(read(folder), (config, params))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_are_rounded_to_the_dtype_asked_for(tmp_path: Path, dtype: str) -> None:
    params = weights(HEAD)
    folder = write(tmp_path / "head", HEAD, params, dtype=dtype)
    rounded = jax.tree.map(lambda x: x.astype(dtype), params)
    chex.assert_trees_all_equal(read(folder)[1], rounded)
    loaded = load_head(folder, TARGET, tiny.target_params(TARGET), "float32")[1]
    chex.assert_trees_all_equal(
        loaded, jax.tree.map(lambda x: x.astype("float32"), rounded)
    )


@pytest.mark.parametrize("name", ["eagle2", "eagle3"])
def test_a_table_that_equals_the_targets_is_the_targets(
    tmp_path: Path, name: str
) -> None:
    config, target = SAMPLES[name], tiny.target_params(TARGET)
    params = weights(config)
    for own in (None, target.embedding, target.embedding + 1):
        given = dataclasses.replace(params, embedding=own)
        folder = write(tmp_path / "head", config, given, overwrite=True)
        found = load_head(folder, TARGET, target)[1].embedding
        if own is None or own is target.embedding:
            assert found is None
        else:
            np.testing.assert_array_equal(found, own)


def test_a_head_of_another_width_needs_its_own_table(tmp_path: Path) -> None:
    config = SAMPLES["eagle3, narrow, with layers"]
    folder = write(tmp_path / "head", config)
    change_weights(folder, embed_tokens__weight=None)
    refused(
        lambda: read(folder), str(folder), "lacks an embedding table", "a head of 24"
    )


@pytest.mark.parametrize(
    ("name", "tensor", "shape", "named"),
    [
        ("eagle2", "fc.bias", None, "lacks tensors: fc.bias"),
        ("eagle2", "fc.weight", (32, 63), "fc.weight has shape (32, 63)"),
        ("eagle3", "lm_head.weight", None, "lacks tensors: lm_head.weight"),
        (
            "eagle3, feature norms",
            "fc_norm.0.weight",
            None,
            "lacks tensors: fc_norm.0.weight",
        ),
        ("medusa", "0.0.linear.weight", None, "no Medusa heads"),
        ("medusa", "2.0.linear.bias", None, "lacks tensors: 2.0.linear.bias"),
        ("medusa", "2.0.linear.weight", (31, 32), "has shape (31, 32)"),
        ("medusa", "0.0.linear.weight", (), "hidden_size is 0"),
        ("hydra", "hydra_mlp.0.1.linear.weight", None, "lacks hydra_mlp.0.1.linear"),
        ("hydra", "hydra_lm_head.0.1.weight", None, "lacks hydra_lm_head.0.1.weight"),
        (
            "hydra",
            "hydra_mlp.1.1.res_connection.weight",
            (32, 64),
            "has shape (32, 64), but its sizes ask for (32, 96)",
        ),
    ],
)
def test_tensors_that_are_no_head_are_refused_by_name(
    tmp_path: Path, name: str, tensor: str, shape: Any, named: str
) -> None:
    config = SAMPLES[name]
    folder = write(tmp_path / "head", config)
    given = None if shape is None else np.zeros(shape, np.float32)
    change_weights(folder, **{tensor.replace(".", "__"): given})
    refused(lambda: read(folder), named)


@pytest.mark.parametrize(
    ("name", "fields", "named"),
    [
        ("eagle2", {"num_hidden_layers": 2}, "an EAGLE-1/2 head has 1 layer"),
        ("eagle2", {"hidden_act": "gelu"}, "hidden_act"),
        ("eagle3", {"draft_vocab_size": 65}, "draft_vocab_size = 65"),
        ("eagle3", {"model_type": "gemma3_text"}, "gemma3_text"),
        ("eagle3", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("eagle3", {"eagle_config": {"use_aux_hidden_state": False}}, "eagle_config"),
        ("eagle3", {"speculators_model_type": "dflash"}, "dflash"),
        ("eagle3", {"fc_norm": True}, "lacks tensors: fc_norm.0.weight"),
        ("eagle3", {"norm_before_fc": True}, "lacks tensors: input_norm.weight"),
        (
            "eagle3",
            {"layer_types": ["sliding_attention", "full_attention"]},
            "must name one kind",
        ),
        ("eagle3", {"layer_types": ["sliding_attention"]}, "sliding_window = None"),
        ("eagle3, recycling", {"transformer_layer_config": [7]}, "[7] must be an obj"),
        ("eagle3, recycling", {"fc_norm": [True]}, "fc_norm"),
        (
            "eagle3, recycling",
            {"eagle_aux_hidden_state_layer_ids": [1, "2"]},
            "[1, '2'] must be a list of layers",
        ),
        (
            "medusa",
            {"medusa_num_layers": 3},
            "medusa_num_layers = 3, but the file has 2",
        ),
        ("hydra", {"hydra_num_layers": 3}, "hydra_num_layers = 3, but the file has 2"),
        ("hydra", {"hydra_head_arch": "eagle-attn"}, "eagle-attn"),
        ("hydra", {"hydra_head_arch": "mlp"}, "hydra_head_arch mlp"),
        ("hydra", {"grounded_heads": False}, "grounded_heads = false"),
        ("hydra", {"hidden_state_offset": 1}, "hidden_state_offset = 1"),
        ("dflash", {"num_hidden_layers": 3}, "lacks tensors: layers.2."),
        ("dflash", {"block_size": 1}, "block_size = 1 must be an integer from 2"),
        ("dflash", {"dflash_config": [3]}, "dflash_config = [3] must be an object"),
        (
            "dflash",
            {"dflash_config": {"mask_token_id": 64, "target_layer_ids": [1]}},
            "mask_token_id = 64 must be an integer from 0 to 63",
        ),
        ("dflash", {"sample_from_anchor": True}, "contradicts its architecture"),
        ("dflash", {"conv_kernel_size": 2}, "not those of DFlash-2"),
        ("dspark", {"target_layer_ids": [1, 1]}, "[1, 1] must be different"),
        ("dspark", {"target_layer_ids": [1, 6]}, "[1, 6] must be layers of the target"),
        ("dspark", {"target_layer_ids": "all"}, "'all' must be a list of layers"),
        (
            "dspark",
            {"num_target_layers": 8},
            "num_target_layers is 8, the target has 7",
        ),
        ("dspark", {"markov_head_type": "gated"}, "markov_head_type = 'gated'"),
        ("dspark", {"markov_rank": 4}, "markov_head.markov_w1.weight has shape"),
    ],
)
def test_settings_that_cannot_run_are_refused_by_name(
    tmp_path: Path, name: str, fields: dict[str, Any], named: str
) -> None:
    folder = write(tmp_path / "head", SAMPLES[name])
    change_config(folder, **fields)
    refused(lambda: read(folder), named)


@pytest.mark.parametrize("name", SAMPLES)
def test_a_head_of_another_target_is_refused(tmp_path: Path, name: str) -> None:
    config = SAMPLES[name]
    folder = write(tmp_path / "head", config)
    wide = tiny.sizes(hidden_size=48)["layer"]
    others = [dataclasses.replace(_DEEP, layer=wide)]
    if name != "medusa, borrowing":  # It has no vocabulary of its own.
        others.append(dataclasses.replace(_DEEP, vocab_size=63))
    for other in others:
        refused(lambda other=other: open_head(folder, other), " target")


@pytest.mark.parametrize("name", ["medusa, borrowing", "hydra"])
def test_what_the_files_leave_open_is_asked_of_the_target(
    tmp_path: Path, name: str
) -> None:
    folder = write(tmp_path / "head", SAMPLES[name])
    refused(lambda: open_head(folder), str(folder), "give the target, too")


@pytest.mark.parametrize(
    "name", ["eagle2", "eagle3", "medusa", "hydra", "dflash", "dspark"]
)
def test_a_folder_of_another_kind_is_refused(
    tiny_pair: Path, tmp_path: Path, name: str
) -> None:
    folder, target = write(tmp_path / "head", SAMPLES[name]), tiny_pair / "target"
    own = tiny.head_of(SAMPLES[name])
    for method in ("eagle1", "medusa", "hydra", "dflash", "dspark", "small-model"):
        weights = METHODS[method].weights
        assert weights is not None
        wanted = f"{folder} holds {own.title}; method"
        given = folder
        if own.name in weights.kinds:
            wanted, given = "holds a whole model; method", target
        settings = settings_of(method=method)
        refused(
            lambda given=given, settings=settings: open_pair(
                str(target), str(given), settings
            ),
            wanted,
            weights.description,
        )
    refused(
        lambda: open_pair(str(folder), None, settings_of(method="lookup")),
        f"{folder} holds {own.title}, not a target; give it as `draft`",
    )


@pytest.mark.parametrize(
    ("changed", "how", "named"),
    [
        ({"fc": np.zeros((63, 32), np.float32)}, {}, "(63, 32)"),
        ({"embedding": np.zeros((32, 64), np.float32)}, {}, "embed_tokens.weight"),
        ({"fc": np.full((64, 32), np.nan, np.float32)}, {}, "NaN"),
        (
            {"fc": np.full((64, 32), 1e5, np.float32)},
            {"dtype": "float16"},
            "cannot hold",
        ),
        ({}, {"dtype": "int8"}, "'int8'"),
    ],
)
def test_weights_that_are_no_head_are_not_written(
    tmp_path: Path, changed: dict[str, Any], how: dict[str, Any], named: str
) -> None:
    params = dataclasses.replace(weights(HEAD), **changed)
    refused(lambda: write(tmp_path / "head", HEAD, params, **how), named)
    assert not list(tmp_path.iterdir())


def test_what_a_layout_cannot_express_is_not_written(tmp_path: Path) -> None:
    layer = dataclasses.replace(HEAD.layer, head_dim=16)
    wide = dataclasses.replace(HEAD, layer=layer)
    refused(lambda: write(tmp_path / "head", wide), "head_dim", "width 16")
    # Fields that no kind of rotary embedding reads would come back as their defaults.
    rope = dataclasses.replace(HEAD.layer.rope, factor=3.0)
    odd = dataclasses.replace(HEAD, layer=dataclasses.replace(HEAD.layer, rope=rope))
    refused(lambda: write(tmp_path / "head", odd), "would be read as")
    refused(
        lambda: write(tmp_path / "head", USUAL, layout="layer"),
        "'layer'",
        "midlayer or layers.0",
    )
    assert not list(tmp_path.iterdir())


def test_a_head_has_a_name_a_title_and_settings_of_its_own() -> None:
    assert {head.name for head in HEADS.values()} == HEADS.keys()
    assert len({head.Settings for head in HEADS.values()}) == len(HEADS)
    assert table(HEAD).shape == (64, 32)
