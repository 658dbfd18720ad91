"""Drafts that do not fit their target are told of, and no others."""

import dataclasses
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eagle_jax
from eagle_jax.config import ChainConfig, TreeConfig
from eagle_jax.decoding import slots
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.state import StopReason, record_round
from eagle_jax.drafting import LookupDrafter, SwitchDrafter, TreeDrafter
from eagle_jax.engine.fit_check import FitCheck
from eagle_jax.engine.needs import BatchNeeds
from eagle_jax.engine.request import Request
from eagle_jax.engine.text import Text
from eagle_jax.heads.chains import draft_chains
from eagle_jax.heads.eagle import EagleHead
from eagle_jax.heads.eagle3 import Eagle3Head, Eagle3HeadConfig
from eagle_jax.heads.loss import target_features
from eagle_jax.interface import Params
from eagle_jax.models.layers import rms_norm
from eagle_jax.models.transformer import Transformer, output_head, unembed
from eagle_jax.testing import ToyTarget
from eagle_jax.training.encode import EncodedExample
from eagle_jax.training.packing import pack
from eagle_jax.tree import NO_PARENT, DraftTree
from tests import tiny
from tests.stories import Stories

TREE = TreeConfig(num_nodes=8, depth=3, width=3)
EAGLE = TreeDrafter(model=EagleHead(config=tiny.HEAD), tree=TREE)
MEDUSA = TreeDrafter(model=tiny.medusa(64), tree=TREE)
LOOKUP = LookupDrafter(depth=3)
SWITCH = SwitchDrafter(first=LOOKUP, second=EAGLE, min_match=2)
DECODER = Decoder(target=ToyTarget(vocab_size=64), drafter=EAGLE, acceptance="coupled")


def text_of(accept_lengths: list[int], expected: tuple[float, float] = (0, 0)) -> Text:
    text = Text([1], Request(), needs=BatchNeeds())
    text.accept_lengths, text.expected = accept_lengths, expected
    return text


def test_two_levels_of_running_rows_are_what_is_expected_to_hit() -> None:
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
    expected = [[2 * (0.5 + 0.25), 2 * (0.4 + 0.125)], [0.0, 0.0]]
    np.testing.assert_allclose(state.expected, expected, rtol=1e-6)


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
    seen = FitCheck()
    with warnings.catch_warnings(record=True, action="always") as warned:
        for row in rows:
            seen.judge(text_of(row), DECODER)
    assert len(warned) == expected


@pytest.mark.parametrize(
    ("hits", "confident", "changes", "expected"),
    [
        ((60, 0), (100, 0), {}, True),
        ((71, 0), (100, 0), {}, False),
        ((60, 0), (100, 0), {"acceptance": "rejection"}, False),
        ((60, 0), (100, 0), {"drafter": SWITCH}, False),
        ((0, 0), (100, 0), {}, False),  # It is said otherwise, as above.
        # Level 2 is compared with level 1: greedy texts hit more than heads are sure.
        ((120, 70), (100, 100), {}, True),
        ((120, 75), (100, 100), {}, False),
        ((120, 70), (100, 100), {"drafter": MEDUSA}, False),
    ],
)
def test_a_head_that_hits_less_than_it_is_confident_of_is_told_of(
    hits: tuple[int, int],
    confident: tuple[int, int],
    changes: dict[str, Any],
    expected: bool,
) -> None:
    seen = FitCheck(num_rounds=40)  # Of which nothing is known.
    first, second = hits
    lengths = [2] * second + [1] * (first - second) + [0] * (160 - first)
    text, decoder = text_of(lengths, confident), dataclasses.replace(DECODER, **changes)
    with warnings.catch_warnings(record=True, action="always") as warned:
        seen.judge(text, decoder)
        seen.judge(text, decoder)  # Once, and no later rounds.
    assert len(warned) == expected


@pytest.mark.parametrize("drafter", [LOOKUP, None])
def test_drafts_without_a_model_are_not_judged(drafter: Any) -> None:
    seen, decoder = FitCheck(), dataclasses.replace(DECODER, drafter=drafter)
    seen.judge(text_of([0] * 300), decoder)
    assert seen.num_rounds == 0


def test_a_trained_head_that_reads_another_layer_is_told_of(
    shared: Path,
) -> None:
    models = shared / "models"
    folders = str(models / "stories260K"), str(models / "stories260K-eagle")
    pair = eagle_jax.load_pair(*folders, tree=TREE)

    # Not the hidden states after the last layer.
    config = dataclasses.replace(pair.sizes, feature_layers=(1,))
    seen, target = FitCheck(), Transformer(config=config)
    pair = dataclasses.replace(pair, target=target, fit_check=seen)
    settings = {"max_new_tokens": 200, "temperature": 1.0, "ignore_eos": True}
    with pytest.warns(UserWarning, match="the drafts fit the target badly"):
        pair.generate(["One day", "Tim had a", "The girl"], seed=0, **settings)
    assert 0 < seen.hits[0] < 0.7 * seen.expected[0]


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)


