"""The losses of Medusa's and Hydra's heads against loops over every position."""

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.checkpoints.load import shapes_of
from eagle_jax.heads.hydra import HydraConfig
from eagle_jax.heads.loss import Batch, target_features
from eagle_jax.heads.medusa import MedusaConfig
from eagle_jax.models import transformer
from eagle_jax.models.transformer import Transformer, output_head
from eagle_jax.training.encode import EncodedExample
from eagle_jax.training.packing import pack
from tests import tiny

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


def weights(head: Any) -> Any:
    return tiny.random_like(shapes_of(tiny.head_of(head).init))


def loss_of(
    head: Any,
    params: Any,
    given: SimpleNamespace,
    features: Any = None,
    **settings: Any,
) -> Any:
    kind = tiny.head_of(head)
    batch = Batch(
        rows=given.rows,
        features=given.features if features is None else features,
        tables=given.params,
    )
    run = jax.jit(functools.partial(kind.loss, settings=kind.Loss(**settings)))
    return run(params, batch)


def logits_at(head: Any, params: Any, given: SimpleNamespace, *at: int) -> Any:
    """The logits `[V]` of one head at one place, in NumPy."""
    number, row, place = at
    x = np.asarray(given.features[row, place], np.float64)

    def silu(z: np.ndarray) -> np.ndarray:
        return z / (1 + np.exp(-z))

    def dot(block: Any, z: np.ndarray, name: str = "linear") -> np.ndarray:
        matrix, bias = getattr(block, name), getattr(block, f"{name}_bias")
        return z @ np.asarray(matrix, np.float64) + np.asarray(bias)

    one, bias = params.heads[number], 0.0
    if isinstance(head, HydraConfig):
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
    head = HEADS[kind]
    params = weights(head)
    loss, metrics = loss_of(head, params, setting, decay=0.5, labels=labels)
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
        given = SimpleNamespace(rows=rows, features=features, params=setting.params)
        return loss_of(head, params, given)[0]

    np.testing.assert_allclose(loss(alone), loss(changed), rtol=1e-6)


@pytest.mark.parametrize("kind", HEADS)
def test_new_heads_begin_with_the_targets_output_head(
    setting: SimpleNamespace, kind: str
) -> None:
    head = tiny.head_of(HEADS[kind])
    params = head.init(jax.random.key(0))
    begun = head.init_from_target(params, setting.params, None)
    for one in begun.heads:
        np.testing.assert_array_equal(one.output_head, output_head(setting.params))


def test_new_medusa_heads_repeat_the_target(setting: SimpleNamespace) -> None:
    medusa = tiny.head_of(MEDUSA)
    new = medusa.init(jax.random.key(0))
    params = medusa.init_from_target(new, setting.params, None)
    given = SimpleNamespace(features=setting.features)
    found = logits_at(MEDUSA, params, given, 2, 0, 3)
    table = output_head(setting.params)
    np.testing.assert_allclose(
        found, transformer.unembed(table, setting.features[0, 3]), rtol=1e-4, atol=1e-5
    )


def test_a_texts_end_has_nothing_to_learn() -> None:
    head = dataclasses.replace(MEDUSA, num_heads=12)
    tokens, mask = np.arange(3, dtype=np.int32), np.ones(3, bool)
    rows = pack([EncodedExample(tokens=tokens, loss_mask=mask)], 4)
    features = jnp.ones((1, 4, 32))
    given = SimpleNamespace(
        rows=rows, features=features, params=tiny.target_params(TARGET.config)
    )
    loss, metrics = loss_of(head, weights(head), given)
    assert metrics.pairs == 1
    assert jnp.isfinite(loss)
