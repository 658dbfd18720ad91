"""The three ways in which experts are run give the same outputs."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.models.linear import precision_of
from eagle_jax.models.mlp import MixtureParams, feed_forward, init_mlp
from eagle_jax.models.quantized import quantize_layers

_WIDTH, _INNER, _CHOSEN = 32, 128, 3


@functools.partial(jax.jit, static_argnames="shares_of_all")
def _run(params: Any, rows: jax.Array, *, shares_of_all: bool = False) -> jax.Array:
    chosen = {"experts_per_token": _CHOSEN, "shares_of_all": shares_of_all}
    return feed_forward(params, rows, **chosen)


@functools.cache
def _mixture(num_experts: int) -> MixtureParams:
    key = jax.random.key(0)
    params = init_mlp(key, _WIDTH, _INNER, jnp.float32, num_experts=num_experts)
    assert isinstance(params, MixtureParams)
    return jax.tree.map(lambda x: 10 * x, params)


def _rows(count: int) -> jax.Array:
    """Rows of which most choose few of the experts."""
    own = jax.random.normal(jax.random.key(1), (count, _WIDTH))
    return own + 2 * jax.random.normal(jax.random.key(2), (_WIDTH,))


def _expected(params: MixtureParams, rows: np.ndarray, *, of_all: bool) -> np.ndarray:
    """The outputs in float64, row by row and expert by expert."""
    router, gate, up, down = (
        np.asarray(leaf, "float64")
        for leaf in (
            params.router,
            params.experts.gate,
            params.experts.up,
            params.experts.down,
        )
    )
    outputs = []
    for row in rows.astype("float64"):
        weights = np.exp(row @ router)
        chosen = np.argsort(-weights)[:_CHOSEN]
        weights /= weights.sum() if of_all else weights[chosen].sum()
        total = np.zeros(_WIDTH)
        for n in chosen:
            gated = row @ gate[n]
            inner = gated / (1 + np.exp(-gated)) * (row @ up[n])
            total += weights[n] * (inner @ down[n])
        outputs.append(total)
    return np.stack(outputs)


@pytest.mark.parametrize("num_experts", [3, 40])
@pytest.mark.parametrize("num_rows", [1, 6, 7, 255, 256, 700])
def test_a_row_has_the_outputs_of_its_experts(num_rows: int, num_experts: int) -> None:
    params, rows, of_all = _mixture(num_experts), _rows(num_rows), num_rows % 2 == 0
    found = _run(params, rows, shares_of_all=of_all)
    expected = _expected(params, np.asarray(rows), of_all=of_all)
    np.testing.assert_allclose(found, expected, atol=2e-4, rtol=2e-5)


@pytest.mark.parametrize("num_rows", [1, 20, 300])
def test_an_expert_may_overflow_on_tokens_of_others(num_rows: int) -> None:
    params, rows = _mixture(8), _rows(num_rows)
    scores = jnp.matmul(rows, params.router, precision=precision_of(rows))
    chosen = np.asarray(jax.lax.top_k(scores, _CHOSEN)[1])
    others = np.setdiff1d(np.arange(8), chosen[0])
    broken = jnp.asarray(params.experts.down).at[others].set(np.inf)
    experts = dataclasses.replace(params.experts, down=broken)
    params = dataclasses.replace(params, experts=experts)
    found = _run(params, rows)
    is_whole = np.isin(chosen, others).any(-1) == 0
    assert is_whole[0]
    assert np.isfinite(np.asarray(found)[is_whole]).all()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("num_rows", [1, 20, 300])
def test_quantized_experts_are_run_in_every_way(num_rows: int, bits: int) -> None:
    params = jax.jit(quantize_layers, static_argnums=1)(_mixture(12), bits)
    rows = _rows(num_rows)
    found = _run(params, rows)
    alone = [_run(params, x[None]) for x in rows[:5]]
    np.testing.assert_allclose(
        found[:5], np.concatenate(alone)[:5], rtol=1e-4, atol=1e-4
    )
    whole = _run(_mixture(12), rows)
    assert (
        np.abs(found - whole).max() < (0.05 if bits == 8 else 1) * np.abs(whole).max()
    )


@pytest.mark.parametrize(("num_rows", "loops"), [(1, 1), (100, 0), (600, 1)])
def test_nothing_branches_on_experts(num_rows: int, loops: int) -> None:
    """So that programs of 128 experts are as small as those of eight."""
    params = jax.eval_shape(lambda: _mixture.__wrapped__(128))
    rows = jax.ShapeDtypeStruct((num_rows, _WIDTH), jnp.float32)
    run = jax.jit(lambda params, rows: feed_forward(params, rows, experts_per_token=8))
    text = run.lower(params, rows).as_text()
    assert "stablehlo.case" not in text and "stablehlo.if" not in text
    assert text.count("stablehlo.while") == loops
    assert len(text.splitlines()) < 400
