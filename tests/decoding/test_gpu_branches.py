"""What GPUs run instead of loops that end early, run on a CPU."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.config import TreeConfig
from eagle_jax.decoding import speculative
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.requests import make_requests
from eagle_jax.models import attention
from tests import tiny

SLOTS, BLOCK = 64, 12
TREE = TreeConfig(num_nodes=7, depth=3, width=3)
SIZES: dict[str, Any] = {"vocab_size": 40, "max_positions": SLOTS}
FILTERED = {"top_p": [1.0, 0.9, 1.0, 0.5], "top_k": [0, 0, 6, 3]}


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Chooses the platform whose branches are traced from now on."""

    def choose(platform: str) -> None:
        jax.clear_caches()
        monkeypatch.setattr(
            jax.lax,
            "platform_dependent",
            lambda *args, **branches: branches[platform](*args),
        )

    yield choose
    jax.clear_caches()


@pytest.mark.parametrize("filters", [{}, FILTERED, {"min_p": [0.0, 0.2, 0.3, 1.0]}])
def test_texts_are_those_of_other_platforms(
    choose: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    filters: dict[str, Any],
) -> None:
    """Over several blocks of a cache, with and without filters, row by row."""
    monkeypatch.setattr(attention, "BLOCK", BLOCK)
    pair = tiny.pair(tiny.target_config(**SIZES), tiny.head_config(**SIZES), TREE)
    rule = "coupled" if filters else "greedy"
    requests = make_requests(
        [[1, 2], [3], [4, 5, 6], list(range(20))],
        max_new_tokens=[40, 20, 30, 30],
        temperature=[0.0, 0.7, 1.0, 1.5] if filters else 0.0,
        seeds=range(4),
        prompt_bucket=20,
        **filters,
    )
    states = []
    for platform in ("default", "cuda"):
        choose(platform)
        decoder = Decoder(target=pair.target, drafter=pair.drafter, acceptance=rule)
        states.append(
            speculative.generate(decoder, pair.params, requests, num_slots=SLOTS)
        )
    assert states[0].accept_lengths.sum() > 0, "drafts are accepted"
    for found, expected in zip(*map(jax.tree.leaves, states), strict=True):
        if jnp.issubdtype(found.dtype, jax.dtypes.prng_key):
            continue
        # Of other blocks the sums are other sums, in the last digits.
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
