import dataclasses
import itertools
import json
import os
import pickle
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from eagle_jax.checkpoints import (
    head_config,
    load,
    load_head,
    load_target,
    names,
    tensors,
)
from eagle_jax.checkpoints import target_config as read_target_config
from eagle_jax.checkpoints.weights import TensorFiles
from eagle_jax.models import eagle_head, transformer
from eagle_jax.models.transformer import TransformerParams
from tests.checkpoints.folders import (
    SINGLE,
    Tensors,
    change_config,
    save_bin,
    take_weights,
    write_shards,
)
from tests.helpers import refused
from tests.tiny import head_config as tiny_head
from tests.tiny import target_config as tiny_target

_QUERY = "model.layers.1.self_attn.q_proj.weight"


def _rewrite(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = take_weights(folder)
    change(tensors)
    save_file(tensors, folder / SINGLE)


_BIN = pytest.param("bin", marks=pytest.mark.torch)


@pytest.mark.parametrize("kind", ["safetensors", _BIN])
def test_shards_and_torch_files_give_the_same_weights(
    target: Path, expected: TransformerParams, kind: str
) -> None:
    stored, save = take_weights(target), save_bin if kind == "bin" else save_file
    index = write_shards(target, stored, save, kind)
    chex.assert_trees_all_equal(load_target(target)[1], expected)
    if kind == "bin":
        index.unlink()
        save_bin(stored, target / "pytorch_model.bin")
        chex.assert_trees_all_equal(load_target(target)[1], expected)


def _poisoned(value: float) -> Callable[[np.ndarray], np.ndarray]:
    def poison(tensor: np.ndarray) -> np.ndarray:
        tensor = tensor.copy()
        tensor[3, 5] = value
        return tensor

    return poison


_UP = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        (_QUERY, None, ("lacks",)),
        ("lm_head.weight", None, ("lacks",)),
        (_QUERY, lambda x: x[:16], ("(16, 32)", "(32, 32)")),
        (_UP, lambda x: x.reshape(32, 48), ("(32, 48)", "(48, 32)")),
        (_QUERY, lambda x: x.astype(np.int8), ("int8",)),
        *((_QUERY, _poisoned(x), ("NaN or inf",)) for x in (np.nan, np.inf, -np.inf)),
    ],
)
def test_tensors_that_are_not_the_targets_are_named(
    target: Path, name: str, change: Any, named: tuple[str, ...]
) -> None:
    def rewrite(tensors: Tensors) -> None:
        tensor = tensors.pop(name)
        if change is not None:
            tensors[name] = change(tensor)

    _rewrite(target, rewrite)
    refused(lambda: load_target(target), name, *named)


def test_tensors_that_are_not_the_heads_are_named(head: Path, target: Path) -> None:
    pair = load_target(target)
    norm = "layers.0.input_layernorm.weight"
    _rewrite(head, lambda tensors: tensors.update({norm: np.ones(32, np.float32)}))
    refused(lambda: load_head(head, *pair), "unexpected", norm)
    _rewrite(head, lambda tensors: tensors.pop(norm))
    change_config(head, bias=False)
    refused(lambda: load_head(head, *pair), "unexpected", "fc.bias")
    change_config(head, bias=True)
    _rewrite(head, lambda tensors: tensors.pop("fc.bias"))
    refused(lambda: load_head(head, *pair), "lacks", "fc.bias")
    broken = {"fc.bias": np.full(32, np.nan, np.float32)}
    _rewrite(head, lambda tensors: tensors.update(broken))
    refused(lambda: load_head(head, *pair), "fc.bias", "NaN", "damaged")


def test_safetensors_win_over_torch_files(
    target: Path, expected: TransformerParams
) -> None:
    (target / "pytorch_model.bin").write_bytes(b"never opened")
    chex.assert_trees_all_equal(load_target(target)[1], expected)


@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
def test_half_precision_files_are_read(
    target: Path, expected: TransformerParams, stored: str
) -> None:
    kind = np.dtype(getattr(ml_dtypes, stored, stored))
    tensors = {k: v.astype(kind) for k, v in take_weights(target).items()}
    save_file(tensors, target / SINGLE)
    wide = load_target(target)[1]
    assert {x.dtype for x in jax.tree.leaves(wide)} == {jnp.dtype("float32")}
    chex.assert_trees_all_equal(
        wide, jax.tree.map(lambda x: x.astype(stored).astype("float32"), expected)
    )


