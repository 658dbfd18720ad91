"""The largest of many, found by groups, beside `jax.lax.top_k`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from eagle_jax.tree.top_k import GROUP, top_k

_KINDS = {
    "all different": lambda rng, shape: rng.permuted(
        np.broadcast_to(np.arange(shape[-1], dtype=np.float32), shape), axis=-1
    ),
    "many ties": lambda rng, shape: rng.integers(-1, 2, shape).astype(np.float32),
    "all equal": lambda rng, shape: np.zeros(shape, np.float32),
    "few that are possible": lambda rng, shape: np.where(
        rng.random(shape) < 4 / shape[-1], 1.0, -np.inf
    ).astype(np.float32),
    "nothing possible": lambda rng, shape: np.full(shape, -np.inf, np.float32),
}


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("count", [1, 2, 10])
@pytest.mark.parametrize("size", [10, 2 * GROUP, 2 * GROUP + 1, 40 * GROUP - 1, 5000])
def test_groups_find_what_the_whole_ranking_finds(
    kind: str, count: int, size: int
) -> None:
    values = _KINDS[kind](np.random.default_rng(size), (2, 3, size))
    expected = jax.lax.top_k(values, count)
    for found in (
        top_k(values, count),
        jax.jit(top_k, static_argnums=1)(values, count),
    ):
        np.testing.assert_array_equal(found[0], expected[0])
        np.testing.assert_array_equal(found[1], expected[1])


def _ranked_widths(size: int, count: int) -> list[int]:
    """Returns the widths of all arrays that are ranked."""
    program = jax.make_jaxpr(functools.partial(top_k, count=count))(
        jnp.zeros((3, size))
    )
    return [
        one.invars[0].aval.shape[-1]
        for one in program.jaxpr.eqns
        if one.primitive.name == "top_k"
    ]


def test_long_rows_are_ranked_by_groups() -> None:
    assert _ranked_widths(100 * GROUP, 10) == [100, 10 * GROUP]
    assert _ranked_widths(19 * GROUP, 10) == [19 * GROUP]


def test_over_a_mesh_rows_are_ranked_whole() -> None:
    """XLA ranks each device's part of a whole row where it lies."""
    mesh = jax.sharding.AbstractMesh((4,), ("tensor",), (AxisType.Auto,))
    with jax.sharding.use_abstract_mesh(mesh):
        assert _ranked_widths(100 * GROUP, 10) == [100 * GROUP]
