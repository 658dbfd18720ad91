"""Quantized matrices, and decoding with them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.config import TreeConfig
from eagle_jax.decoding import autoregressive, speculative
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.requests import make_requests
from eagle_jax.interface import Params
from eagle_jax.models.linear import at_once, by_blocks, linear
from eagle_jax.models.quantized import (
    GROUP_SIZE,
    QuantizedMatrix,
    has_groups,
    num_bytes,
    quantize,
    quantize_layers,
    unpack,
)
from eagle_jax.testing import assert_same_tokens
from tests import tiny
from tests.helpers import texts

# Blocks of several groups, of single pairs of them, and fewer rows than a group has;
# then an odd number of groups, cut in two.
_SHAPES = [(512, 96), (384, 4100), (48, 10), (192, 10)]

_quantize = jax.jit(quantize, static_argnums=1)


def _matrix(shape: tuple[int, ...], dtype: str = "float32") -> jax.Array:
    """Columns of very different sizes."""
    rng = np.random.default_rng(sum(shape))
    sizes = 10.0 ** rng.integers(-3, 3, shape[-1])
    return jnp.asarray(rng.normal(size=shape) * sizes, dtype)


def dequantize(weight: QuantizedMatrix) -> jax.Array:
    """The float32 matrix that a quantized one stands for."""
    parts = [values * scales[:, None] for values, scales in unpack(weight)]
    return jnp.stack(parts, axis=1).reshape(weight.shape)


def _steps(weight: QuantizedMatrix) -> np.ndarray:
    """The scale of every weight."""
    rows = weight.shape[0] // weight.scales.shape[0]
    return np.repeat(np.asarray(weight.scales), rows, axis=0)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("shape", _SHAPES)
def test_no_weight_is_off_by_more_than_half_a_step(
    bits: int, shape: tuple[int, int]
) -> None:
    matrix = _matrix(shape)
    weight = _quantize(matrix, bits)
    assert weight.shape == shape
    groups = 1 if bits == 8 else {512: 8, 48: 2}.get(shape[0], 6)
    assert weight.scales.shape == (groups, shape[1])
    # Steps are as large as the largest weight of a group asks for, and no larger.
    largest = jnp.abs(matrix).reshape(groups, -1, shape[1]).max(1)
    np.testing.assert_allclose(
        weight.scales * (2 ** (bits - 1) - 0.5), largest, rtol=1e-6
    )
    error = np.abs(np.asarray(dequantize(weight)) - np.asarray(matrix))
    assert (error <= _steps(weight) * (0.5 + 1e-4)).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_every_integer_and_zero_columns_are_kept(bits: int) -> None:
    limit = 2 ** (bits - 1)
    integers = np.arange(-limit, limit)
    most = limit - 0.5  # The outermost steps stand for half a step more.
    column = np.resize([*np.clip(integers, -most, most), most], 4 * GROUP_SIZE)
    matrix = np.stack([column, np.zeros_like(column)], axis=1).astype(np.float32)
    weight = _quantize(jnp.asarray(matrix), bits)
    steps = np.asarray(weight.scales)
    np.testing.assert_allclose(steps[:, 0], 1, rtol=1e-6)
    np.testing.assert_array_equal(steps[:, 1], 0)
    found = np.asarray(dequantize(weight))
    expected = np.clip(np.round(matrix), -limit, limit - 1)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert set(np.round(found[:, 0])) == set(integers)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("shape", _SHAPES)
def test_products_are_those_of_the_matrix_it_stands_for(
    bits: int, shape: tuple[int, int]
) -> None:
    weight = _quantize(_matrix(shape), bits)
    x = jax.random.normal(jax.random.key(1), (2, 3, shape[0]))
    expected = np.asarray(linear(x, dequantize(weight)))
    bias = jnp.ones(shape[1])
    for found in (
        jax.jit(at_once)(x, weight),
        jax.jit(by_blocks)(x, weight),
        jax.jit(linear)(x, weight, bias) - bias,
    ):
        error = np.abs(np.asarray(found) - expected)
        assert (error <= 1e-5 * np.abs(expected).max(axis=(0, 1))).all()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_products_have_the_dtype_of_the_input(bits: int, dtype: str) -> None:
    matrix = jax.random.normal(jax.random.key(0), (256, 96))
    weight = _quantize(matrix, bits)
    x = jax.random.normal(jax.random.key(1), (5, 256)).astype(dtype)
    expected = np.asarray(linear(x.astype("float32"), dequantize(weight)))
    for product in (linear, at_once):
        found = jax.jit(product)(x, weight)
        assert found.dtype == (dtype if product is linear else "float32")
        error = np.abs(np.asarray(found, "float32") - expected)
        assert error.max() < 0.01 * np.abs(expected).max()


def test_blocks_are_read_in_a_loop() -> None:
    weight = jax.eval_shape(lambda w: quantize(w, 8), _matrix((512, 512)))
    x = jax.ShapeDtypeStruct((1, 512), jnp.float32)
    compiled = jax.jit(by_blocks).lower(x, weight).compile()
    assert "while" in str(compiled.as_text())
    memory: Any = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < 512 * 512


@pytest.mark.parametrize(
    ("rows", "fits"),
    [(128, True), (11008, True), (172, False), (192, True), (48, True), (33, False)],
)
def test_four_bits_need_pairs_of_groups(rows: int, fits: bool) -> None:
    assert has_groups(rows, 4) == fits
    assert has_groups(rows, 8)


_CONFIGS = {
    "dense": tiny.target_config(num_layers=1, qkv_bias=True, qk_norm=True),
    "mixture": tiny.target_config(num_layers=1, num_experts=4, experts_per_token=2),
    "gpt-oss": tiny.target_config(**tiny.GPT_OSS),
    "gemma": tiny.target_config(
        qkv_bias=True, output_bias=True, output_norms=True, norm_offset=True
    ),
}


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("family", _CONFIGS)
def test_only_the_matrices_of_layers_are_quantized(family: str, bits: int) -> None:
    params = tiny.target_params(_CONFIGS[family])
    found = jax.eval_shape(lambda params: quantize_layers(params, bits), params)
    is_matrix = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(
        found, is_leaf=lambda leaf: isinstance(leaf, QuantizedMatrix)
    ):
        name = path[-1].name
        is_matrix.setdefault(name, isinstance(leaf, QuantizedMatrix))
    matrices = {name for name, is_quantized in is_matrix.items() if is_quantized}
    assert matrices == {"query", "key", "value", "output", "gate", "up", "down"}
    assert {"embedding", "output_head", "norm", "mlp_norm"} <= is_matrix.keys()
    assert ("router" if family == "mixture" else "query_bias") in is_matrix


@pytest.mark.parametrize("bits", [8, 4])
def test_memory_is_as_predicted(bits: int) -> None:
    params = tiny.target_params(_CONFIGS["dense"])
    layer = tiny.LAYER
    e, f, kv = layer.hidden_size, layer.intermediate_size, 2 * layer.head_dim
    shapes = [*([(e, e)] * 2), *([(e, kv)] * 2), *([(e, f)] * 2), (f, e)]
    weights = sum(rows * columns for rows, columns in shapes)
    scales = (1 if bits == 8 else 2) * sum(columns for _, columns in shapes)
    quantized = jax.eval_shape(lambda params: quantize_layers(params, bits), params)
    saved = num_bytes(params) - num_bytes(quantized)
    assert saved == 4 * weights - (weights * bits // 8 + 4 * scales)


@pytest.mark.parametrize(("family", "bits"), [("mixture", 8), ("gpt-oss", 4)])
def test_drafting_for_a_quantized_target_gives_its_own_text(
    family: str, bits: int
) -> None:
    tree = TreeConfig(num_nodes=24, depth=2, width=16)
    target, drafter, wide = tiny.pair(_CONFIGS[family], tiny.HEAD, tree)
    params = jax.jit(quantize_layers, static_argnums=1)(wide.target, bits)
    # Greedy and drawn rows side by side.
    requests = make_requests(
        [[3, 1, 4], [1], [3, 1, 4], [9, 9]],
        max_new_tokens=20,
        temperature=[0.0, 0.0, 1.0, 1.0],
        seeds=[0, 1, 2, 3],
    )
    both = Params(target=params, drafter=wide.drafter)
    decoder = Decoder(target=target, drafter=drafter)
    state = speculative.generate(decoder, both, requests)
    plain = autoregressive.generate(decoder, both, requests)
    assert_same_tokens(texts(requests, state), texts(requests, plain))
    assert int(state.accept_lengths.sum()) > 0
