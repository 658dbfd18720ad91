"""EAGLE-3 heads as they are stored: what is read, and what is refused by name."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from eagle_jax.checkpoints import (
    check_eagle3_pair,
    eagle3_config,
    eagle3_target,
    head_config,
    is_eagle3,
    load_target,
    names,
    read_head,
    target_config,
)
from eagle_jax.heads import load_head
from eagle_jax.heads.eagle3 import model as eagle3_head
from eagle_jax.heads.eagle3.model import (
    Eagle3HeadConfig,
    Eagle3HeadParams,
    feature_layers,
)
from eagle_jax.models.rope import RopeConfig
from eagle_jax.models.transformer import TransformerConfig, TransformerParams
from tests.checkpoints.folders import change_config, change_weights
from tests.eagle3_pair import HIDDEN, KNOWN, VOCABULARY
from tests.helpers import refused

Loaded = tuple[TransformerConfig, TransformerParams]

_FILE, _TABLE = "model.safetensors", "embed_tokens__weight"
_OFFSETS = np.zeros(KNOWN, np.int64)


@pytest.fixture(scope="module")
def target(eagle3_pair: Path) -> Loaded:
    return load_target(eagle3_pair / "target")


@pytest.fixture
def head(eagle3_pair: Path, tmp_path: Path) -> Path:
    """A copy of the head to change at will."""
    return Path(shutil.copytree(eagle3_pair / "head", tmp_path / "head"))


def load(folder: Path, target: Loaded) -> Eagle3HeadParams:
    return load_head(folder, *target)[1]


@pytest.fixture(scope="module")
def sizes(eagle3_pair: Path) -> TransformerConfig:
    return target_config(eagle3_pair / "target")


def drawn(config: Eagle3HeadConfig) -> Eagle3HeadParams:
    """Weights of a head, none of them zero or one, and the first tokens but one."""
    rng = np.random.default_rng(5)
    shapes = jax.eval_shape(
        lambda key: eagle3_head.init_params(key, config), jax.random.key(0)
    )

    def draw(shape: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.device_put(rng.normal(size=shape.shape).astype(np.float32))

    params = jax.tree.map(draw, dataclasses.replace(shapes, offsets=None))
    ones = np.ones(config.draft_vocab_size, np.int32)
    return dataclasses.replace(params, offsets=jax.device_put(ones))


def test_tokens_of_the_head_are_the_stored_ones(head: Path, target: Loaded) -> None:
    stored = load_file(head / _FILE)
    offsets = load(head, target).offsets
    assert offsets is not None and offsets.dtype == np.int32
    tokens = np.arange(KNOWN) + np.asarray(offsets)
    np.testing.assert_array_equal(tokens, np.flatnonzero(stored["t2d"]))
    change_weights(head, t2d=None)  # It says nothing that d2t does not.
    np.testing.assert_array_equal(load(head, target).offsets, offsets)


def test_both_prefixes_name_the_same_head(head: Path, target: Loaded) -> None:
    official = load(head, target)
    stored = load_file(head / _FILE)
    renamed = {k.replace("midlayer.", "layers.0."): stored[k] for k in stored}
    (head / _FILE).unlink()
    save_file(renamed, head / _FILE)
    chex.assert_trees_all_equal(load(head, target), official)


@pytest.mark.torch
def test_official_files_of_both_kinds_hold_one_head(
    shared: Path, tmp_path: Path
) -> None:
    folder = shared / "models" / "random9-eagle3"
    for name in ("config.json", "pytorch_model.bin"):
        shutil.copyfile(folder / name, tmp_path / name)
    pair = load_target(shared / "models" / "random9")
    chex.assert_trees_all_equal(load(tmp_path, pair), load(folder, pair))


@pytest.mark.parametrize("dtype", ["bfloat16", None])
def test_tokens_stay_integers_in_any_dtype(
    head: Path, target: Loaded, dtype: str | None
) -> None:
    config, params = load_head(head, *target, dtype)
    assert params.offsets is not None and params.offsets.dtype == np.int32
    assert params.fc.dtype == (dtype or "float32")
    assert config.draft_vocab_size == KNOWN


def test_equal_vocabularies_need_no_map(head: Path, target: Loaded) -> None:
    change_config(head, draft_vocab_size=VOCABULARY)
    lm_head = np.ones((VOCABULARY, HIDDEN), np.float32)
    change_weights(head, lm_head__weight=lm_head, d2t=None, t2d=None)
    assert load(head, target).offsets is None
    # A map that changes nothing is as good as none.
    identity = np.zeros(VOCABULARY, np.int64)
    change_weights(head, d2t=identity, t2d=identity == 0)
    assert load(head, target).offsets is None


@pytest.mark.parametrize(
    ("offsets", "named"),
    [
        (None, "lacks d2t"),
        (_OFFSETS[1:], "(149,)"),
        (_OFFSETS.astype(np.float32), "float32"),
        (_OFFSETS - 1, "ascending"),
        (_OFFSETS + VOCABULARY - KNOWN + 1, "ascending"),
        (_OFFSETS - np.arange(KNOWN), "ascending"),
        (np.arange(KNOWN) * 2, "it holds offsets, not tokens"),
    ],
)
def test_a_map_that_leads_nowhere_is_refused(
    head: Path, target: Loaded, offsets: np.ndarray | None, named: str
) -> None:
    change_weights(head, d2t=offsets, t2d=None)
    refused(lambda: load(head, target), str(head), named)


def test_maps_that_disagree_are_refused(head: Path, target: Loaded) -> None:
    flipped = load_file(head / _FILE)["t2d"].copy()
    flipped[7] = ~flipped[7]
    for is_known in (flipped, flipped[1:]):
        change_weights(head, t2d=is_known)
        refused(lambda: load(head, target), str(head), "d2t and t2d")


def test_other_tensors_of_integers_are_refused(head: Path, target: Loaded) -> None:
    change_weights(head, norm__weight=np.ones(HIDDEN, np.int64))
    refused(lambda: load(head, target), "norm.weight", "int64")


def test_a_head_without_its_output_head_is_refused(head: Path, target: Loaded) -> None:
    change_weights(head, lm_head__weight=None)
    refused(lambda: load(head, target), str(head), "lacks lm_head.weight")


def test_missing_and_unexpected_tensors_are_named(head: Path, target: Loaded) -> None:
    change_weights(head, fc__bias=np.ones(HIDDEN, np.float32))
    refused(lambda: load(head, target), "unexpected", "fc.bias")
    change_weights(head, fc__bias=None, midlayer__hidden_norm__weight=None)
    refused(lambda: load(head, target), "lacks", "midlayer.hidden_norm.weight")


def test_an_equal_embedding_table_is_the_targets(head: Path, target: Loaded) -> None:
    table = np.asarray(target[1].embedding)
    change_weights(head, **{_TABLE: table})
    assert load(head, target).embedding is None
    change_weights(head, **{_TABLE: table + 1})
    np.testing.assert_array_equal(load(head, target).embedding, table + 1)


def test_a_head_of_another_width_needs_its_own_table(
    head: Path, target: Loaded
) -> None:
    config = dataclasses.replace(
        eagle3_config(head),
        layer=dataclasses.replace(
            eagle3_config(head).layer, hidden_size=24, head_dim=6
        ),
    )
    params = drawn(config)
    named = names.by_name(dataclasses.replace(params, offsets=None), names.EAGLE3_HEAD)
    maps = {name: load_file(head / _FILE)[name] for name in names.MAPS}
    (head / _FILE).unlink()
    stored = {name: np.ascontiguousarray(x) for name, x in named.items()}
    save_file(stored | maps, head / _FILE)
    change_config(head, hidden_size=24)
    refused(lambda: load(head, target), "width 72", "96")
    change_config(head, target_hidden_size=HIDDEN)
    refused(lambda: load(head, target), str(head), "lacks embed_tokens.weight", "24")
    table = np.ones((VOCABULARY, 24), np.float32)
    change_weights(head, **{_TABLE: table})
    found = load(head, target)
    np.testing.assert_array_equal(found.embedding, table)
    np.testing.assert_array_equal(found.fc, params.fc)


@pytest.mark.parametrize("prefix", [names.EAGLE3_HEAD, names.EAGLE3_HEAD_ELSEWHERE])
def test_a_head_survives_the_round_trip_through_its_names(
    head: Path, target: Loaded, prefix: dict[str, str]
) -> None:
    change_config(head, qkv_bias=True)
    params = drawn(eagle3_config(head))
    named = names.by_name(dataclasses.replace(params, offsets=None), prefix)
    stored = {name: np.ascontiguousarray(x) for name, x in named.items()}
    stored["d2t"] = np.asarray(params.offsets)
    (head / _FILE).unlink()
    save_file(stored, head / _FILE)
    chex.assert_trees_all_equal(load(head, target), params)


def test_everything_of_a_head_is_its_own(head: Path) -> None:
    found = eagle3_config(head)
    assert found.layer.rope == RopeConfig(theta=10000.0)  # Where none is named.
    assert found.layer.intermediate_size == 40
    assert found.layer.num_kv_heads == 4
    assert (found.vocab_size, found.draft_vocab_size) == (VOCABULARY, KNOWN)
    assert found.feature_size == 3 * HIDDEN
    change_config(head, rope_theta=5e5, num_hidden_layers=40, target_hidden_size=48)
    found = eagle3_config(head)
    assert found.layer.rope == RopeConfig(theta=5e5)
    assert found.feature_size == 3 * 48
    change_config(head, draft_vocab_size=None, eagle_config={})
    assert eagle3_config(head).draft_vocab_size == VOCABULARY


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"draft_vocab_size": VOCABULARY + 1}, "draft_vocab_size = 301"),
        ({"draft_vocab_size": "many"}, "draft_vocab_size"),
        ({"model_type": "gemma"}, "gemma"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "eagle_config"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1]}}, "layer_ids"),
    ],
)
def test_a_head_that_cannot_run_is_refused_by_name(
    head: Path, change: dict[str, Any], named: str
) -> None:
    change_config(head, **change)
    refused(lambda: eagle3_config(head), str(head / "config.json"), named)


def test_a_head_of_another_target_is_refused(
    eagle3_pair: Path, sizes: TransformerConfig
) -> None:
    found = eagle3_config(eagle3_pair / "head")
    check_eagle3_pair(sizes, found)
    other = dataclasses.replace(sizes, vocab_size=299)
    refused(lambda: check_eagle3_pair(other, found), "300", "299")
    layer = dataclasses.replace(sizes.layer, hidden_size=48)
    other = dataclasses.replace(sizes, layer=layer)
    refused(lambda: check_eagle3_pair(other, found), "96", "144")


def test_a_target_needs_three_different_features(
    sizes: TransformerConfig,
) -> None:
    for num_layers in range(7, 100):
        found = eagle3_target(dataclasses.replace(sizes, num_layers=num_layers))
        low, middle, high = found.feature_layers
        assert 0 < low < middle < high < num_layers
        assert (low, middle, high) == (2, num_layers // 2, num_layers - 3)
        assert found.feature_size == 3 * HIDDEN
    for num_layers in range(1, 7):
        low, middle, high = feature_layers(num_layers)
        assert not 0 < low < middle < high
        few = dataclasses.replace(sizes, num_layers=num_layers)
        refused(lambda few=few: eagle3_target(few), f"{num_layers} layers", "7")


def test_what_reads_eagle_2_heads_refuses_one_of_eagle_3(
    eagle3_pair: Path, tiny_pair: Path
) -> None:
    folder = eagle3_pair / "head"
    assert is_eagle3(folder) and not is_eagle3(tiny_pair / "head")
    refused(lambda: head_config(folder), str(folder), "EAGLE-3", "EAGLE-1/2")
    refused(lambda: read_head(folder), str(folder), "EAGLE-3")


def _hub_head(folder: Path, **sizes: int) -> Eagle3HeadConfig:
    common = {"model_type": "llama", "max_position_embeddings": 2048}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(common | sizes))
    return eagle3_config(folder)


def test_published_sizes_have_the_published_bytes(tmp_path: Path) -> None:
    llama = _hub_head(
        tmp_path / "llama",
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        num_hidden_layers=1,
        vocab_size=128256,
        draft_vocab_size=32000,
    )
    vicuna = _hub_head(
        tmp_path / "vicuna",
        hidden_size=5120,
        intermediate_size=13824,
        num_attention_heads=40,
        num_hidden_layers=40,
        vocab_size=32000,
        draft_vocab_size=32000,
    )
    for config, megabytes in ((llama, 849.4), (vicuna, 1277)):
        shapes = jax.eval_shape(
            lambda key, config=config: eagle3_head.init_params(key, config, "float16"),
            jax.random.key(0),
        )
        has_map = config.draft_vocab_size < config.vocab_size
        assert (shapes.offsets is not None) == has_map
        leaves = jax.tree.leaves(dataclasses.replace(shapes, offsets=None))
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) / 1e6
        assert size == pytest.approx(megabytes, rel=1e-3)
