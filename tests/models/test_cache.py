"""The cache against rows of a list."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.models.cache import KeyValues, KVCache, commit, init_cache

LAYERS, B, G, S, A = 2, 3, 2, 12, 4


def empty(dtype: str = "float32") -> KVCache:
    return init_cache(
        num_layers=LAYERS,
        batch=B,
        num_kv_heads=G,
        capacity=S,
        head_dim=A,
        dtype=jnp.dtype(dtype),
    )


def entries(num_tokens: int, seed: int) -> tuple[KeyValues, ...]:
    rng = np.random.default_rng(seed)
    drawn = rng.normal(size=(LAYERS, 2, B, G, num_tokens, A)).astype(np.float32)
    layers = jnp.array(drawn)
    return tuple(KeyValues(keys=layer[0], values=layer[1]) for layer in layers)


def test_an_empty_cache_has_no_text() -> None:
    cache = empty("bfloat16")
    assert len(cache.layers) == LAYERS
    assert cache.length.tolist() == [0] * B and cache.length.dtype == jnp.int32
    for leaf in jax.tree.leaves(cache.layers):
        assert (leaf.shape, leaf.dtype) == ((B, G, S, A), jnp.bfloat16)


@pytest.mark.parametrize("is_jitted", [False, True])
def test_each_row_holds_what_it_accepted_in_order(is_jitted: bool) -> None:
    """Three commits, rows at lengths of their own, some of which accept nothing."""
    write: Any = jax.jit(commit) if is_jitted else commit
    cache = empty()
    wanted: list[list[tuple[int, int]]] = [[] for _ in range(B)]
    steps = [
        ([[0, 1, 2, 3], [0, 1, 2, 3], [0, 0, 0, 0]], [4, 2, 0]),
        ([[0, 3, 4, 4], [0, 2, 2, 2], [0, 1, 4, 4]], [3, 1, 3]),
        ([[0, 0, 0, 0], [0, 4, 3, 1], [0, 0, 0, 0]], [0, 4, 1]),
    ]
    given = [entries(5, seed) for seed in range(len(steps))]
    for number, (path, count) in enumerate(steps):
        cache = write(cache, given[number], jnp.array(path), jnp.array(count))
        for row in range(B):
            wanted[row] += [(number, node) for node in path[row][: count[row]]]
    assert cache.length.tolist() == [len(slots) for slots in wanted] == [7, 7, 4]
    for layer in range(LAYERS):
        for name in ("keys", "values"):
            stored = getattr(cache.layers[layer], name)
            for row, slots in enumerate(wanted):
                for slot, (number, node) in enumerate(slots):
                    source = getattr(given[number][layer], name)[row, :, node]
                    np.testing.assert_array_equal(stored[row, :, slot], source)


def test_a_window_may_end_with_the_last_slot_and_takes_the_caches_dtype() -> None:
    cache = empty("bfloat16")
    first, last = entries(8, 0), entries(4, 1)
    path = jnp.broadcast_to(jnp.arange(8), (B, 8))
    cache = commit(cache, first, path, jnp.full(B, 8))
    cache = commit(cache, last, path[:, :4], jnp.array([4, 0, 1]))
    assert cache.length.tolist() == [12, 8, 9]
    keys = cache.layers[1].keys
    assert keys.dtype == jnp.bfloat16
    wanted = [first[1].keys, last[1].keys]
    joined = jnp.concatenate(wanted, axis=2).astype(jnp.bfloat16)
    np.testing.assert_array_equal(keys, joined)