@pytest.mark.torch
def test_bfloat16_torch_files_are_read(
    target: Path, expected: TransformerParams
) -> None:
    import torch

    tensors = {
        name: torch.from_numpy(tensor.copy()).to(torch.bfloat16)
        for name, tensor in take_weights(target).items()
    }
    torch.save(tensors, target / "pytorch_model.bin")
    narrow = load_target(target, "bfloat16")[1]
    chex.assert_trees_all_equal(
        narrow, jax.tree.map(lambda x: x.astype("bfloat16"), expected)
    )


def test_tied_weights_have_no_output_head(
    target: Path, expected: TransformerParams
) -> None:
    change_config(target, tie_word_embeddings=True)
    tied = dataclasses.replace(expected, output_head=None)
    # Some checkpoints store the table twice all the same.
    chex.assert_trees_all_equal(load_target(target)[1], tied)
    _rewrite(target, lambda tensors: tensors.pop("lm_head.weight"))
    chex.assert_trees_all_equal(load_target(target)[1], tied)


def test_derived_buffers_are_read_over(
    target: Path, expected: TransformerParams
) -> None:
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    _rewrite(target, lambda tensors: tensors.update(buffer))
    chex.assert_trees_all_equal(load_target(target)[1], expected)


def test_unexpected_tensors_are_named(target: Path) -> None:
    change_config(target, num_hidden_layers=1)
    message = refused(lambda: load_target(target), "unexpected", "model.layers.1.")
    assert "model.layers.0." not in message


@pytest.mark.parametrize("size", [0, 5, 400, -100])
def test_a_truncated_safetensors_file_is_refused(target: Path, size: int) -> None:
    path = target / SINGLE
    whole = path.read_bytes()
    path.write_bytes(whole[:size])
    refused(lambda: load_target(target), str(path))


@pytest.mark.torch
def test_a_truncated_torch_file_is_refused(target: Path) -> None:
    path = target / "pytorch_model.bin"
    save_bin(take_weights(target), path)
    path.write_bytes(path.read_bytes()[:-5000])
    refused(lambda: load_target(target), str(path))


def test_a_folder_without_weights_is_refused(target: Path) -> None:
    (target / SINGLE).unlink()
    refused(lambda: load_target(target), str(target), "no weights", SINGLE)


def test_a_missing_shard_is_named(target: Path) -> None:
    write_shards(target, take_weights(target), save_file, "safetensors")
    shard = target / "model-00002-of-00002.safetensors"
    shard.unlink()
    refused(lambda: load_target(target), str(shard), "index")


def test_an_index_that_names_too_much_is_refused(target: Path) -> None:
    index = write_shards(target, take_weights(target), save_file, "safetensors")
    listed = json.loads(index.read_text())
    shard = listed["weight_map"][_QUERY]
    listed["weight_map"]["model.ghost.weight"] = shard
    index.write_text(json.dumps(listed))
    refused(lambda: load_target(target), shard, "model.ghost.weight")


def test_a_tensor_in_two_shards_is_refused(target: Path) -> None:
    tensors = take_weights(target)
    index = write_shards(target, tensors, save_file, "safetensors")
    others = set(json.loads(index.read_text())["weight_map"].values())
    others.remove(json.loads(index.read_text())["weight_map"][_QUERY])
    path = target / others.pop()
    save_file(load_file(path) | {_QUERY: tensors[_QUERY]}, path)
    refused(lambda: load_target(target), _QUERY, "another shard")


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}']
)
def test_a_broken_index_is_refused(target: Path, text: str) -> None:
    (target / SINGLE).unlink()
    index = target / "model.safetensors.index.json"
    index.write_text(text)
    refused(lambda: load_target(target), str(index))


class _Trap:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.torch
@pytest.mark.parametrize("with_torch", [True, False])
def test_a_pickle_with_code_is_refused_and_not_executed(
    target: Path, tmp_path: Path, with_torch: bool
) -> None:
    import torch

    (target / SINGLE).unlink()
    path, sprung = target / "pytorch_model.bin", tmp_path / "sprung"
    payload = {"model.norm.weight": _Trap(sprung)}
    if with_torch:
        torch.save(payload, path)
    else:
        path.write_bytes(pickle.dumps(payload))
    refused(lambda: load_target(target), str(path))
    assert not sprung.exists()
    pickle.loads(pickle.dumps(payload))
    assert sprung.exists(), "the trap itself works"


