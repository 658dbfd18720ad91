from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.models.rope import (
    RopeConfig,
    inverse_frequencies,
    rotary_tables,
    rotate,
)
from eagle_jax.models.transformer import Transformer
from tests import tiny

# What each kind reads of what we call as transformers does, but for one name.
_READ = {
    "default": "",
    "linear": "factor",
    "llama3": "factor original_max_positions low_freq_factor high_freq_factor",
    "yarn": "factor original_max_positions beta_slow beta_fast truncate",
}


@pytest.mark.torch
@pytest.mark.parametrize("head_dim", [8, 64, 128])
@pytest.mark.parametrize(
    "ours",
    [
        RopeConfig(theta=10000.0),
        RopeConfig(theta=10000.0, kind="linear", factor=4.0),
        tiny.LLAMA3_ROPE,
        RopeConfig(theta=5e5, kind="llama3", factor=32.0),
        RopeConfig(theta=1e6, kind="yarn", factor=4.0, original_max_positions=32768),
        RopeConfig(
            theta=150000.0,
            kind="yarn",
            factor=32.0,
            original_max_positions=4096,
            beta_slow=2.0,
            beta_fast=16.0,
            truncate=False,
        ),
    ],
)
def test_inverse_frequencies_are_those_of_transformers(
    ours: RopeConfig, head_dim: int
) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    theirs: dict[str, Any] = {
        name.replace("_positions", "_position_embeddings"): getattr(ours, name)
        for name in _READ[ours.kind].split()
    }
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        num_key_value_heads=4,
        rope_parameters=theirs | {"rope_type": ours.kind, "rope_theta": ours.theta},
    )
    wanted = LlamaRotaryEmbedding(config).get_buffer("inv_freq").numpy()
    found = inverse_frequencies(ours, head_dim)
    assert found.dtype == np.float32
    tolerance = 3e-6 if ours.kind == "yarn" else 1e-6  # Theirs is made in float32.
    np.testing.assert_allclose(found, wanted, rtol=tolerance)
    if ours.kind in ("default", "linear"):  # To the bit, but where powers round apart.
        assert (found == wanted).mean() > 0.9


def test_scaling_by_one_changes_nothing() -> None:
    plain = inverse_frequencies(RopeConfig(theta=10000.0), 64)
    linear = inverse_frequencies(RopeConfig(theta=10000.0, kind="linear"), 64)
    llama3 = inverse_frequencies(RopeConfig(theta=10000.0, kind="llama3"), 64)
    np.testing.assert_array_equal(linear, plain)
    np.testing.assert_allclose(llama3, plain, rtol=1e-6)


def test_products_of_rotated_vectors_depend_on_their_distance_only() -> None:
    rng = np.random.default_rng(0)
    query, key = rng.normal(size=(2, 1, 1, 1, 16)).astype(np.float32)
    config = RopeConfig(theta=10000.0)

    def product(query_position: int, key_position: int) -> float:
        turned = [
            rotate(jnp.asarray(x), rotary_tables(jnp.full((1, 1), p), config, 16))
            for x, p in ((query, query_position), (key, key_position))
        ]
        return float((turned[0] * turned[1]).sum())

    assert product(7, 3) == pytest.approx(product(4, 0), abs=1e-4)
    assert product(3, 3) == pytest.approx(float((query * key).sum()), abs=1e-4)
    assert product(7, 3) != pytest.approx(product(3, 7), abs=1e-2)


def test_neighbouring_positions_stay_apart_in_half_precision() -> None:
    x = jnp.ones((1, 2, 1, 64), jnp.bfloat16)
    tables = rotary_tables(jnp.array([[2048, 2049]]), RopeConfig(theta=10000.0), 64)
    turned = rotate(x, tables)
    assert turned.dtype == jnp.bfloat16
    assert float(jnp.abs(turned[0, 0] - turned[0, 1]).max()) > 0.5


@pytest.mark.parametrize("num_tokens", [1, 60])
def test_cosines_are_computed_once_for_all_layers(num_tokens: int) -> None:
    config = tiny.target_config(num_layers=4)
    target, params = Transformer(config=config), tiny.target_params(config)
    tokens = jnp.zeros((1, num_tokens), jnp.int32)

    def run(start: jax.Array) -> jax.Array:
        positions = start + jnp.arange(num_tokens)[None]
        cache = target.init_cache(1, 64)
        return target.forward(params, tokens, positions, None, cache).hidden

    program = jax.jit(run).lower(jnp.int32(0)).compile().as_text() or ""
    assert program.count(" cosine(") == program.count(" sine(") == 1
