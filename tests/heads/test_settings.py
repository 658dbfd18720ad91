"""New heads: their settings, their sizes, and the tokens that they know."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from eagle_jax.heads import HEADS
from eagle_jax.heads.eagle3 import Eagle3HeadConfig
from eagle_jax.heads.rows import PackedRows, known_tokens
from eagle_jax.training.config import DataConfig, TrainConfig, new_head
from tests import tiny
from tests.helpers import refused

EAGLE3 = HEADS["eagle3"]


def new_sizes(target: Any, config: TrainConfig) -> Any:
    """The sizes of a new head."""
    return new_head(target, config).config


def settings_of(head: dict[str, Any], loss: dict[str, Any] | None = None) -> Any:
    """What a file of settings with these tables says."""
    return TrainConfig.from_table({"head": head, "loss": loss or {}}, "a.toml")


def known_of(tokens: list[int], mask: list[int], known: int) -> list[int] | None:
    """The tokens that a head knows whose target has eight; 0s follow the text."""
    padding = 3
    row = np.pad([tokens], ((0, 0), (0, padding)))
    rows = PackedRows(
        tokens=row,
        segments=np.pad(np.ones((1, len(tokens)), int), ((0, 0), (0, padding))),
        positions=row,
        loss_mask=np.pad([mask], ((0, 0), (0, padding)), constant_values=1) > 0,
    )
    sizes = tiny.sizes(vocab_size=8)
    head = Eagle3HeadConfig(**sizes, draft_vocab_size=known, feature_size=96)
    found = known_tokens(rows, head)
    return None if found is None else found.tolist()


@pytest.mark.parametrize(
    ("tokens", "mask", "known", "wanted"),
    [
        ([7, 5, 5, 2, 7, 7], [1] * 6, 2, [5, 7]),
        ([7, 5, 5, 2, 7, 7], [1] * 6, 1, [7]),
        # Prompts are not predicted, and neither is padding.
        ([7, 5, 5, 2, 7, 7], [0, 1, 1, 1, 0, 0], 2, [2, 5]),
        # Ties, and places that are left, go to the lowest tokens.
        ([6, 4, 5, 3], [1] * 4, 2, [3, 4]),
        ([6, 6, 4], [1] * 3, 5, [0, 1, 2, 4, 6]),
        ([6, 6, 4], [1] * 3, 8, None),
    ],
)
def test_a_head_knows_the_most_frequent_tokens(
    tokens: list[int], mask: list[int], known: int, wanted: list[int] | None
) -> None:
    assert known_of(tokens, mask, known) == wanted


def test_no_vocabulary_is_counted_where_nothing_is_predicted() -> None:
    refused(lambda: known_of([1, 2], [0, 0], 3), "no token", "data with answers")


@pytest.mark.parametrize(
    ("kind", "head", "loss", "named"),
    [
        ("eagle2", {"draft_vocab_size": 9}, {}, "unknown key 'draft_vocab_size'"),
        ("eagle2", {}, {"decay": 0.5}, "unknown key 'decay'"),
        ("eagle3", {"fc_bias": False}, {}, "unknown key 'fc_bias'"),
        ("eagle3", {}, {"noise": 0.2}, "unknown key 'noise'"),
        ("medusa", {"num_heads": 2}, {}, "unknown key 'num_heads'"),
        ("medusa", {}, {"alignment": 3}, "unknown key 'alignment'"),
        ("hydra", {}, {"token_loss": "alpha"}, "unknown key 'token_loss'"),
        ("dflash", {"markov_rank": 4}, {}, "unknown key 'markov_rank'"),
        ("dspark", {}, {"decay": 0.5}, "unknown key 'decay'"),
        (
            "eagle3.1",
            {},
            {},
            "kind = eagle3.1 must be of medusa, hydra, dflash, dspark",
        ),
    ],
)
def test_settings_of_another_kind_are_unknown(
    kind: str, head: dict[str, Any], loss: dict[str, Any], named: str
) -> None:
    refused(lambda: settings_of({"kind": kind} | head, loss), "a.toml", named)


@pytest.mark.parametrize(
    ("head", "named"),
    [
        ({}, "the target has 3 layers"),
        ({"feature_layers": "0 1 3"}, "[0, 1, 3]"),
        ({"feature_layers": "1 0 2"}, "ascending"),
        ({"feature_layers": "0 1 2", "draft_vocab_size": 65}, "draft_vocab_size = 65"),
        *(
            ({"feature_layers": layers}, 'layers, such as "1 2 4"')
            for layers in ("", "1 2 x", "1 -2 3", "1, 2, 3")
        ),
    ],
)
def test_layers_and_tokens_that_a_target_lacks_are_refused(
    head: dict[str, Any], named: str
) -> None:
    target = tiny.target_config(num_layers=3)

    def act() -> None:
        own = TrainConfig(head=EAGLE3.Settings(**head), data=DataConfig(row_length=32))
        new_sizes(target, own)

    refused(act, named)


def test_an_eagle3_head_has_the_published_sizes_unless_others_are_set() -> None:
    target = tiny.target_config(num_layers=9, vocab_size=40_000)
    head = new_sizes(target, settings_of({"kind": "eagle3"}))
    assert (head.draft_vocab_size, head.feature_layers) == (32_000, None)
    assert (head.feature_size, head.max_positions) == (96, 512)
    assert not head.recycles_normed
    sizes = {"draft_vocab_size": 7, "feature_layers": "0 4 8", "num_kv_heads": 1}
    variants: dict[str, Any] = {
        "recycles_normed": True,
        "has_feature_norms": True,
        "norm_before_residual": True,
        "norm_before_fc": True,
        "sliding_window": 64,
        "num_layers": 2,
    }
    own = {"kind": "eagle3", "qk_norm": True} | sizes | variants
    head = new_sizes(target, settings_of(own))
    assert (head.draft_vocab_size, head.feature_layers) == (7, (0, 4, 8))
    assert head.layer.num_kv_heads == 1 and head.layer.qk_norm
    assert variants.items() <= vars(head).items()
    assert (
        new_sizes(target, settings_of(own | {"feature_layers": "3"})).feature_size == 32
    )


@pytest.mark.parametrize(
    ("kind", "num_heads", "num_layers"), [("medusa", 5, 1), ("hydra", 4, 4)]
)
def test_new_heads_have_the_published_sizes(
    kind: str, num_heads: int, num_layers: int
) -> None:
    target = tiny.target_config(vocab_size=19)
    found = new_sizes(target, settings_of({"kind": kind}))
    assert (found.num_heads, found.num_layers) == (num_heads, num_layers)
    assert (found.hidden_size, found.vocab_size) == (32, 19)
    assert (getattr(found, "layer", None) is not None) == (kind == "hydra")
    few = {"kind": kind, "draft_heads": 1, "head_layers": 2}
    one = new_sizes(target, settings_of(few))
    assert dataclasses.replace(found, num_heads=1, num_layers=2) == one


@pytest.mark.parametrize(
    ("kind", "block_size", "rank"), [("dflash", 16, 0), ("dspark", 7, 256)]
)
def test_new_block_heads_have_the_published_sizes(
    kind: str, block_size: int, rank: int
) -> None:
    target = tiny.target_config(vocab_size=19, num_layers=9)
    found = new_sizes(target, settings_of({"kind": kind}))
    assert (found.block_size, found.markov_rank) == (block_size, rank)
    assert (found.num_layers, found.mask_token) == (5, 18)
    assert found.feature_layers == (2, 3, 5, 6, 7)
    assert found.layer.qk_norm and found.num_target_layers == 9
    for wrong, named in (
        ({"mask_token": 19}, "mask_token = 19 must be one of the target's 19"),
        ({"feature_layers": "2 9"}, "[1, 8] must be layers of the target's 9"),
        ({"block_size": 0}, "block_size = 0 must be at least 1"),
    ):
        own: Any = {"kind": kind} | wrong
        refused(lambda own=own: new_sizes(target, settings_of(own)), named)
