"""Drafts that do not fit their target are told of, and no others."""

import dataclasses
import warnings
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import eagle_jax
from eagle_jax.config import ChainConfig, TreeConfig
from eagle_jax.decoding import slots
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.state import StopReason, record_round
from eagle_jax.drafting import LookupDrafter
from eagle_jax.generation.misfit import FirstRounds
from eagle_jax.generation.rows import Row
from eagle_jax.interface import Params
from eagle_jax.models.transformer import Transformer
from eagle_jax.testing import ToyTarget
from eagle_jax.tree import NO_PARENT, DraftTree


def row_of(accept_lengths: list[int], expected: float = 0.0) -> Row:
    return Row(
        prompt_ids=[1],
        generated_ids=[],
        stop_reason=StopReason.MAX_TOKENS,
        accept_lengths=accept_lengths,
        expected=expected,
    )


def test_the_first_level_of_running_rows_is_what_is_expected_to_hit() -> None:
    target = ToyTarget(vocab_size=4)
    decoder = Decoder(target=target, drafter=LookupDrafter(depth=1))
    state = slots.init_decode_state(decoder, Params(target=()), batch=2, num_slots=64)
    reasons = jnp.array([StopReason.RUNNING, StopReason.FREE])
    values = jnp.log(jnp.array([1.0, 0.5, 0.25, 0.4, 0.125]))  # Of paths.
    tree = DraftTree(
        tokens=jnp.zeros((2, 6), jnp.int32),
        parents=jnp.array([[NO_PARENT, 0, 0, 1, 2, NO_PARENT]] * 2),
        log_values=jnp.stack([jnp.append(values, -jnp.inf)] * 2),
        is_node=jnp.array([[True] * 5 + [False]] * 2),
    )
    state = dataclasses.replace(state, stop_reason=reasons)
    for _ in range(2):
        state = record_round(state, jnp.zeros(2, jnp.int32), tree)
    np.testing.assert_allclose(state.expected, [2 * (0.5 + 0.25), 0.0], rtol=1e-6)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([[0] * 31], False),
        ([[0] * 32], True),
        ([[1, 1] + [0] * 30], False),
        ([[0] * 96 + [1] * 4], True),
        ([[0] * 95 + [1] * 5], False),
        ([[0] * 8, [0] * 8, [0] * 8, [2] * 8, [0] * 1000], False),
        ([[0] * 16, [0] * 16, [1] * 9], True),
    ],
)
def test_too_little_acceptance_in_the_first_rounds_of_all_rows_is_said(
    rows: list[list[int]], expected: bool
) -> None:
    seen = FirstRounds()
    with warnings.catch_warnings(record=True, action="always") as warned:
        for row in rows:
            seen.judge([row_of(row)], has_confidence=True)
    assert len(warned) == expected


@pytest.mark.parametrize(
    ("hits", "confident", "has_confidence", "expected"),
    [
        (60, 100, True, True),
        (71, 100, True, False),
        (60, 100, False, False),
        (0, 100, True, False),  # It is said otherwise, as above.
    ],
)
def test_a_head_that_hits_less_than_it_is_confident_of_is_told_of(
    hits: int, confident: int, has_confidence: bool, expected: bool
) -> None:
    seen = FirstRounds(num_rounds=40)  # Of which nothing is known.
    rows = [row_of([1] * hits + [0] * (160 - hits), confident)]
    with warnings.catch_warnings(record=True, action="always") as warned:
        seen.judge(rows, has_confidence=has_confidence)
        seen.judge(rows, has_confidence=has_confidence)  # Once, and no later rounds.
    assert len(warned) == expected


def test_a_trained_head_is_told_of_only_where_it_reads_another_layer(
    shared: Path,
) -> None:
    models = shared / "models"
    folders = str(models / "stories260K"), str(models / "stories260K-eagle")
    pair = eagle_jax.load_pair(*folders, tree=TreeConfig(num_nodes=8, depth=3, width=3))

    def run(layers: tuple[int, ...]) -> FirstRounds:
        config = dataclasses.replace(pair.source.config, feature_layers=layers)
        seen, target = FirstRounds(), Transformer(config=config)
        pair.loaded = dataclasses.replace(pair.loaded, target=target, first_rounds=seen)
        settings = {"max_new_tokens": 200, "temperature": 1.0, "ignore_eos": True}
        pair.generate(["One day", "Tim had a", "The girl"], seed=0, **settings)
        return seen

    with warnings.catch_warnings(record=True, action="always") as warned:
        right = run(())  # The hidden states after the last layer.
    assert not warned and right.num_rounds >= 200
    with pytest.warns(UserWarning, match="the drafts fit the target badly"):
        wrong = run((1,))
    assert wrong.hits / wrong.num_rounds < right.hits / right.num_rounds - 0.2


def test_a_head_that_knows_nothing_is_said_once_with_figures(tiny_pair: Path) -> None:
    # Three drafts of 300 tokens: they hit by chance in one round of a hundred.
    pair = eagle_jax.load_pair(
        str(tiny_pair / "target"),
        str(tiny_pair / "head"),
        method="chain",
        tree=ChainConfig(depth=3),
    )
    with pytest.warns(UserWarning, match=r"drafts do not fit.* accepted in 4") as said:
        for _ in range(2):
            pair.generate(["a", "b"], max_new_tokens=24)
    assert len(said) == 1
