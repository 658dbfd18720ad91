"""Converted pairs: loaded as what they were made of, quantized, never half written."""

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import load_file, save_file

from eagle_jax.checkpoints import (
    convert_pair,
    load_target,
    open_weights,
    orbax_store,
    stop_tokens,
    stored_dtype,
    target_bits,
    target_config,
)
from eagle_jax.checkpoints import tensors as tensors_module
from eagle_jax.generation.tokenizer import load_tokenizer
from eagle_jax.heads import load_head, open_head
from eagle_jax.models.quantized import bits_of, quantize
from tests.checkpoints.folders import SINGLE, change_config
from tests.helpers import file_bytes, file_names, refused

_REPOSITORY = Path(__file__).resolve().parents[2]
_TABLE, _NORM = "embed_tokens.weight", "model.norm.weight"


@pytest.fixture(scope="session", params=[None, 8, 4])
def bits(request: pytest.FixtureRequest) -> int | None:
    return request.param


@pytest.fixture(scope="session")
def stored(
    tiny_pair: Path,
    converted: Path,
    tmp_path_factory: pytest.TempPathFactory,
    bits: int | None,
) -> Path:
    """The tiny pair, converted, maybe with a quantized target; copy before changing."""
    if bits is None:
        return converted
    output = tmp_path_factory.mktemp("quantized") / "pair"
    convert_pair(output, tiny_pair / "target", open_head(tiny_pair / "head"), bits=bits)
    return output


