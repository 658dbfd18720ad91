"""What GPUs run instead of loops that end early, run on a CPU."""

from typing import Any

import jax
import numpy as np
import pytest

from eagle_jax.config import TreeConfig
from eagle_jax.decoding import speculative
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.requests import make_requests
from eagle_jax.models import attention
from tests import tiny
from tests.helpers import on_platform

SLOTS, BLOCK = 64, 24  # The last block reaches back into the one before.
TREE = TreeConfig(num_nodes=7, depth=3, width=3)
SIZES: dict[str, Any] = {"vocab_size": 40, "max_positions": SLOTS}
FILTERED = {
    "top_p": [1.0, 0.9, 1.0, 0.5],
    "top_k": [0, 0, 6, 3],
    "min_p": [0.0, 0.2, 0.0, 0.1],
}


def test_texts_are_those_of_other_platforms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over several blocks of a cache, with and without filters, row by row."""
    monkeypatch.setattr(attention, "BLOCK", BLOCK)
    pair = tiny.pair(tiny.target_config(**SIZES), tiny.head_config(**SIZES), TREE)
    requests = make_requests(
        [[1, 2], [3], [4, 5, 6], list(range(20))],
        max_new_tokens=[40, 20, 30, 40],
        temperature=[0.0, 0.7, 1.0, 1.5],
        seeds=range(4),
        prompt_bucket=20,
        **FILTERED,
    )
    decoder = Decoder(target=pair.target, drafter=pair.drafter, acceptance="coupled")
    call = (decoder, pair.params, requests)
    expected = speculative.generate(*call, num_slots=SLOTS)
    jax.clear_caches()
    with on_platform("cuda"):
        found = speculative.generate(*call, num_slots=SLOTS)
    jax.clear_caches()
    assert expected.accept_lengths.sum() > 0, "drafts are accepted"
    for name in ("tokens", "lengths", "accept_lengths"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
