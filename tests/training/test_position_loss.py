"""The losses of Medusa's and Hydra's heads against loops over every position."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eagle_jax.drafting.heads import init_heads
from eagle_jax.training.heads import TrainedHead, loss_of, new_head, with_target_tables
from eagle_jax.training.loss import target_features

from eagle_jax.heads.hydra.model import HydraConfig
from eagle_jax.heads.medusa.model import MedusaConfig
from eagle_jax.models import transformer
from eagle_jax.models.transformer import Transformer, output_head, unembed
from eagle_jax.training.config import HeadConfig, LossConfig, TrainConfig
from eagle_jax.training.encode import EncodedExample
from eagle_jax.training.packing import pack
from tests import tiny
from tests.helpers import refused

TARGET = Transformer(config=tiny.target_config(vocab_size=19))
SIZES: dict[str, Any] = {"hidden_size": 32, "vocab_size": 19}
MEDUSA = MedusaConfig(num_heads=3, num_layers=2, **SIZES)
HYDRA = HydraConfig(num_heads=3, num_layers=2, **SIZES)
LENGTHS = ((7, 3), (5, 5), (2, 9))  # Of the segments of each row of 12 tokens.
HEADS = {"medusa": MEDUSA, "hydra": HYDRA}


@pytest.fixture(scope="module")
def setting() -> SimpleNamespace:
    params = tiny.target_params(TARGET.config)
    random = np.random.default_rng(0)
    samples = [
        EncodedExample(
            tokens=random.integers(19, size=n).astype(np.int32),
            loss_mask=random.random(n) < 0.7,
        )
        for lengths in LENGTHS
        for n in lengths
    ]
    rows = pack(samples, 12)
    features = target_features(TARGET, params, rows)
    return SimpleNamespace(params=params, rows=rows, features=features)


def weights(head: TrainedHead) -> Any:
    return tiny.random_like(jax.eval_shape(lambda: init_heads(jax.random.key(0), head)))


def logits_at(head: Any, params: Any, given: SimpleNamespace, *at: int) -> Any:
    """The logits `[V]` of one head at one place, in NumPy."""
    number, row, place = at
    x = np.asarray(given.features[row, place], np.float64)

    def silu(z: np.ndarray) -> np.ndarray:
        return z / (1 + np.exp(-z))

    def dot(block: Any, z: np.ndarray, name: str = "linear") -> np.ndarray:
        matrix, bias = getattr(block, name), getattr(block, f"{name}_bias")
        return z @ np.asarray(matrix, np.float64) + np.asarray(bias)

    if isinstance(head, MedusaConfig):
        one, bias = params[number], 0.0
    else:
        one = params.heads[number]
        tokens = given.rows.tokens[row, place + 1 : place + 2 + number]
        read = [np.asarray(given.params.embedding)[token] for token in tokens]
        z, bias = np.concatenate([x, *read]), np.asarray(one.output_bias)
        x = dot(one.first, z, "residual") + silu(dot(one.first, z))
    for block in one.blocks:
        x = x + silu(dot(block, x))
    return x @ np.asarray(one.output_head, np.float64) + bias


def expected(head: Any, params: Any, given: SimpleNamespace, learns: str) -> Any:
    """The loss, number by number."""
    rows, table = given.rows, np.asarray(output_head(given.params), np.float64)
    losses = []
    for number in range(head.num_heads):
        entropies = []
        for row, place in np.ndindex(rows.tokens.shape):
            ahead = place + 2 + number
            if ahead >= rows.tokens.shape[1] or not rows.segments[row, place]:
                continue
            if rows.segments[row, place] != rows.segments[row, ahead]:
                continue
            if not rows.loss_mask[row, ahead]:
                continue
            found = logits_at(head, params, given, number, row, place)
            log_probs = found - np.logaddexp.reduce(found)
            if learns == "tokens":
                wanted = np.eye(19)[rows.tokens[row, ahead]]
            else:
                theirs = np.asarray(given.features[row, ahead - 1]) @ table
                wanted = np.exp(theirs - np.logaddexp.reduce(theirs))
            entropies.append(-(wanted * log_probs).sum())
        losses.append(np.mean(entropies))
    decay = 0.5 ** np.arange(head.num_heads)
    return float((decay * losses).sum() / decay.sum()), float(losses[0])


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("labels", [None, "tokens", "target"])
def test_every_head_learns_its_own_position(
    setting: SimpleNamespace, kind: str, labels: Any
) -> None:
    head, config = HEADS[kind], LossConfig(decay=0.5, labels=labels)
    params = weights(head)
    loss, metrics = loss_of(head)(
        params,
        setting.params,
        setting.features,
        setting.rows,
        None,
        head=head,
        config=config,
        unembed=unembed,
    )
    published = "tokens" if kind == "medusa" else "target"
    wanted, first = expected(head, params, setting, labels or published)
    np.testing.assert_allclose(loss, wanted, rtol=2e-5)
    np.testing.assert_allclose(metrics.token_loss, first, rtol=2e-5)


def test_the_prefix_layer_never_reads_another_text(setting: SimpleNamespace) -> None:
    head = dataclasses.replace(HYDRA, layer=tiny.LAYER)
    params, rows = weights(head), setting.rows
    alone = jax.tree.map(lambda x: x.copy(), rows)
    is_second = rows.segments == 2
    alone.loss_mask[:] = rows.loss_mask & is_second
    # Other words before the second text of each row.
    changed = jax.tree.map(lambda x: x.copy(), alone)
    changed.tokens[rows.segments == 1] = 1

    def loss(rows: Any) -> Any:
        features = target_features(TARGET, setting.params, rows)
        settings = {"head": head, "config": LossConfig(), "unembed": unembed}
        given = (params, setting.params, features, rows, None)
        return loss_of(head)(*given, **settings)[0]

    np.testing.assert_allclose(loss(alone), loss(changed), rtol=1e-6)


@pytest.mark.parametrize("kind", HEADS)
def test_new_heads_begin_with_the_targets_output_head(
    setting: SimpleNamespace, kind: str
) -> None:
    head = HEADS[kind]
    params = init_heads(jax.random.key(0), head)
    begun = with_target_tables(params, head, setting.params)
    heads = begun if kind == "medusa" else begun.heads
    for one in heads:
        np.testing.assert_array_equal(one.output_head, output_head(setting.params))


def test_new_medusa_heads_repeat_the_target(setting: SimpleNamespace) -> None:
    params = with_target_tables(
        init_heads(jax.random.key(0), MEDUSA), MEDUSA, setting.params
    )
    given = SimpleNamespace(features=setting.features)
    found = logits_at(MEDUSA, params, given, 2, 0, 3)
    table = output_head(setting.params)
    np.testing.assert_allclose(
        found, transformer.unembed(table, setting.features[0, 3]), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(
    ("kind", "num_heads", "num_layers"), [("medusa", 5, 1), ("hydra", 4, 4)]
)
def test_new_heads_have_the_published_sizes(
    kind: Any, num_heads: int, num_layers: int
) -> None:
    head = new_head(TARGET.config, TrainConfig(head=HeadConfig(kind=kind)))
    assert not hasattr(head, "fc_bias")
    found: Any = head
    assert (found.num_heads, found.num_layers) == (num_heads, num_layers)
    assert (found.hidden_size, found.vocab_size) == (32, 19)
    assert (getattr(head, "layer", None) is not None) == (kind == "hydra")
    sizes = HeadConfig(kind=kind, draft_heads=1, head_layers=2)
    one: Any = new_head(TARGET.config, TrainConfig(head=sizes))
    assert (one.num_heads, one.num_layers) == (1, 2)


@pytest.mark.parametrize("recycles_normed", [False, True])
def test_an_eagle3_head_continues_drafts_as_is_set(recycles_normed: bool) -> None:
    sizes = HeadConfig(kind="eagle3", recycles_normed=recycles_normed)
    target = tiny.target_config(num_layers=7)
    head: Any = new_head(target, TrainConfig(head=sizes))
    assert head.recycles_normed == recycles_normed


@pytest.mark.parametrize(
    ("sizes", "loss", "name"),
    [
        ({"draft_heads": 3}, {}, "draft_heads = 3"),
        ({"head_layers": 2}, {}, "head_layers = 2"),
        ({}, {"decay": 0.5}, "decay = 0.5"),
        ({}, {"labels": "tokens"}, "labels = tokens"),
        ({"kind": "hydra", "num_heads": 2}, {}, "num_heads = 2"),
        ({"kind": "hydra", "fc_bias": False}, {}, "fc_bias = False"),
        ({"kind": "medusa"}, {"feature_weight": 0.0}, "feature_weight = 0.0"),
        ({"kind": "medusa"}, {"token_weight": 1.0}, "token_weight = 1.0"),
        ({"kind": "hydra"}, {"noise": 0.0}, "noise = 0.0"),
        ({"kind": "hydra"}, {"noise_scale": "official"}, "noise_scale = official"),
        ({"recycles_normed": True}, {}, "recycles_normed = True"),
        ({"kind": "hydra"}, {"mask": "official"}, "mask = official"),
        ({"kind": "medusa"}, {"normalize": "official"}, "normalize = official"),
    ],
)
def test_settings_of_another_kind_are_refused(sizes: Any, loss: Any, name: str) -> None:
    config = TrainConfig(head=HeadConfig(**sizes), loss=LossConfig(**loss))
    refused(lambda: new_head(TARGET.config, config), name, "left out")


def test_a_texts_end_has_nothing_to_learn() -> None:
    head = dataclasses.replace(MEDUSA, num_heads=12)
    tokens, mask = np.arange(3, dtype=np.int32), np.ones(3, bool)
    rows = pack([EncodedExample(tokens=tokens, loss_mask=mask)], 4)
    features = jnp.ones((1, 4, 32))
    loss, metrics = loss_of(head)(
        weights(head),
        tiny.target_params(TARGET.config),
        features,
        rows,
        None,
        head=head,
        config=LossConfig(),
        unembed=unembed,
    )
    assert metrics.pairs == 1
    assert jnp.isfinite(loss)