def _change(folder: Path, name: str, change: Callable[[np.ndarray], Any]) -> None:
    path = folder / SINGLE
    tensors = load_file(path)
    tensors[name] = change(tensors[name])
    save_file(tensors, path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_converted_pair_loads_bit_for_bit(
    tiny_pair: Path, stored: Path, bits: int | None, dtype: str
) -> None:
    config, params = load_target(tiny_pair / "target", dtype, bits=bits)
    for given in (None, bits):
        same_config, same = load_target(stored / "target", dtype, bits=given)
        assert same_config == config
        chex.assert_trees_all_equal(same, params)
    head, head_params = load_head(tiny_pair / "head", config, params, dtype)
    same_head, same_params = load_head(stored / "head", config, same, dtype)
    assert same_head == head
    chex.assert_trees_all_equal(same_params, head_params)
    kinds = {str(leaf.dtype) for leaf in jax.tree.leaves((same, same_params))}
    assert kinds == {dtype} | ({"int8", "float32"} if bits else set())
    # What is uncommitted follows what it is used with, as from other folders.
    assert not any(leaf.committed for leaf in jax.tree.leaves((same, same_params)))
    assert (bits_of(same), bits_of(same_params)) == (bits, None)


@pytest.mark.parametrize("bits", [8, 4])
def test_matrices_are_quantized_as_they_are_read(tiny_pair: Path, bits: int) -> None:
    wide: Any = load_target(tiny_pair / "target")[1]
    for dtype in ("float32", "bfloat16"):  # The integers do not depend on it.
        found = load_target(tiny_pair / "target", dtype, bits=bits)[1]
        for layer, wide_layer in zip(found.layers, wide.layers, strict=True):
            expected = jax.jit(quantize, static_argnums=1)(wide_layer.key, bits)
            chex.assert_trees_all_equal(layer.key, expected)
            norm = wide_layer.input_norm.astype(dtype)
            chex.assert_trees_all_equal(layer.input_norm, norm)
        chex.assert_trees_all_equal(found.embedding, wide.embedding.astype(dtype))


@pytest.mark.parametrize(("dtype", "bits"), [("bfloat16", None), ("bfloat16", 4)])
def test_a_pair_can_be_converted_to_another_dtype_and_again(
    tiny_pair: Path, tmp_path: Path, dtype: str, bits: int | None
) -> None:
    source, pair = tiny_pair / "target", tmp_path / "pair"
    convert_pair(pair, source, open_head(tiny_pair / "head"), dtype=dtype, bits=bits)
    assert [stored_dtype(pair / half) for half in ("target", "head")] == [dtype] * 2
    config, params = load_target(pair / "target", None)
    chex.assert_trees_all_equal(params, load_target(source, dtype, bits=bits)[1])
    head = load_head(pair / "head", config, params, None)[1]
    expected = load_head(tiny_pair / "head", config, params, dtype)[1]
    chex.assert_trees_all_equal(head, expected)
    convert_pair(tmp_path / "again", pair / "target")
    again = load_target(tmp_path / "again" / "target", None)[1]
    chex.assert_trees_all_equal(again, params)


def test_each_checkpoint_keeps_its_own_dtype(tiny_pair: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(tiny_pair / "target", tmp_path / "source"))
    whole = load_file(source / SINGLE)
    save_file({k: v.astype("float16") for k, v in whole.items()}, source / SINGLE)
    # What config.json claims does not matter, what the files hold does.
    assert stored_dtype(source) == "float32"
    convert_pair(tmp_path / "pair", source, open_head(tiny_pair / "head"))
    assert stored_dtype(tmp_path / "pair" / "target") == "float16"
    assert stored_dtype(tmp_path / "pair" / "head") == "float32"


def test_a_heads_own_table_is_kept_where_it_differs(
    tiny_pair: Path, converted: Path, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(tiny_pair / "head", tmp_path / "source"))
    _change(source, _TABLE, lambda x: x + 1)
    convert_pair(tmp_path / "pair", tiny_pair / "target", open_head(source))
    head = load_head(tmp_path / "pair" / "head", *load_target(converted / "target"))[1]
    np.testing.assert_array_equal(head.embedding, load_file(source / SINGLE)[_TABLE])
    assert _TABLE in load_file(tiny_pair / "head" / SINGLE)
    assert _TABLE not in open_weights(converted / "head").names()


def test_tied_targets_have_no_output_head_either_way(
    tiny_pair: Path, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(tiny_pair / "target", tmp_path / "source"))
    change_config(source, tie_word_embeddings=True)
    convert_pair(tmp_path / "pair", source)
    params = load_target(tmp_path / "pair" / "target")[1]
    assert params.output_head is None
    chex.assert_trees_all_equal(params, load_target(source)[1])


def test_settings_tokenizer_and_draft_vocabulary_come_along(
    tiny_pair: Path, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(tiny_pair, tmp_path / "source"))
    kept = {
        "target/generation_config.json": '{"eos_token_id": [7, 299]}',
        "target/chat_template.jinja": "{{ messages }}",
        "head/draft_vocabulary.json": '{"vocab_size": 300, "ids": [299]}',
    }
    left = {"target/model.safetensors.index.json": "{}", "target/README.md": "unneeded"}
    for name, content in (kept | left).items():
        (source / name).write_text(content)
    convert_pair(tmp_path / "pair", source / "target", open_head(source / "head"))
    found = file_bytes(tmp_path / "pair")
    assert {name: found[name].decode() for name in kept} == kept
    assert left.keys().isdisjoint(found)
    for half in ("target", "head"):
        before = (source / half / "config.json").read_text()
        assert json.loads(found[f"{half}/config.json"]) == json.loads(before)
    folder = tmp_path / "pair" / "target"
    assert stop_tokens(folder) == (7, 299)
    ids = load_tokenizer(folder, 300).encode("the heart")
    assert ids == load_tokenizer(source / "target", 300).encode("the heart")


def test_numbers_are_stored_as_small_as_they_are(
    stored: Path, bits: int | None
) -> None:
    weights, name = open_weights(stored / "target"), "model.layers.0.mlp.up_proj.weight"
    found = [weights.read(key).nbytes for key in weights.names() if name in key]
    rows, columns = 32, 48
    scales = {None: 0, 8: columns * 4, 4: 2 * columns * 4}[bits]
    assert sum(found) == rows * columns * (bits or 32) // 8 + scales


def test_a_large_tensor_is_stored_in_slices(
    tiny_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orbax_store, "_CHUNK_BYTES", 1000)
    monkeypatch.setattr(tensors_module, "_BLOCK_BYTES", 700)
    convert_pair(tmp_path / "pair", tiny_pair / "target")
    with ocp.PyTreeCheckpointer() as checkpointer:
        metadata = checkpointer.metadata(tmp_path / "pair" / "target" / "params")
    entry = metadata.item_metadata.tree["lm_head.weight"]
    assert entry.shape == (300, 32)
    assert np.prod(entry.storage.chunk_shape) <= 1000 // 4
    chex.assert_trees_all_equal(
        load_target(tmp_path / "pair" / "target")[1],
        load_target(tiny_pair / "target")[1],
    )


def _lose(name: str) -> Callable[[Path], object]:
    return lambda folder: shutil.move(folder / "params" / name, folder / "lost")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_lose("d"), ("cannot read",)),
        (_lose("manifest.ocdbt"), ("params", "convert the checkpoint again")),
        (
            lambda folder: change_config(folder, num_hidden_layers=1),
            ("unexpected", "model.layers.1."),
        ),
        (
            lambda folder: change_config(folder, intermediate_size=47),
            ("mlp.gate_proj", "(48, 32)", "(47, 32)"),
        ),
    ],
)
def test_a_store_that_is_none_or_does_not_fit_is_refused(
    converted: Path, tmp_path: Path, change: Callable[[Path], object], named: Any
) -> None:
    folder = Path(shutil.copytree(converted / "target", tmp_path / "target"))
    change_config(folder, max_position_embeddings=64)  # Settings may be edited.
    assert load_target(folder)[0].max_positions == 64
    change(folder)
    refused(lambda: load_target(folder), str(folder), *named)