@pytest.mark.torch
@pytest.mark.parametrize("content", [["a", "list"], {"step": 3}])
def test_a_torch_file_of_something_else_is_refused(target: Path, content: Any) -> None:
    import torch

    (target / SINGLE).unlink()
    torch.save(content, target / "pytorch_model.bin")
    refused(lambda: load_target(target), "pytorch_model.bin")


def test_a_target_survives_the_round_trip_through_its_names(target: Path) -> None:
    config = read_target_config(target)
    params = transformer.init_params(jax.random.key(3), config)
    _write_by_name(target, params, names.TRANSFORMER)
    chex.assert_trees_all_equal(load_target(target)[1], params)


def test_a_head_survives_the_round_trip_through_its_names(
    head: Path, target: Path
) -> None:
    change_config(head, qkv_bias=True)
    params = eagle_head.init_params(jax.random.key(3), head_config(head))
    _write_by_name(head, params, names.EAGLE_HEAD)
    chex.assert_trees_all_equal(load_head(head, *load_target(target))[1], params)


def _write_by_name(folder: Path, params: Any, table: dict[str, str]) -> None:
    named = names.by_name(params, table)
    tensors = {name: np.ascontiguousarray(named[name]) for name in named}
    save_file(tensors, folder / SINGLE)


def test_every_name_of_the_tables_is_used_once() -> None:
    """By a head and targets that have all there is, in two layers and experts."""
    biases = {"qkv_bias": True, "qk_norm": True}
    key = jax.random.key(0)

    def used(params: Any, table: dict[str, str]) -> list[str]:
        return jax.tree.leaves(names.tensor_names(params, table))

    head = tiny_head(**biases)
    head_params = dataclasses.replace(
        eagle_head.init_params(key, head), embedding=jnp.ones(1)
    )
    found = used(head_params, names.EAGLE_HEAD)
    assert len(set(found)) == len(found)
    assert set(found) <= set(names.EAGLE_HEAD.values())
    mixture = tiny_target(**biases, num_experts=2, experts_per_token=1)
    every: set[str] = set()
    for config in (tiny_target(**biases), mixture):
        found = used(transformer.init_params(key, config), names.TRANSFORMER)
        assert len(set(found)) == len(found)
        every |= set(found)
    numbered = [
        name.format(*numbers)
        for name in names.TRANSFORMER.values()
        for numbers in itertools.product(range(2), repeat=name.count("{}"))
    ]
    assert every == set(numbered)


def test_a_head_shares_an_equal_embedding_table(head: Path, target: Path) -> None:
    assert "embed_tokens.weight" in load_file(head / SINGLE)
    params = load_head(head, *load_target(target))[1]
    assert params.embedding is None
    assert params.fc_bias is not None


def test_a_head_keeps_a_different_embedding_table(head: Path, target: Path) -> None:
    name = "embed_tokens.weight"
    _rewrite(head, lambda tensors: tensors.update({name: tensors[name] + 1}))
    params = load_head(head, *load_target(target))[1]
    np.testing.assert_array_equal(params.embedding, load_file(head / SINGLE)[name])
    _rewrite(head, lambda tensors: tensors.pop(name))
    assert load_head(head, *load_target(target))[1].embedding is None


def test_loading_holds_a_few_blocks_of_what_it_reads(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: set[int] = set()
    most_alive = reads = 0
    lock = threading.Lock()
    checked = TensorFiles._checked

    def counted(files: TensorFiles, name: str, read: Any) -> np.ndarray:
        nonlocal most_alive, reads
        tensor = checked(files, name, read)
        with lock:
            reads += 1
            alive.add(reads)
            weakref.finalize(tensor, alive.discard, reads)
            most_alive = max(most_alive, len(alive))
        return tensor

    monkeypatch.setattr(TensorFiles, "_checked", counted)
    monkeypatch.setattr(tensors, "_BLOCK_BYTES", 1024)
    params = load_target(target)[1]
    assert reads > 3 * len(jax.tree.leaves(params))
    assert most_alive <= load._READERS
    assert not alive
