"""The loss of EAGLE-3 heads against NumPy; `test_chains.py` judges what it drafts."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.checkpoints.load import shapes_of
from eagle_jax.heads.chains import draft_chains
from eagle_jax.heads.eagle3 import Eagle3Head, Eagle3HeadConfig
from eagle_jax.heads.eagle3.loss import USUAL_LEVELS, Eagle3Loss
from eagle_jax.heads.loss import Batch
from tests import tiny
from tests.heads.test_chains import EAGLE3, packed_rows
from tests.heads.test_eagle_loss import log_softmax, numpy_token_loss

HEAD = Eagle3Head(config=Eagle3HeadConfig(**tiny.sizes(), **EAGLE3))
WHOLE = Eagle3Head(config=dataclasses.replace(HEAD.config, draft_vocab_size=64))
KNOWN = np.sort(np.random.default_rng(4).choice(64, 40, replace=False))


@pytest.fixture(scope="module")
def batch() -> Batch:
    random, rows = np.random.default_rng(2), packed_rows()
    mask = random.random(rows.tokens.shape) < 0.7
    width = HEAD.feature_size + tiny.LAYER.hidden_size
    features = random.normal(size=(*rows.tokens.shape, width)).astype(np.float32)
    return Batch(
        tables=tiny.random_target(),
        rows=dataclasses.replace(rows, loss_mask=mask),
        features=jnp.asarray(features),
    )


def params_of(head: Eagle3Head) -> Any:
    params = tiny.random_like(shapes_of(head.init))
    if head is WHOLE:
        return params
    offsets = jnp.asarray(KNOWN - np.arange(len(KNOWN)), jnp.int32)
    return dataclasses.replace(params, offsets=offsets)


def numpy_loss(batch: Batch, head: Eagle3Head, settings: Eagle3Loss) -> list[float]:
    """The losses over every pair that counts, level by level, sample by sample."""
    params, rows = params_of(head), batch.rows
    levels = settings.alignment or USUAL_LEVELS
    inputs, hidden = np.split(np.asarray(batch.features), [head.feature_size], axis=-1)

    @jax.jit
    def run(params: Any, inputs: Any, table: Any) -> Any:
        fused = head.fuse(params, inputs)
        return draft_chains(head, params, table, fused, rows, steps=levels)

    outputs = np.asarray(run(params, inputs, batch.tables.embedding), np.float64)
    params = jax.tree.map(np.asarray, params)
    of_target = np.asarray(batch.tables.output_head, np.float64)
    known = np.arange(64) if head is WHOLE else KNOWN
    sums = np.zeros((levels, 4))  # Token loss, agreement, learnt pairs, pairs.
    for row, segments in enumerate(rows.segments):
        for i, segment in enumerate(segments):
            for n in range(levels):
                there = i + n + 1
                if not segment or there >= len(segments) or segments[there] != segment:
                    continue
                if not rows.loss_mask[row, there - (settings.mask == "official")]:
                    continue
                sums[n, 3] += 1
                theirs = hidden[row, there] @ of_target
                if theirs.argmax() not in known:
                    continue
                state = outputs[n][row, i]
                state = state / np.sqrt((state**2).mean() + 1e-5) * params.norm
                logits = state @ params.output_head
                p = np.exp(log_softmax(theirs[known]))
                loss = numpy_token_loss(logits, p, settings)
                sums[n, :3] += loss, logits.argmax() == p.argmax(), 1
    losses = sums[:, 0] / np.maximum(sums[:, 2], 1)
    agreements = sums[:, 1] / np.maximum(sums[:, 3], 1)
    total = sum(settings.decay**n * loss for n, loss in enumerate(losses))
    length = agreements.cumprod().sum()
    return [total, losses[0], agreements[0], length, sums[0, 3]]


def loss_of(batch: Batch, head: Eagle3Head, settings: Eagle3Loss) -> Any:
    return jax.jit(head.loss, static_argnums=2)(params_of(head), batch, settings)


@pytest.mark.parametrize(
    ("head", "settings"),
    [
        (HEAD, Eagle3Loss()),
        (HEAD, Eagle3Loss(alignment=3, decay=0.5, mask="official")),
        (HEAD, Eagle3Loss(alignment=2, token_loss="alpha")),
        (WHOLE, Eagle3Loss(alignment=1, token_loss="alpha", decay=1.0)),
    ],
)
def test_the_loss_is_a_decaying_sum_over_levels(
    batch: Batch, head: Eagle3Head, settings: Eagle3Loss
) -> None:
    loss, m = loss_of(batch, head, settings)
    found = (loss, m.token_loss, m.agreement, m.chain_length, m.pairs)
    np.testing.assert_allclose(found, numpy_loss(batch, head, settings), rtol=1e-5)


def test_nothing_to_predict_gives_a_loss_of_zero(batch: Batch) -> None:
    mask = np.zeros_like(batch.rows.loss_mask)
    rows = dataclasses.replace(batch.rows, loss_mask=mask)
    none = dataclasses.replace(batch, rows=rows)
    loss, metrics = loss_of(none, HEAD, Eagle3Loss(alignment=2))
    assert float(loss) == float(metrics.pairs) == 0.0


@pytest.mark.parametrize("is_cut", [True, False])
def test_gradients_flow_through_all_levels_and_to_the_head_alone(
    batch: Batch, monkeypatch: pytest.MonkeyPatch, is_cut: bool
) -> None:
    def gradients() -> Any:
        def loss(params: Any, tables: Any) -> jax.Array:
            own = dataclasses.replace(batch, tables=tables)
            return WHOLE.loss(params, own, Eagle3Loss(alignment=2))[0]

        gradient = jax.grad(loss, argnums=(0, 1))
        return jax.jit(gradient)(params_of(WHOLE), batch.tables)

    def recycle(head: Any, params: Any, outputs: jax.Array) -> jax.Array:
        return jax.lax.stop_gradient(outputs) if is_cut else outputs

    ours, borrowed = gradients()
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(ours))
    assert not any(np.abs(leaf).max() for leaf in jax.tree.leaves(borrowed))
    monkeypatch.setattr(Eagle3Head, "recycle", recycle)
    theirs, _ = gradients()
    assert np.allclose(ours.fc, theirs.fc, atol=1e-6) != is_cut
