"""Joined products give what the checkpoint's own matrices give."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.models.cache import KeyValues
from eagle_jax.models.joined import join_products
from eagle_jax.models.layers import (
    AttentionContext,
    LayerParams,
    decoder_layer,
    init_layer,
)
from eagle_jax.models.quantized import quantize_layers
from eagle_jax.models.rope import rotary_tables
from eagle_jax.models.transformer import Transformer, TransformerConfig
from tests import tiny


def outputs(config: TransformerConfig, params: Any) -> Any:
    model = Transformer(config=config)
    tokens = jnp.arange(6).reshape(2, 3)
    positions = jnp.broadcast_to(jnp.arange(3), tokens.shape)
    run = jax.jit(model.forward)
    return run(params, tokens, positions, None, model.init_cache(2, 4))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_kv_heads": 4},
        {"num_kv_heads": 1, "qk_norm": True, "head_dim": 12},
        {"qkv_bias": True, "output_bias": True},
        {"num_experts": 4, "experts_per_token": 2},
        tiny.GPT_OSS,
    ],
)
def test_a_joined_model_computes_the_same(changes: dict[str, Any]) -> None:
    config = tiny.target_config(**changes)
    params = tiny.random_target(config)
    joined = join_products(params)
    assert joined.layers[0].key is None and joined.layers[0].value is None
    arrays = [leaf.size for leaf in jax.tree.leaves(params)]
    assert sum(leaf.size for leaf in jax.tree.leaves(joined)) == sum(arrays)
    assert len(jax.tree.leaves(joined)) < len(arrays)
    for one, other in zip(
        jax.tree.leaves(outputs(config, joined)),
        jax.tree.leaves(outputs(config, params)),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


def test_the_layer_of_an_eagle3_head_may_be_joined() -> None:
    width = tiny.LAYER.hidden_size
    layer = init_layer(
        jax.random.key(0),
        tiny.LAYER,
        jnp.float32,
        input_norm=False,
        input_size=2 * width,
    )
    x, inputs = (
        jax.random.normal(jax.random.key(n), (1, 2, n * width)) for n in (1, 2)
    )
    rotary = rotary_tables(jnp.arange(2)[None], tiny.LAYER.rope, tiny.LAYER.head_dim)
    empty = jnp.zeros((1, tiny.LAYER.num_kv_heads, 0, tiny.LAYER.head_dim))
    cached = KeyValues(keys=empty, values=empty)

    def run(layer: LayerParams) -> jax.Array:
        mask, length = jnp.tri(2, dtype=bool)[None], jnp.zeros(1, jnp.int32)
        context = AttentionContext(cached=cached, length=length, mask=mask)
        return decoder_layer(layer, tiny.LAYER, x, rotary, context, inputs=inputs)[0]

    np.testing.assert_allclose(run(join_products(layer)), run(layer), rtol=1e-5)


@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_matrices_stay_apart(bits: int) -> None:
    params = quantize_layers(tiny.random_target(), bits)
    joined = join_products(params)
    assert jax.tree.structure(joined) == jax.tree.structure(params)


def test_donated_matrices_are_gone_and_all_others_are_kept() -> None:
    params = tiny.random_target()
    joined = join_products(params, donate=True)
    gone = {
        jax.tree_util.keystr(path).rsplit(".", 1)[-1]
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        if leaf.is_deleted()
    }
    assert gone == {"query", "key", "value", "gate", "up"}
    kept = join_products(tiny.random_target())
    jax.tree.map(np.testing.assert_array_equal, joined, kept)
