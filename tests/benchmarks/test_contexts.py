"""Timing of rounds in texts of several lengths."""

import pytest

from eagle_jax.benchmarks.contexts import time_contexts
from eagle_jax.config import TreeConfig
from eagle_jax.drafting import EagleHead
from eagle_jax.interface import Params
from eagle_jax.models.transformer import Transformer
from tests import tiny

pytestmark = pytest.mark.usefixtures("quick_compilation")


def test_texts_have_room_to_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that begins in the smallest cache of its ladder leaves it on the way."""
    monkeypatch.setattr("eagle_jax.decoding.growth.FIRST_LENGTH", 85)
    weights = tiny.target_params()
    costs = time_contexts(
        Transformer(config=tiny.TARGET),
        EagleHead(config=tiny.HEAD),
        TreeConfig(num_nodes=5, depth=2, width=2),
        Params(target=weights, drafter=tiny.head_params(tiny.HEAD, weights)),
        [160, 250],
        iterations=16,
        repeats=3,
    )
    assert [cost.length for cost in costs] == [160, 250]
    for cost in costs:
        assert cost.slots >= cost.length
        assert len(cost.rounds) == len(cost.attention) == 3 and min(cost.rounds) > 0
