"""Quantized targets: made as they are read, or stored."""

import json
import shutil
from pathlib import Path

import chex
import jax
import pytest

from eagle_jax.checkpoints import (
    convert_pair,
    load_head,
    load_target,
    open_weights,
    stored_dtype,
    target_bits,
    target_config,
)
from eagle_jax.models.quantized import bits_of, quantize
from tests.helpers import refused


@pytest.fixture(scope="module", params=[8, 4])
def bits(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module")
def stored(
    tiny_pair: Path, tmp_path_factory: pytest.TempPathFactory, bits: int
) -> Path:
    """The tiny pair, converted with a quantized target; copy before changing."""
    output = tmp_path_factory.mktemp("quantized") / "pair"
    convert_pair(output, tiny_pair / "target", tiny_pair / "head", bits=bits)
    return output


def test_matrices_are_quantized_as_they_are_read(tiny_pair: Path, bits: int) -> None:
    wide = load_target(tiny_pair / "target")[1]
    found = load_target(tiny_pair / "target", bits=bits)[1]
    assert bits_of(found) == bits
    for layer, wide_layer in zip(found.layers, wide.layers, strict=True):
        expected = jax.jit(quantize, static_argnums=1)(wide_layer.key, bits)
        chex.assert_trees_all_equal(layer.key, expected)
        chex.assert_trees_all_equal(layer.input_norm, wide_layer.input_norm)
    chex.assert_trees_all_equal(found.embedding, wide.embedding)
    chex.assert_trees_all_equal(found.output_head, wide.output_head)
    # What is uncommitted follows what it is used with.
    assert not any(leaf.committed for leaf in jax.tree.leaves(found))


def test_a_quantized_store_loads_bit_for_bit(
    tiny_pair: Path, stored: Path, bits: int
) -> None:
    for given in (None, bits):
        config, params = load_target(stored / "target", bits=given)
        expected = load_target(tiny_pair / "target", bits=bits)
        assert config == expected[0]
        chex.assert_trees_all_equal(params, expected[1])
    head = load_head(stored / "head", config, params)[1]
    same = load_head(tiny_pair / "head", config, params)[1]
    chex.assert_trees_all_equal(head, same)
    assert bits_of(head) is None


def test_integers_do_not_depend_on_the_dtype_of_the_rest(
    stored: Path, bits: int, tiny_pair: Path
) -> None:
    params = load_target(stored / "target", "bfloat16")[1]
    chex.assert_trees_all_equal(
        params, load_target(tiny_pair / "target", "bfloat16", bits=bits)[1]
    )
    kinds = {str(leaf.dtype) for leaf in jax.tree.leaves(params)}
    assert kinds == {"bfloat16", "int8", "float32"}
    chex.assert_trees_all_equal(
        params.layers[0].query, load_target(stored / "target")[1].layers[0].query
    )


def test_a_quantized_store_keeps_the_dtype_of_the_rest(
    tiny_pair: Path, tmp_path: Path, bits: int
) -> None:
    convert_pair(tmp_path / "pair", tiny_pair / "target", dtype="bfloat16", bits=bits)
    folder = tmp_path / "pair" / "target"
    assert stored_dtype(folder) == "bfloat16"
    assert load_target(folder, None)[1].embedding.dtype == "bfloat16"
    # Converted again, it stays what it is.
    convert_pair(tmp_path / "again", folder)
    chex.assert_trees_all_equal(
        load_target(tmp_path / "again" / "target", None)[1],
        load_target(folder, None)[1],
    )


def test_other_bits_than_the_stored_ones_are_refused(stored: Path, bits: int) -> None:
    other = 12 - bits
    line = refused(
        lambda: load_target(stored / "target", bits=other),
        f"holds int{bits} weights",
        f"int{other}",
        "`quantization`",
    )
    assert str(stored / "target") in line


def test_sizes_that_the_groups_do_not_divide_are_refused(
    tiny_pair: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_pair / "target", tmp_path / "target"))
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(settings | {"intermediate_size": 172})
    )
    named = (
        "model.layers.0.mlp.down_proj.weight has 172 inputs",
        "`quantization` int8",
    )
    # Said from the settings alone: the weights do not even fit them.
    refused(lambda: load_target(folder, bits=4), *named)
    refused(lambda: convert_pair(tmp_path / "pair", folder, bits=4), *named)
    assert not (tmp_path / "pair").exists()
    assert target_bits(open_weights(folder), target_config(folder), 8) == 8


def test_numbers_are_stored_as_small_as_they_are(
    stored: Path, converted: Path, bits: int
) -> None:
    def size(pair: Path, name: str) -> int:
        files = open_weights(pair / "target")
        keys = [key for key in files.names() if key.startswith(name)]
        return sum(files.read(key).nbytes for key in keys)

    name = "model.layers.0.mlp.up_proj.weight"
    groups = 1 if bits == 8 else 2
    rows, columns = 32, 48
    assert size(converted, name) == rows * columns * 4
    assert size(stored, name) == rows * columns * bits // 8 + groups * columns * 4
