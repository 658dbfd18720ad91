"""What is found in the rows of a queue for a prompt that begins like one of them."""

import dataclasses

import pytest

from eagle_jax import Decoder
from eagle_jax.config import TreeConfig
from eagle_jax.engine.prefill import SMALL_CHUNK, find_prefix
from eagle_jax.testing import ToyTarget
from tests import tiny

DEPTH = 2
TARGET, DRAFTER, _ = tiny.pair(
    tiny.TARGET, tiny.HEAD, TreeConfig(num_nodes=4, depth=DEPTH, width=2)
)
DECODER = Decoder(target=TARGET, drafter=DRAFTER)
CHUNK = SMALL_CHUNK
TEXT = list(range(4 * CHUNK))


@pytest.mark.parametrize(
    ("common", "reused"),
    [
        (CHUNK, 0),
        (CHUNK + 1, CHUNK),
        (2 * CHUNK, CHUNK),
        (2 * CHUNK + 1, 2 * CHUNK),
        (4 * CHUNK, 3 * CHUNK),
    ],
)
def test_the_token_after_a_reused_prefix_is_shared_too(
    common: int, reused: int
) -> None:
    """A head pairs the last feature of the prefix with it."""
    prompt = TEXT[:common] + [-1] * (5 * CHUNK - common)
    assert find_prefix(prompt, [[7], TEXT], DECODER)[1] == reused
    assert find_prefix(prompt, [[7], TEXT], DECODER)[0] == (reused > 0)


def test_what_a_drafter_may_not_have_read_yet_is_read_again() -> None:
    for missing in range(3 * DEPTH):
        held = TEXT[: 2 * CHUNK + DEPTH + 2 - missing]
        reused = find_prefix(TEXT, [held], DECODER)[1]
        assert reused == (CHUNK if missing else 2 * CHUNK)


def test_nothing_is_reused_where_it_gains_nothing_or_nobody_can_go_back() -> None:
    assert find_prefix(TEXT[: CHUNK - 1], [TEXT], DECODER) == (0, 0)
    cannot = dataclasses.replace(DECODER, target=ToyTarget())
    assert find_prefix(TEXT, [TEXT], cannot) == (0, 0)
