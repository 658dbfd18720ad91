"""Weights are the same however they are stored, read in parts and in little memory."""

import dataclasses
import functools
import io
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tqdm
from jax.sharding import SingleDeviceSharding
from safetensors.numpy import load_file, save_file

from eagle_jax import load_pair
from eagle_jax.checkpoints import (
    load,
    load_target,
    names,
    open_weights,
    target_config,
    tensors,
)
from eagle_jax.checkpoints.load import load_params, shapes_of, target_shapes
from eagle_jax.heads import HEADS
from eagle_jax.models import transformer
from eagle_jax.models.quantized import quantize
from eagle_jax.models.transformer import TransformerParams
from tests.checkpoints.folders import (
    KINDS,
    SINGLE,
    Tensors,
    change_config,
    store,
    take_weights,
)
from tests.checkpoints.settings import GEMMA3, write
from tests.helpers import refused
from tests.tiny import target_config as tiny_target

EAGLE = HEADS["eagle2"]
(TABLE,) = EAGLE(config=None).tensor_names().values()


_UP = "model.layers.0.mlp.up_proj.weight"
_PART = ((8, 24), (0, 32))


def _rewrite(folder: Path, change: Callable[[Tensors], object]) -> None:
    stored = take_weights(folder)
    change(stored)
    save_file(stored, folder / SINGLE)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_way_of_storing_gives_the_same_weights(
    target: Path, expected: TransformerParams, kind: str, dtype: str
) -> None:
    kept = np.dtype(getattr(ml_dtypes, dtype, dtype))
    whole = {name: x.astype(kept) for name, x in take_weights(target).items()}
    store(target, whole, kind)
    wide = load_target(target)[1]
    assert {leaf.dtype for leaf in jax.tree.leaves(wide)} == {jnp.dtype("float32")}
    narrow = jax.tree.map(lambda leaf: leaf.astype(dtype), expected)
    chex.assert_trees_all_equal(
        wide, jax.tree.map(lambda leaf: leaf.astype("float32"), narrow)
    )
    # None as it is stored, and uncommitted: it follows what it is used with.
    as_stored = load_target(target, None)[1]
    chex.assert_trees_all_equal(as_stored, narrow)
    assert not any(leaf.committed for leaf in jax.tree.leaves(as_stored))


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_is_a_slice_of_the_whole(target: Path, kind: str) -> None:
    whole = take_weights(target)
    whole[_UP] = whole[_UP].astype(ml_dtypes.bfloat16)
    store(target, whole, kind)
    files = open_weights(target)
    assert files.shape(_UP) == (48, 32)
    for part in (_PART, ((0, 48), (4, 20)), ((40, 48), (31, 32))):
        found = files.read(_UP, part)
        assert found.dtype == ml_dtypes.bfloat16
        (first, last), (left, right) = part
        np.testing.assert_array_equal(found, whole[_UP][first:last, left:right])


@pytest.mark.parametrize("bits", [8, 4])
def test_matrices_are_quantized_as_they_are_read(target: Path, bits: int) -> None:
    wide: Any = load_target(target)[1]
    for dtype in ("float32", "bfloat16"):  # The integers do not depend on it.
        found = load_target(target, dtype, bits=bits)[1]
        for layer, wide_layer in zip(found.layers, wide.layers, strict=True):
            expected = jax.jit(quantize, static_argnums=1)(wide_layer.key, bits)
            chex.assert_trees_all_equal(layer.key, expected)
            norm = wide_layer.input_norm.astype(dtype)
            chex.assert_trees_all_equal(layer.input_norm, norm)
        chex.assert_trees_all_equal(found.embedding, wide.embedding.astype(dtype))


