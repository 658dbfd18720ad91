"""The kinds of heads that are trained: their settings, and the tokens they know."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from eagle_jax.training.heads import count_vocabulary, new_head

from eagle_jax.heads.eagle3.model import Eagle3HeadConfig
from eagle_jax.heads.rows import PackedRows
from eagle_jax.training.config import DataConfig, HeadConfig, LossConfig, TrainConfig
from tests import tiny
from tests.helpers import refused


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
    found = count_vocabulary(rows, head)
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
    ("head", "loss", "named"),
    [
        ({"draft_vocab_size": 9}, {}, ("draft_vocab_size = 9", "kind eagle2")),
        ({"feature_layers": "0 1 2"}, {}, ("feature_layers = 0 1 2", "kind eagle2")),
        ({}, {"decay": 0.5}, ("decay = 0.5", "kind eagle2")),
        ({"kind": "eagle3", "fc_bias": False}, {}, ("fc_bias = False",)),
        ({"kind": "eagle3"}, {"noise": 0.2}, ("noise = 0.2", "kind eagle3")),
        ({"kind": "eagle3"}, {"top_k_loss": 10}, ("top_k_loss = 10", "kind eagle3")),
        ({"kind": "eagle3"}, {"labels": "target"}, ("labels = target",)),
        ({"kind": "medusa"}, {"alignment": 3}, ("alignment = 3", "kind medusa")),
        ({"kind": "hydra"}, {"token_loss": "alpha"}, ("token_loss = alpha",)),
        ({"kind": "eagle3"}, {}, ("the target has 3 layers", "feature_layers")),
        ({"kind": "eagle3", "feature_layers": "0 1 3"}, {}, ("[0, 1, 3]", "0 to 2")),
        ({"kind": "eagle3", "feature_layers": "1 0 2"}, {}, ("[1, 0, 2]", "ascending")),
        ({"kind": "eagle3", "feature_layers": "0 1 1"}, {}, ("[0, 1, 1]", "different")),
        (
            {"kind": "eagle3", "feature_layers": "0 1 2", "draft_vocab_size": 65},
            {},
            ("draft_vocab_size = 65", "64 tokens"),
        ),
    ],
)
def test_settings_of_another_kind_or_target_are_refused(
    head: dict[str, Any], loss: dict[str, Any], named: tuple[str, ...]
) -> None:
    config = TrainConfig(
        head=HeadConfig(**head),
        loss=LossConfig(**loss),
        data=DataConfig(row_length=32),
    )
    refused(lambda: new_head(tiny.target_config(num_layers=3), config), *named)


@pytest.mark.parametrize("layers", ["", "1 2", "1 2 3 4", "1 2 x", "1 -2 3", "1, 2, 3"])
def test_feature_layers_are_three_numbers(layers: str) -> None:
    refused(lambda: HeadConfig(kind="eagle3", feature_layers=layers), "three layers")


def test_an_eagle3_head_has_the_published_sizes_unless_others_are_set() -> None:
    target = tiny.target_config(num_layers=9, vocab_size=40_000)
    config = TrainConfig(head=HeadConfig(kind="eagle3"))
    head: Any = new_head(target, config)
    assert (head.draft_vocab_size, head.feature_layers) == (32_000, None)
    assert (head.feature_size, head.max_positions) == (96, 512)
    sizes = {"draft_vocab_size": 7, "feature_layers": "0 4 8", "num_kv_heads": 1}
    own = dataclasses.replace(config, head=HeadConfig(kind="eagle3", **sizes))
    head = new_head(target, own)
    assert (head.draft_vocab_size, head.feature_layers) == (7, (0, 4, 8))
    assert head.layer.num_kv_heads == 1