def _wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64)


@pytest.mark.parametrize(
    ("change", "settings", "named"),
    [
        (_wide, {}, ("float64", "`dtype`")),
        (lambda x: x + np.float32(1e6), {"dtype": "float16"}, (_NORM, "cannot hold")),
    ],
)
def test_weights_that_cannot_be_kept_are_refused(
    tiny_pair: Path, tmp_path: Path, change: Any, settings: Any, named: Any
) -> None:
    source = Path(shutil.copytree(tiny_pair / "target", tmp_path / "source"))
    _change(source, _NORM, change)
    refused(lambda: convert_pair(tmp_path / "pair", source, **settings), *named)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    convert_pair(tmp_path / "pair", source, dtype="float32")


@pytest.mark.parametrize("bits", [8, 4], indirect=True)
def test_other_bits_than_the_stored_ones_are_refused(stored: Path, bits: int) -> None:
    line = refused(
        lambda: load_target(stored / "target", bits=12 - bits),
        str(stored / "target"),
        f"holds int{bits} weights",
        "`quantization`",
    )
    assert f"int{12 - bits}" in line


def test_sizes_that_the_groups_do_not_divide_are_refused(
    tiny_pair: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_pair / "target", tmp_path / "target"))
    change_config(folder, intermediate_size=172)
    named = ("do not divide intermediate_size = 172", "`quantization` int8")
    # Said from the settings alone: the weights do not even fit them.
    refused(lambda: load_target(folder, bits=4), *named)
    refused(lambda: convert_pair(tmp_path / "pair", folder, bits=4), *named)
    assert not (tmp_path / "pair").exists()
    assert target_bits(open_weights(folder), target_config(folder), 8) == 8


def test_a_killed_process_leaves_the_old_pair_and_the_next_one_nothing_else(
    converted: Path, tmp_path: Path
) -> None:
    output = Path(shutil.copytree(converted, tmp_path / "pair"))
    before = file_bytes(output)
    code = f"""
import os, signal
from pathlib import Path
from eagle_jax.checkpoints import convert_pair, orbax_store

orbax_store.write_json = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
source = Path({str(converted)!r})
convert_pair(Path({str(output)!r}), source / "target", overwrite=True)
"""
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=_REPOSITORY, capture_output=True, check=False
    )
    assert process.returncode == -signal.SIGKILL, process.stderr.decode()
    assert file_bytes(output) == before
    assert any(path.is_dir() for path in tmp_path.glob(".pair.*"))
    convert_pair(output, converted / "target", dtype="bfloat16", overwrite=True)
    assert list(tmp_path.iterdir()) == [output]
    assert stored_dtype(output / "target") == "bfloat16"
    assert not (output / "head").exists()


def test_what_orbax_cannot_write_is_told_in_one_line(
    tiny_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise ValueError("RESOURCE_EXHAUSTED: no space left\nand more lines")

    monkeypatch.setattr(ocp.PyTreeCheckpointer, "save", full)
    refused(
        lambda: convert_pair(tmp_path / "pair", tiny_pair / "target"),
        str(tmp_path / "pair"),
        "no space left); is the disk full?",
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", ["", "target"])
def test_a_folder_with_anything_else_is_never_replaced(
    tiny_pair: Path, converted: Path, tmp_path: Path, place: str
) -> None:
    output = Path(shutil.copytree(converted, tmp_path / "pair"))
    (output / place / "notes.txt").write_text("do not lose me")
    refused(
        lambda: convert_pair(output, tiny_pair / "target", overwrite=True),
        str(output),
        "holds something else",
    )
    assert (output / place / "notes.txt").read_text() == "do not lose me"


def test_a_pair_is_not_replaced_by_itself(converted: Path, tmp_path: Path) -> None:
    output = Path(shutil.copytree(converted, tmp_path / "pair"))
    before = file_names(output)
    for target, head in ((output, None), (converted, open_head(output / "head"))):
        refused(
            lambda target=target, head=head: convert_pair(
                output, target / "target", head, overwrite=True
            ),
            str(output),
            "is read from it",
        )
    assert file_names(output) == before
