"""A trained pair's text over all openings, in the programs that people run.

Elsewhere what makes compilation quick changes them: other code adds in other orders.
"""

import os

import pytest

from eagle_jax.testing import assert_same_tokens
from tests.devices import QUICK
from tests.helpers import texts
from tests.stories import Stories, batches, plain_texts, speculate

pytestmark = [
    pytest.mark.usefixtures("optimised"),
    pytest.mark.skipif(
        bool(QUICK) and QUICK in os.environ.get("XLA_FLAGS", ""),
        reason="programs compile quickly here, unlike a user's; .ci/run runs this with "
        "'.[tpu-compile]' installed, where they compile as a user's do",
    ),
]


@pytest.fixture(scope="module")
def plain(stories: Stories) -> list[list[int]]:
    return plain_texts(stories, batches(stories, 20), greedy=True)


def test_greedy_text_is_plain_decodings_and_drafted_well(
    stories: Stories, plain: list[list[int]]
) -> None:
    found: list[list[int]] = []
    rounds = accepted = 0
    for requests in batches(stories, 30):
        state = speculate(stories, requests, stories.trained, "greedy")
        found += texts(requests, state)
        rounds += int(state.num_rounds.sum())
        accepted += int(state.accept_lengths.sum())
    assert_same_tokens(found, plain)
    # Over longer texts it is 3.95, and the official code has the same trees.
    assert accepted / rounds + 1 > 3.7


def test_a_head_that_knows_nothing_changes_no_text(
    stories: Stories, plain: list[list[int]]
) -> None:
    requests = batches(stories, 30)[0]
    state = speculate(stories, requests, stories.random, "greedy")
    assert_same_tokens(texts(requests, state), plain[:30])
