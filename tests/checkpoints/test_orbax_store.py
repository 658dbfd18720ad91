import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import load_file, save_file

from eagle_jax.checkpoints import (
    convert_pair,
    load_head,
    load_target,
    open_weights,
    orbax_store,
    stop_tokens,
    stored_dtype,
)
from eagle_jax.config import TreeConfig
from eagle_jax.generation.pairs import open_pair
from eagle_jax.generation.tokenizer import load_tokenizer
from tests.checkpoints.folders import change_config
from tests.helpers import file_names, refused, settings_of

_REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def target(converted: Path, tmp_path: Path) -> Path:
    """A copy of the converted target to break."""
    return Path(shutil.copytree(converted / "target", tmp_path / "target"))


def _change(folder: Path, name: str, change: Callable[[np.ndarray], Any]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors[name] = change(tensors[name])
    save_file(tensors, path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_converted_pair_loads_bit_for_bit(
    tiny_pair: Path, converted: Path, dtype: str
) -> None:
    config, params = load_target(tiny_pair / "target", dtype)
    same_config, same = load_target(converted / "target", dtype)
    assert same_config == config
    chex.assert_trees_all_equal(same, params)
    head, head_params = load_head(tiny_pair / "head", config, params, dtype)
    same_head, same_params = load_head(converted / "head", config, same, dtype)
    assert same_head == head
    chex.assert_trees_all_equal(same_params, head_params)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves((same, same_params))} == {dtype}
    # What is uncommitted follows what it is used with, as from other folders.
    assert not any(leaf.committed for leaf in jax.tree.leaves((same, same_params)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_pair_can_be_converted_to_another_dtype(
    tiny_pair: Path, tmp_path: Path, dtype: str
) -> None:
    source = tiny_pair / "target"
    convert_pair(tmp_path / "pair", source, tiny_pair / "head", dtype=dtype)
    for half in ("target", "head"):
        assert stored_dtype(tmp_path / "pair" / half) == dtype
    config, params = load_target(tmp_path / "pair" / "target", None)
    chex.assert_trees_all_equal(params, load_target(source, dtype)[1])
    head = load_head(tmp_path / "pair" / "head", config, params, None)[1]
    expected = load_head(tiny_pair / "head", config, params, dtype)[1]
    chex.assert_trees_all_equal(head, expected)


def test_each_checkpoint_keeps_its_own_dtype(tiny_pair: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(tiny_pair / "target", tmp_path / "source"))
    path = source / "model.safetensors"
    save_file({k: v.astype("float16") for k, v in load_file(path).items()}, path)
    # What config.json claims does not matter, what the files hold does.
    assert stored_dtype(source) == "float32"
    convert_pair(tmp_path / "pair", source, tiny_pair / "head")
    assert stored_dtype(tmp_path / "pair" / "target") == "float16"
    assert stored_dtype(tmp_path / "pair" / "head") == "float32"
    chex.assert_trees_all_equal(
        load_target(tmp_path / "pair" / "target", None)[1],
        load_target(source, "float16")[1],
    )


def test_a_dtype_that_jax_would_narrow_is_refused(
    tiny_pair: Path, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(tiny_pair / "target", tmp_path / "source"))
    _change(source, "model.norm.weight", lambda x: x.astype(np.float64))
    refused(
        lambda: convert_pair(tmp_path / "pair", source),
        str(source),
        "float64",
        "`dtype`",
    )
    convert_pair(tmp_path / "pair", source, dtype="float32")


def test_values_that_the_dtype_cannot_hold_are_refused(
    tiny_pair: Path, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(tiny_pair / "target", tmp_path / "source"))
    _change(source, "model.norm.weight", lambda x: x + np.float32(1e6))
    refused(
        lambda: convert_pair(tmp_path / "pair", source, dtype="float16"),
        "model.norm.weight",
        "float16 cannot hold",
    )
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_heads_own_table_is_kept_where_it_differs(
    tiny_pair: Path, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(tiny_pair / "head", tmp_path / "source"))
    _change(source, "embed_tokens.weight", lambda x: x + 1)
    convert_pair(tmp_path / "pair", tiny_pair / "target", source)
    config, params = load_target(tmp_path / "pair" / "target")
    head = load_head(tmp_path / "pair" / "head", config, params)[1]
    np.testing.assert_array_equal(
        head.embedding, load_file(source / "model.safetensors")["embed_tokens.weight"]
    )


def test_a_table_equal_to_the_targets_is_stored_once(
    tiny_pair: Path, converted: Path
) -> None:
    config, params = load_target(converted / "target")
    assert load_head(converted / "head", config, params)[1].embedding is None
    assert "embed_tokens.weight" not in open_weights(converted / "head").names()
    assert "embed_tokens.weight" in load_file(tiny_pair / "head" / "model.safetensors")


def test_tied_targets_have_no_output_head_either_way(
    tiny_pair: Path, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(tiny_pair / "target", tmp_path / "source"))
    change_config(source, tie_word_embeddings=True)
    convert_pair(tmp_path / "pair", source)
    params = load_target(tmp_path / "pair" / "target")[1]
    assert params.output_head is None
    chex.assert_trees_all_equal(params, load_target(source)[1])


def test_a_converted_pair_can_be_converted_again(
    converted: Path, tmp_path: Path
) -> None:
    convert_pair(tmp_path / "pair", converted / "target", converted / "head")
    chex.assert_trees_all_equal(
        load_target(tmp_path / "pair" / "target")[1],
        load_target(converted / "target")[1],
    )


def test_tokenizer_and_stop_tokens_come_along(tiny_pair: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(tiny_pair / "target", tmp_path / "source"))
    (source / "generation_config.json").write_text('{"eos_token_id": [7, 299]}')
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "model.safetensors.index.json").write_text("{}")
    (source / "README.md").write_text("not needed")
    convert_pair(tmp_path / "pair", source)
    folder = tmp_path / "pair" / "target"
    assert [name for name in file_names(folder) if "/" not in name] == [
        *("chat_template.jinja", "config.json", "generation_config.json"),
        *("store.json", "tokenizer.json", "tokenizer_config.json"),
    ]
    assert stop_tokens(folder) == (7, 299)
    ids = load_tokenizer(folder, 300).encode("the heart")
    assert ids == load_tokenizer(source, 300).encode("the heart")


def test_a_converted_head_drafts_with_the_same_tokens(
    tiny_pair: Path, tmp_path: Path
) -> None:
    target, head = tiny_pair / "target", tmp_path / "head"
    shutil.copytree(tiny_pair / "head", head)
    ids = {"vocab_size": 300, "ids": [299, *range(40)]}
    (head / "draft_vocabulary.json").write_text(json.dumps(ids))
    convert_pair(tmp_path / "pair", target, head)
    tree = TreeConfig(num_nodes=4, depth=2, width=2)
    for folder in (head, tmp_path / "pair" / "head"):
        source = open_pair(str(target), str(folder), settings_of(tree))
        assert source.draft is not None and source.draft.tokens == (*range(40), 299)


def test_settings_are_kept(tiny_pair: Path, converted: Path) -> None:
    for half in ("target", "head"):
        before, after = (
            json.loads((folder / half / "config.json").read_text())
            for folder in (tiny_pair, converted)
        )
        assert after == before


@pytest.mark.parametrize("lost", ["d", "manifest.ocdbt"])
def test_what_orbax_cannot_read_is_told_in_one_line(target: Path, lost: str) -> None:
    path = target / "params" / lost
    path.unlink() if path.is_file() else shutil.rmtree(path)
    refused(lambda: load_target(target), str(target), "convert the checkpoint again")


@pytest.mark.parametrize(
    "fields",
    [
        {"bits": 2},
        {"tensors": None},
        {"tensors": {"model.norm.weight": 3}},
        {"tensors": {"model.norm.weight": {"dtype": 3}}},
    ],
)
def test_a_list_that_is_none_is_refused(target: Path, fields: dict[str, Any]) -> None:
    path = target / "store.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    refused(lambda: open_weights(target), str(path), "convert")
    path.unlink()
    refused(lambda: open_weights(target), str(path))


def test_weights_that_do_not_fit_the_settings_are_named(target: Path) -> None:
    change_config(target, num_hidden_layers=1)
    refused(lambda: load_target(target), "unexpected", "model.layers.1.")
    change_config(target, num_hidden_layers=2, intermediate_size=47)
    refused(lambda: load_target(target), "mlp.gate_proj", "(48, 32)", "(47, 32)")


def test_settings_may_be_edited(target: Path) -> None:
    change_config(target, max_position_embeddings=64)
    assert load_target(target)[0].max_positions == 64


_SHARDED = """
import sys
from pathlib import Path

import chex
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from eagle_jax.checkpoints import load_head, load_target

assert len(jax.devices()) == 8
mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
rows = NamedSharding(mesh, PartitionSpec("model"))
everywhere = NamedSharding(mesh, PartitionSpec())


def choose(leaf):
    return rows if leaf.shape[0] % 4 == 0 and leaf.ndim == 2 else everywhere


for folder in map(Path, sys.argv[1:]):
    config, params = load_target(folder / "target")
    head, head_params = load_head(folder / "head", config, params)
    assert all(len(x.sharding.device_set) == 1 for x in jax.tree.leaves(params))
    for shardings in (everywhere, jax.tree.map(choose, params)):
        _, sharded = load_target(folder / "target", shardings=shardings)
        chex.assert_trees_all_equal(sharded, params)
        wanted = shardings
        if wanted is everywhere:
            wanted = jax.tree.map(lambda _: everywhere, params)
        for x, sharding in zip(jax.tree.leaves(sharded), jax.tree.leaves(wanted)):
            assert x.sharding == sharding
    assert sharded.layers[0].mlp.up.addressable_shards[0].data.shape == (8, 48)
    # The second head has a table that its shardings do not name.
    for name in ("head", "own"):
        _, one = load_head(folder / name, config, params)
        spread = jax.tree.map(choose, head_params)
        _, sharded_head = load_head(folder / name, config, sharded, "float32", spread)
        assert (name == "own") == (sharded_head.embedding is not None)
        chex.assert_trees_all_equal(sharded_head, one)
        assert sharded_head.fc.sharding == rows
    assert sharded_head.embedding.sharding == sharded.embedding.sharding
print("equal")
"""


def test_sharded_weights_equal_those_on_one_device(
    tiny_pair: Path, converted: Path, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(tiny_pair, tmp_path / "source"))
    stored = Path(shutil.copytree(converted, tmp_path / "stored"))
    shutil.copytree(source / "head", source / "own")
    _change(source / "own", "embed_tokens.weight", lambda x: x + 1)
    convert_pair(tmp_path / "other", source / "target", source / "own")
    shutil.copytree(tmp_path / "other" / "head", stored / "own")
    flags = os.environ.get("XLA_FLAGS", "")
    devices = f"{flags} --xla_force_host_platform_device_count=8"
    process = subprocess.run(
        [sys.executable, "-c", _SHARDED, str(source), str(stored)],
        cwd=_REPOSITORY,
        env=os.environ | {"XLA_FLAGS": devices, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.stdout == "equal\n", process.stderr


def test_large_tensors_are_stored_in_slices(
    tiny_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orbax_store, "_CHUNK_BYTES", 1000)
    convert_pair(tmp_path / "pair", tiny_pair / "target")
    with ocp.PyTreeCheckpointer() as checkpointer:
        metadata = checkpointer.metadata(tmp_path / "pair" / "target" / "params")
    entry = metadata.item_metadata.tree["lm_head.weight"]
    assert entry.shape == (300, 32)
    assert np.prod(entry.storage.chunk_shape) <= 1000 // jnp.float32.dtype.itemsize
    chex.assert_trees_all_equal(
        load_target(tmp_path / "pair" / "target")[1],
        load_target(tiny_pair / "target")[1],
    )
