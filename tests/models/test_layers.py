"""Norm, attention and the layer against NumPy, written from their formulas."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.models import attention
from eagle_jax.models.attention import attend
from eagle_jax.models.cache import KeyValues
from eagle_jax.models.layers import (
    AttentionContext,
    LayerParams,
    decoder_layer,
    init_layer,
    rms_norm,
)
from eagle_jax.models.rope import rotary_tables, rotate
from tests import tiny

B, T, H, G, A, S = 2, 3, 4, 2, 8, 6
LENGTHS = np.array([5, 0])  # Of the second row nothing is cached.


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def norm(x: np.ndarray, weight: Any, epsilon: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * np.asarray(weight)


def softmax(x: np.ndarray) -> np.ndarray:
    shares = np.exp(x - x.max())
    return shares / shares.sum()


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_the_norm_divides_by_the_root_mean_square(scale: float) -> None:
    x, weight = scale * drawn(B, T, 32), drawn(32)
    wanted = norm(x.astype(np.float64), weight, 1e-5)
    found = rms_norm(jnp.array(x), jnp.array(weight), 1e-5)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_the_norm_is_computed_in_float32_and_keeps_the_dtype() -> None:
    x = jnp.array(300 * drawn(B, 32), jnp.float16)  # Its squares are none of float16.
    found = rms_norm(x, jnp.ones(32, jnp.float16), 1e-5)
    assert found.dtype == jnp.float16
    wanted = norm(np.asarray(x, np.float32), np.ones(32), 1e-5)
    np.testing.assert_allclose(np.asarray(found, np.float32), wanted, rtol=2e-3)


def judge(
    query: np.ndarray,
    cached: KeyValues,
    new: KeyValues,
    mask: np.ndarray,
    first: np.ndarray | None,
    scale: float = A**-0.5,
    cap: float = np.inf,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """One query and one head at a time, over the keys that it sees alone."""
    found = np.zeros((B, T, H, A))
    for row, place, head in np.ndindex(B, T, H):
        group = head // (H // G)
        start = 0 if first is None else first[row, place]
        slots = range(start, LENGTHS[row])
        seen = np.flatnonzero(mask[row, place])
        keys, values = (
            np.concatenate(
                [
                    getattr(cached, name)[row, group, list(slots)].reshape(-1, A),
                    getattr(new, name)[row, group, seen],
                ]
            )
            for name in ("keys", "values")
        )
        scores = keys @ query[row, place, head] * scale
        scores = scores if cap == np.inf else np.tanh(scores / cap) * cap
        if sinks is not None:  # A key that all see, whose value is zero.
            scores = np.append(scores, sinks[head])
            values = np.append(values, np.zeros((1, A)), axis=0)
        found[row, place, head] = softmax(scores) @ values
    return found.reshape(B, T, H * A)


def key_values(num_slots: int, seed: int) -> KeyValues:
    keys, values = drawn(2, B, G, num_slots, A, seed=seed)
    return KeyValues(keys=keys, values=values)


CAUSAL = np.tri(T, dtype=bool)
SIBLINGS = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], bool)
AFTER_TWO = np.concatenate([np.ones((T, 2), bool), CAUSAL], axis=1)


@pytest.mark.parametrize("mask", [CAUSAL, SIBLINGS, np.eye(T, dtype=bool), AFTER_TWO])
@pytest.mark.parametrize(
    "window", [None, [[1, 2, 4], [0, 0, 0]], [[1, 2, 4], [1, 1, 3]]]
)
# Of blocks of 4 the second reaches back into the first.
@pytest.mark.parametrize("block", [1, 2, 4, S, 512])
def test_attention_is_one_softmax_over_the_cache_and_the_mask(
    mask: np.ndarray, window: Any, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("BLOCK", "CPU_BLOCK"):
        monkeypatch.setattr(attention, name, block)
    query, masks = drawn(B, T, H, A), np.stack([mask, mask])
    cached, new = key_values(S, 1), key_values(mask.shape[1], 2)
    first = window and np.array(window)
    arrays = jax.tree.map(jnp.array, (query, cached, LENGTHS, new, masks, first))
    found = jax.jit(lambda *arrays: attend(*arrays))(*arrays)  # Not cached.
    np.testing.assert_allclose(
        found, judge(query, cached, new, masks, first), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("block", [1, 4, 512])
@pytest.mark.parametrize(
    "how",
    [{"scale": 0.9, "cap": 0.7}, {"sinks": np.linspace(-9, 9, H, dtype=np.float32)}],
    ids=["scale and cap", "sinks"],
)
def test_scores_have_a_scale_and_a_cap_and_sinks_take_their_share(
    block: int, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("BLOCK", "CPU_BLOCK"):
        monkeypatch.setattr(attention, name, block)
    query, masks = drawn(B, T, H, A), np.stack([CAUSAL, SIBLINGS])
    cached, new = key_values(S, 1), key_values(T, 2)
    first = np.array([[1, 2, 4], [0, 0, 0]])
    arrays = jax.tree.map(jnp.array, (query, cached, LENGTHS, new, masks, first))
    found = jax.jit(lambda *arrays: attend(*arrays, **how))(*arrays)
    wanted = judge(query, cached, new, masks, first, **how)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("count, keys, products", [(1, 64, 1), (3, 64, 3), (3, 63, 1)])
def test_few_queries_are_scored_one_at_a_time_to_the_same(
    count: int, keys: int, products: int
) -> None:
    rows, segment = drawn(B, G, count, A), drawn(B, G, keys, A, seed=1)
    scored = jax.jit(attention._score).lower(rows, segment).compile()
    assert str(scored.as_text()).count(" dot(") == products
    wanted = np.einsum("bgma,bgsa->bgms", rows, segment)
    np.testing.assert_allclose(scored(rows, segment), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "rows, tokens, slots, block",
    [
        (1, 1, 768, 256),
        (16, 8, 768, 128),
        (64, 1, 512, 64),
        (64, 1, 768, 64),
        (999, 1, 768, 32),
        (64, 60, 768, 256),
    ],
)
def test_cpus_read_of_many_rows_what_they_keep_at_hand(
    rows: int, tokens: int, slots: int, block: int
) -> None:
    def attended() -> jax.Array:
        cached, new = (
            KeyValues(keys=zeros, values=zeros)
            for zeros in (jnp.zeros((rows, 3, size, 64)) for size in (slots, tokens))
        )
        mask = jnp.ones((rows, tokens, tokens), bool)
        lengths = jnp.zeros(rows, jnp.int32)
        return attend(jnp.zeros((rows, tokens, 9, 64)), cached, lengths, new, mask)

    text = jax.jit(attended).lower().as_text()
    read = re.findall(r"dynamic_slice.*-> tensor<\d+x3x(\d+)x64xf32>", text)
    assert read == [str(block)] * 2


def test_slots_after_the_length_are_never_read() -> None:
    query, mask = drawn(B, T, H, A), np.stack([CAUSAL, SIBLINGS])
    cached, new = key_values(S, 1), key_values(T, 2)
    garbage = np.arange(S) >= LENGTHS[:, None]
    other = jax.tree.map(lambda x: np.where(garbage[:, None, :, None], 1e30, x), cached)
    found = [
        attend(*jax.tree.map(jnp.array, (query, slots, LENGTHS, new, mask)))
        for slots in (cached, other)
    ]
    np.testing.assert_array_equal(found[0], found[1])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_attention_keeps_the_dtype(dtype: str) -> None:
    query, mask = drawn(B, T, H, A), np.stack([CAUSAL, CAUSAL])
    cached, new = key_values(S, 1), key_values(T, 2)
    half = jax.tree.map(lambda x: jnp.array(x, dtype), (query, cached, new))
    found = attend(half[0], half[1], jnp.array(LENGTHS), half[2], jnp.array(mask))
    assert found.dtype == dtype
    wanted = judge(query, cached, new, mask, None)
    np.testing.assert_allclose(np.asarray(found, np.float32), wanted, atol=0.05)


def layer_judge(
    params: LayerParams, x: np.ndarray, cached: KeyValues, rotary: Any
) -> np.ndarray:
    """The layer over new tokens in causal order, from its parts."""
    weights = jax.tree.map(np.asarray, params)
    eps = tiny.LAYER.rms_norm_eps
    read = x if weights.input_norm is None else norm(x, weights.input_norm, eps)

    def heads(name: str) -> np.ndarray:
        bias = getattr(weights, f"{name}_bias")
        flat = read @ getattr(weights, name) + (0 if bias is None else bias)
        split = flat.reshape(B, T, -1, A)
        own = getattr(weights, f"{name}_norm", None)
        return split if own is None else norm(split, own, eps)

    turned = [rotate(jnp.array(heads(name)), rotary) for name in ("query", "key")]
    query, key = map(np.asarray, turned)
    values: Any = heads("value").swapaxes(1, 2)
    keys: Any = key.swapaxes(1, 2)
    new = KeyValues(keys=keys, values=values)
    masks, sinks = np.stack([CAUSAL] * B), weights.sinks
    mixed = judge(query, cached, new, masks, None, sinks=sinks)
    x = x + mixed @ weights.output
    x = x if weights.out_bias is None else x + weights.out_bias
    inner = norm(x, weights.mlp_norm, eps)
    gate = inner @ weights.mlp.gate
    gated = gate / (1 + np.exp(-gate)) * (inner @ weights.mlp.up)
    return x + gated @ weights.mlp.down


@pytest.mark.parametrize(
    "changes",
    [{}, {"qkv_bias": True, "output_bias": True, "has_sinks": True}, {"qk_norm": True}],
    ids=str,
)
@pytest.mark.parametrize("input_norm", [False, True])
def test_a_layer_is_attention_and_feed_forward_with_what_it_has(
    changes: dict[str, Any], input_norm: bool
) -> None:
    config = dataclasses.replace(tiny.LAYER, **changes)
    params = tiny.random_like(
        jax.eval_shape(
            lambda key: init_layer(
                key, config, jnp.dtype("float32"), input_norm=input_norm
            ),
            jax.random.key(0),
        )
    )
    x, cached = drawn(B, T, 32), key_values(S, 1)
    positions = jnp.array(LENGTHS[:, None] + np.arange(T))
    rotary = rotary_tables(positions, config.rope, A)
    context = AttentionContext(
        cached=jax.tree.map(jnp.array, cached),
        length=jnp.array(LENGTHS),
        mask=jnp.array(np.stack([CAUSAL] * B)),
    )
    found, new = decoder_layer(params, config, jnp.array(x), rotary, context)
    wanted = layer_judge(params, x, cached, rotary)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
    assert new.keys.shape == new.values.shape == (B, G, T, A)


def test_unconfirmed_tokens_of_earlier_calls_are_seen_as_those_of_one() -> None:
    """Three tokens at once, and then the last one beside the two before it."""
    config = tiny.LAYER
    params = init_layer(
        jax.random.key(0), config, jnp.dtype("float32"), input_norm=True
    )
    x, cached = jnp.array(drawn(B, T, 32)), jax.tree.map(jnp.array, key_values(S, 1))
    positions = jnp.array(LENGTHS[:, None] + np.arange(T))
    mask = jnp.array(np.stack([CAUSAL, SIBLINGS]))

    def run(start: int, end: int, earlier: KeyValues | None) -> Any:
        rotary = rotary_tables(positions[:, start:end], config.rope, A)
        context = AttentionContext(
            cached=cached,
            length=jnp.array(LENGTHS),
            mask=mask[:, start:end, :end],
            earlier=earlier,
        )
        return decoder_layer(params, config, x[:, start:end], rotary, context)

    whole, new = run(0, 3, None)
    first, earlier = run(0, 2, None)
    last, both = run(2, 3, earlier)
    np.testing.assert_allclose(first, whole[:, :2], atol=1e-5)
    np.testing.assert_allclose(last, whole[:, 2:], atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), both, new)


def test_the_only_output_that_is_wanted_is_that_of_all() -> None:
    config, places = tiny.LAYER, jnp.array([2, 0])
    params = init_layer(
        jax.random.key(0), config, jnp.dtype("float32"), input_norm=True
    )
    cached = jax.tree.map(jnp.array, key_values(S, 1))
    positions = jnp.array(LENGTHS[:, None] + np.arange(T))
    rotary = rotary_tables(positions, config.rope, A)
    context = AttentionContext(
        cached=cached,
        length=jnp.array(LENGTHS),
        mask=jnp.array(np.stack([CAUSAL, SIBLINGS])),
        first=jnp.maximum(positions - 3, 0),
    )

    def run(last: jax.Array | None) -> Any:
        x = jnp.array(drawn(B, T, 32))
        return decoder_layer(params, config, x, rotary, context, last=last)

    whole, new = run(None)
    found, same = run(places)
    np.testing.assert_allclose(found[:, 0], whole[jnp.arange(B), places], atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, same, new)
