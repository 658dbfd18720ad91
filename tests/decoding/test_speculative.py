"""Losslessness of the loop, with toys: any drafter, any tree, any batch."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.config import TreeConfig
from eagle_jax.decoding import autoregressive, speculative
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.requests import Requests, make_requests
from eagle_jax.decoding.state import DecodeState, StopReason
from eagle_jax.drafting import TreeDrafter
from eagle_jax.interface import Params
from eagle_jax.testing import ToyModel, ToyTarget, assert_same_tokens
from tests.helpers import refused, texts
from tests.joint_distribution import DRAWN_TARGET, check_drawn_texts

TARGET = ToyTarget(vocab_size=8)
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7], [2, 2]]


def speculate(
    requests: Requests,
    *,
    rule: speculative.AcceptanceRule = "greedy",
    agreement: float = 0.7,
    **tree: Any,
) -> DecodeState:
    return speculative.generate(
        Decoder(target=TARGET, drafter=drafter(**tree), acceptance=rule),
        params(agreement),
        requests,
    )


def drafter(**tree: Any) -> TreeDrafter:
    config = dataclasses.replace(TreeConfig(num_nodes=12, depth=4, width=3), **tree)
    return TreeDrafter(model=ToyModel(vocab_size=8), tree=config)


def params(agreement: float = 0.7) -> Params:
    return Params(target=(), drafter=jnp.float32(agreement))


def plain(requests: Requests, *, greedy: bool) -> DecodeState:
    return autoregressive.generate(
        Decoder(target=TARGET, acceptance="greedy" if greedy else "coupled"),
        Params(target=()),
        requests,
    )


TREES = [
    {"num_nodes": 1},
    {"num_nodes": 2},
    {"num_nodes": 22, "depth": 3},  # Every candidate kept.
    {"num_nodes": 60, "depth": 3},  # More nodes than candidates: padding.
    {"depth": 0},
    {"depth": 1},
    {"width": 1},
    {"width": 10},  # More than the vocabulary.
    {"rank_by": "confidence"},
    {"rerank": False},
    {"rank_by": "confidence", "rerank": False},
]


@pytest.mark.parametrize("tree", TREES, ids=str)
@pytest.mark.parametrize("agreement", [-1.0, 0.7, 1.0])
def test_greedy_text_is_the_targets_own(tree: dict, agreement: float) -> None:
    requests = make_requests(PROMPTS, max_new_tokens=[30, 1, 17, 29])
    state = speculate(requests, agreement=agreement, **tree)
    expected = plain(requests, greedy=True)
    assert_same_tokens(texts(requests, state), texts(requests, expected))
    np.testing.assert_array_equal(state.stop_reason, expected.stop_reason)


def test_different_seeds_give_different_texts() -> None:
    requests = make_requests(
        [[1, 2]] * 4, max_new_tokens=20, temperature=1.0, seeds=[0, 1, 2, 0]
    )
    first, second, third, fourth = texts(requests, plain(requests, greedy=False))
    assert first != second != third
    assert first == fourth


def test_a_perfect_drafter_is_accepted_to_the_full_depth() -> None:
    requests = make_requests([[1, 2]], max_new_tokens=41)
    state = speculate(requests, agreement=1.0, width=1)
    assert state.num_rounds.tolist() == [8]  # 40 tokens after the first, 5 a round.
    assert state.accept_lengths[0, :8].tolist() == [4] * 8


def test_sampled_rows_at_temperature_zero_are_greedy() -> None:
    requests = make_requests(PROMPTS, max_new_tokens=20, seeds=[3, 1, 4, 1])
    expected = texts(requests, plain(requests, greedy=True))
    for rule in ("coupled", "rejection"):
        state = speculate(requests, rule=rule)
        assert_same_tokens(texts(requests, state), expected)


def test_a_stop_token_inside_the_accepted_path_ends_the_text() -> None:
    requests = make_requests([[1, 2]], max_new_tokens=40)
    (free,) = texts(requests, plain(requests, greedy=True))
    for stop in sorted(set(free)):
        limited = make_requests([[1, 2]], max_new_tokens=40, stop_tokens=[stop, 99])
        state = speculate(limited, agreement=1.0)
        (text,) = texts(limited, state)
        assert text == free[: free.index(stop) + 1]
        assert state.stop_reason.tolist() == [StopReason.STOP_TOKEN]


@pytest.mark.parametrize("limit", range(1, 12))
def test_max_new_tokens_is_exact(limit: int) -> None:
    requests = make_requests([[1, 2]], max_new_tokens=limit)
    state = speculate(requests, agreement=1.0)
    assert [len(text) for text in texts(requests, state)] == [limit]
    assert state.stop_reason.tolist() == [StopReason.MAX_TOKENS]


@pytest.mark.parametrize("max_length", [3, 4, 57, 58, 59, 60, 64])
def test_a_full_cache_ends_every_method_at_the_same_token(max_length: int) -> None:
    requests = make_requests([[1, 2]], max_new_tokens=500, max_length=max_length)
    expected = plain(requests, greedy=True)
    state = speculate(requests, agreement=1.0)
    assert state.lengths.tolist() == [max_length]
    assert state.stop_reason.tolist() == [StopReason.MAX_LENGTH]
    assert_same_tokens(texts(requests, state), texts(requests, expected))


def test_every_row_finished_at_the_start_runs_no_round() -> None:
    requests = make_requests(PROMPTS, max_new_tokens=1)
    state = speculate(requests)
    assert state.num_rounds.tolist() == [0] * 4
    assert_same_tokens(
        texts(requests, state), texts(requests, plain(requests, greedy=True))
    )


def test_rounds_driven_from_python_give_the_same_state() -> None:
    requests = make_requests(PROMPTS, max_new_tokens=[30, 2, 9, 16])
    whole = speculate(requests)
    decoder = Decoder(target=TARGET, drafter=drafter(), acceptance="greedy")
    state = speculative.prefill(decoder, params(), requests, num_slots=64)
    seen: list[np.ndarray] = []
    emitted = [[] for _ in PROMPTS]
    first = texts(requests, state)
    while bool(state.is_running.any()):
        # The cache holds all but the root, whatever a limit has cut off.
        np.testing.assert_array_equal(
            state.target_cache.length[state.is_running],
            state.lengths[state.is_running] - 1,
        )
        state, done = speculative.decode_round(decoder, params(), state)
        seen.append(np.where(done.count > 0, done.acceptance.num_accepted, 0))
        for row, count in enumerate(done.count.tolist()):
            emitted[row] += done.tokens[row, :count].tolist()
    assert_same_tokens(texts(requests, state), texts(requests, whole))
    np.testing.assert_array_equal(state.accept_lengths, whole.accept_lengths)
    np.testing.assert_array_equal(np.sum(seen, axis=0), whole.accept_lengths.sum(1))
    # A round's tokens are cut at limits, like the text.
    assert_same_tokens(
        [a + b for a, b in zip(first, emitted, strict=True)], texts(requests, whole)
    )


NUM_DRAWS = 40_000


@pytest.mark.parametrize("temperature, top_k", [(1.0, 0), (0.6, 3)])
def test_three_tokens_have_the_targets_joint_distribution(
    temperature: float, top_k: int
) -> None:
    model = ToyModel(vocab_size=4, sharpness=1.0, seed=DRAWN_TARGET.seed)
    drafter_of_two = TreeDrafter(
        model=model, tree=TreeConfig(num_nodes=6, depth=2, width=2)
    )
    accepted = check_drawn_texts(
        drafter_of_two,
        params(),
        rule="rejection",
        temperature=temperature,
        top_k=top_k,
        num_draws=NUM_DRAWS,
    )
    assert accepted > 1 / 4  # Drafts did take part.


def test_rejection_does_not_depend_on_how_many_rounds_came_before() -> None:
    # Two runs whose texts agree up to a root must go on alike, whatever got them there.
    requests = make_requests([[1, 2]], max_new_tokens=30, temperature=1.0, seeds=5)
    state = speculate(requests, rule="rejection")
    accepted = np.asarray(state.accept_lengths[0, : int(state.num_rounds[0])])
    root = 2 + int((accepted[:2] + 1).sum())
    prefix = np.asarray(state.tokens[0, :root]).tolist()
    # The prefill's own draw is the coupled one: give it the root as last prompt token.
    again = make_requests([prefix], max_new_tokens=20, temperature=1.0, seeds=5)
    decoder = Decoder(target=TARGET, drafter=drafter(), acceptance="rejection")
    restarted = speculative.prefill(decoder, params(), again, num_slots=64)
    root_token = state.tokens[0, root]
    restarted = dataclasses.replace(
        restarted, tokens=restarted.tokens.at[0, root].set(root_token)
    )
    restarted, _ = speculative.decode_round(decoder, params(), restarted)
    end = int(restarted.lengths[0])
    assert restarted.tokens[0, :end].tolist() == state.tokens[0, :end].tolist()


def test_a_cache_too_small_for_the_texts_is_refused() -> None:
    requests = make_requests([[1, 2, 3]], max_new_tokens=60)

    def plain_lengths(num_slots: int) -> list[int]:
        state = autoregressive.generate(
            Decoder(target=TARGET, acceptance="greedy"),
            Params(target=()),
            requests,
            num_slots=num_slots,
        )
        return state.lengths.tolist()

    def lengths(num_slots: int) -> list[int]:
        state = speculative.generate(
            Decoder(target=TARGET, drafter=drafter(), acceptance="greedy"),
            params(),
            requests,
            num_slots=num_slots,
        )
        return state.lengths.tolist()

    for decode, needed in ((plain_lengths, 64), (lengths, 68)):
        refused(lambda decode=decode, n=needed - 1: decode(n), f"at least {needed}")
        assert decode(needed) == [63]