def fit(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.linalg.solve(x.T @ x + 0.01 * np.eye(x.shape[1]), x.T @ y)


@pytest.fixture(scope="module")
def text_of_head(stories: Stories) -> Callable[..., Text]:
    """What a linear EAGLE-3 head hits in story openings, and is confident of.

    Its layer sees one pair and copies what v reads; least squares fit it to the next
    hidden state and, from its own output, to the one after.
    """
    target, config = stories.target_params, stories.target.config
    texts = [np.array(text, np.int32) for text in stories.openings]
    rows = pack([EncodedExample(tokens=t, loss_mask=t >= 0) for t in texts], 64)
    whole = dataclasses.replace(config, feature_layers=(0, 1, 2, 3, 4))
    read = target_features(Transformer(config=whole), target, rows, with_hidden=True)
    is_pair = (rows.segments[:, 2:] == rows.segments[:, :-2]) & (rows.tokens[:, 2:] > 0)

    def at(x: Any, ahead: int) -> np.ndarray:
        return np.asarray(x, np.float64)[:, ahead : ahead + 62][is_pair]

    *layers, states = np.split(np.asarray(read), 6, axis=-1)
    hidden, words = (
        [at(x, n) for n in (1, 2)] for x in (states, target.embedding[rows.tokens])
    )
    scale, (word, after) = np.asarray(target.norm), map(unit, words)
    truth, last = (unit(x / scale) for x in hidden)
    features = unit(at(np.concatenate([layers[n] for n in (1, 2, 4)], -1), 0))
    fc, value = np.split(fit(np.concatenate([features, word], -1), truth), [192])
    value = np.concatenate([value, np.zeros((64, 64))])
    for _ in range(6):
        fused = features @ fc
        reads = np.concatenate([word, unit(fused)], -1)
        above = unit(fused + reads @ value) * scale
        both = np.concatenate([reads, np.concatenate([after, unit(above)], -1)])
        value = fit(both, np.concatenate([truth - fused, last - above]))
        fc = fit(features, truth - reads @ value)
    head = Eagle3HeadConfig(
        layer=dataclasses.replace(config.layer, num_kv_heads=8),
        **{"vocab_size": 512, "draft_vocab_size": 512, "max_positions": 512},
        **{"feature_size": 192, "norm_before_fc": True, "recycles_normed": True},
    )
    new = Eagle3Head(config=head).init(jax.random.key(0))
    table, mlp = output_head(target), jax.tree.map(jnp.zeros_like, new.layer.mlp)
    copies = {"value": jnp.float32(value), "output": jnp.eye(64), "mlp": mlp}
    layer = dataclasses.replace(new.layer, **copies)
    own = {"fc": jnp.float32(fc), "norm": target.norm, "output_head": table}
    params = dataclasses.replace(new, layer=layer, **own)

    def text(reads: tuple[int, ...] = (1, 2, 4), **fields: Any) -> Text:
        own = Eagle3Head(config=dataclasses.replace(head, **fields, sliding_window=1))
        features = jnp.concatenate([jnp.asarray(layers[n]) for n in reads], -1)
        chains = draft_chains(
            *(own, params, target.embedding),
            own.fuse(params, features),
            rows,
            steps=2,
        )
        hits, confident = [], []
        for level, outputs in enumerate(chains):
            normed = rms_norm(jnp.float32(at(outputs, 0)), params.norm, 1e-5)
            drafts, drawn = (
                jax.nn.log_softmax(unembed(table, x))
                + jax.random.gumbel(jax.random.key(level), (len(x), 512))
                for x in (normed, jnp.float32(hidden[level]))
            )
            hits.append(drafts.argmax(-1) == drawn.argmax(-1))
            confident.append(jax.nn.softmax(drafts).max(-1))
        later = confident[0] * confident[1]
        expected = float(confident[0].sum()), float(later.sum())
        return text_of((hits[0] * (1 + hits[1])).tolist(), expected)

    return text


@pytest.mark.parametrize(
    ("mistake", "is_told"),
    [
        ({}, False),
        ({"reads": (2, 3, 4)}, True),
        ({"reads": (2, 4, 1)}, True),
        ({"norm_before_residual": True}, True),
        ({"recycles_normed": False}, True),
    ],
)
def test_an_eagle3_head_that_is_read_with_one_mistake_is_told_of(
    text_of_head: Callable[..., Text], mistake: dict[str, Any], is_told: bool
) -> None:
    """At temperature 1, where the head hits 56% and is confident of 60%.

    A `norm_before_fc` that is left out costs it a quarter of its hits, and is not told
    of: it hits 42% and is confident of 56%.
    """
    seen = FitCheck()
    with warnings.catch_warnings(record=True, action="always") as warned:
        seen.judge(text_of_head(**mistake), DECODER)
    assert bool(warned) == is_told, seen


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