def test_parts_are_filled_from_all_blocks(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = load_target(target, "bfloat16")[1]
    monkeypatch.setattr(tensors, "_BLOCK_BYTES", 700)
    chex.assert_trees_all_equal(load_target(target, "bfloat16")[1], expected)
    mlp: Any = load_target(target)[1].layers[0].mlp
    np.testing.assert_array_equal(mlp.up, load_file(target / SINGLE)[_UP].T)


@pytest.mark.parametrize("bits", [None, 8])
def test_all_that_is_read_is_counted(
    target: Path, monkeypatch: pytest.MonkeyPatch, bits: int | None
) -> None:
    shown = io.StringIO()
    always = functools.partial(tqdm.tqdm, file=shown)
    changed = {"delay": 0, "disable": False}
    monkeypatch.setattr(tqdm, "tqdm", lambda **given: always(**given | changed))
    load_target(target, bits=bits)
    assert "loading target: 100%" in shown.getvalue()


def test_each_part_is_checked_and_nothing_else_is_read(target: Path) -> None:
    whole = load_file(target / SINGLE)[_UP]
    whole[30, 3] = np.nan
    _rewrite(target, lambda stored: stored.update({_UP: whole}))
    files = open_weights(target)
    np.testing.assert_array_equal(files.read(_UP, _PART), whole[8:24])
    refused(lambda: files.read(_UP, ((24, 48), (0, 32))), _UP, "NaN")


def test_weights_with_a_sharding_are_those_without(target: Path) -> None:
    here = SingleDeviceSharding(jax.devices()[0])
    for dtype in ("float32", "bfloat16"):
        params = load_target(target, dtype, here)[1]
        chex.assert_trees_all_equal(params, load_target(target, dtype)[1])
        assert all(leaf.committed for leaf in jax.tree.leaves(params))


def test_safetensors_win_over_torch_files(
    target: Path, expected: TransformerParams
) -> None:
    (target / "pytorch_model.bin").write_bytes(b"never opened")
    chex.assert_trees_all_equal(load_target(target)[1], expected)


_TABLE, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def test_tied_weights_have_no_output_head(
    target: Path, expected: TransformerParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_config(target, tie_word_embeddings=True)
    tied = dataclasses.replace(expected, output_head=None)
    # Some checkpoints store the table twice all the same.
    monkeypatch.setattr(load, "_ROWS", 7)
    _rewrite(target, lambda stored: stored.update({_HEAD: stored[_TABLE].copy()}))
    chex.assert_trees_all_equal(load_target(target)[1], tied)
    _rewrite(target, lambda stored: stored.pop(_HEAD))
    chex.assert_trees_all_equal(load_target(target)[1], tied)


@pytest.mark.parametrize("row", [0, 299])
def test_a_stored_output_head_counts_where_it_differs_from_the_table(
    target: Path, expected: TransformerParams, monkeypatch: pytest.MonkeyPatch, row: int
) -> None:
    change_config(target, tie_word_embeddings=True)
    monkeypatch.setattr(load, "_ROWS", 7)
    other = load_file(target / SINGLE)[_TABLE]
    other[row, 3] += 1
    _rewrite(target, lambda stored: stored.update({_HEAD: other}))
    with pytest.warns(UserWarning, match="lm_head.weight is stored and is not"):
        config, params = load_target(target)
    assert not config.tie_embeddings
    head = dataclasses.replace(expected, output_head=jnp.asarray(other.T))
    chex.assert_trees_all_equal(params, head)
    pair = load_pair(str(target), method="lookup")
    assert pair.params.target.output_head is not None


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:.*lm_head.weight is stored and is not")
@pytest.mark.parametrize("kind", ["another", "equal"])
def test_output_heads_are_those_of_transformers(target: Path, kind: str) -> None:
    from transformers import AutoModelForCausalLM

    change_config(target, tie_word_embeddings=True)
    stored = load_file(target / SINGLE)
    if kind == "equal":
        _rewrite(target, lambda stored: stored.update({_HEAD: stored[_TABLE].copy()}))
    judge = AutoModelForCausalLM.from_pretrained(target, dtype="float32")
    params: Any
    config, params = load_target(target)
    head = params.embedding if config.tie_embeddings else params.output_head.T
    wanted = judge.lm_head.weight.detach().numpy()
    np.testing.assert_array_equal(head, wanted)
    assert np.array_equal(wanted, stored[_TABLE if kind == "equal" else _HEAD])
    assert config.tie_embeddings == (kind != "another")


def test_one_of_a_single_file_and_shards_is_read_and_named(
    target: Path, expected: TransformerParams
) -> None:
    whole = take_weights(target)
    store(target, {name: x + 1 for name, x in whole.items()}, "shards")
    store(target, whole, "safetensors")
    with pytest.warns(UserWarning, match=r"the single file is read") as told:
        chex.assert_trees_all_equal(load_target(target)[1], expected)
    assert len(told) == 1
    assert f"{SINGLE} and the shards of {SINGLE}.index.json" in str(told[0].message)


def test_derived_buffers_are_read_over(
    target: Path, expected: TransformerParams
) -> None:
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    _rewrite(target, lambda stored: stored.update(buffer))
    chex.assert_trees_all_equal(load_target(target)[1], expected)


def test_every_name_of_the_table_is_used_once() -> None:
    """By targets that have all there is, in two layers and experts."""
    has_all = dict.fromkeys(["qkv_bias", "output_bias", "qk_norm", "has_sinks"], True)
    has_all["mlp_bias"] = True
    for table, more in ((names.TRANSFORMER, {}), (names.GEMMA, {"output_norms": True})):
        every: set[str] = set()
        for experts in ({}, {"num_experts": 2, "experts_per_token": 1}):
            config = tiny_target(num_layers=2, **has_all, **more, **experts)
            shapes = shapes_of(transformer.init_params, config)
            found = jax.tree.leaves(names.tensor_names(shapes, table))
            assert len(set(found)) == len(found)
            every |= set(found)
        numbered = [
            name.format(*numbers)
            for name in table.values()
            for numbers in itertools.product(range(2), repeat=name.count("{}"))
        ]
        assert every == set(numbered)


def test_a_vision_tower_is_left_out_and_nothing_else(
    target: Path,
) -> None:
    config = GEMMA3 | {"num_hidden_layers": 2, "vocab_size": 64, "head_dim": 8}
    shapes = target_shapes(target_config(write(target, config)), None)
    text = {
        name: np.full(leaf.shape[:: -1 if names.is_transposed(name) else 1], len(name))
        for name, leaf in names.by_name(shapes, names.GEMMA).items()
    }
    text = {name: tensor.astype(np.float32) for name, tensor in text.items()}
    both = {f"language_model.{name}": tensor for name, tensor in text.items()}
    both |= dict.fromkeys(["vision_tower.x", "multi_modal_projector.x"], np.ones(1))
    _rewrite(target, lambda old: (old.clear(), old.update(text)))
    alone = load_target(target)
    change_config(target, model_type="gemma3", architectures=[], text_config=config)
    _rewrite(target, lambda old: (old.clear(), old.update(both)))
    with pytest.warns(UserWarning, match="multi_modal_projector.x, vision_tower.x"):
        chex.assert_trees_all_equal(load_target(target), alone)
    _rewrite(target, lambda old: old.update({"audio_tower.x": np.ones(1)}))
    refused(lambda: load_target(target), "unexpected tensors: audio_tower.x")


def _status_bytes(name: str) -> int:
    """An entry of the process's status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_loading_takes_little_memory_beside_the_weights(tmp_path: Path) -> None:
    table = np.full((48_000, 1024), 0.5, ml_dtypes.bfloat16)
    # One is transposed as it is read, one is not.
    listed = ("model.embed_tokens.weight", "lm_head.weight")
    save_file(dict.fromkeys(listed, table), tmp_path / SINGLE)
    shapes = [
        jax.ShapeDtypeStruct(shape, table.dtype)
        for shape in (table.shape, table.T.shape)
    ]
    jax.block_until_ready(jax.device_put(np.zeros(1)))  # Starts the devices.
    Path("/proc/self/clear_refs").write_text("5")  # Forgets the peak so far.
    before = _status_bytes("VmRSS")
    params = load_params(open_weights(tmp_path), [*listed], shapes, table.dtype)
    jax.block_until_ready(params)
    peak = _status_bytes("VmHWM") - before
    share = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert share == 2 * table.nbytes
    assert 1 <= peak / share < 1.3
