"""The loss against NumPy, written from the paper's formulas."""

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.checkpoints.export_files import host_tensors
from eagle_jax.heads.eagle import EagleHead, EagleHeadConfig
from eagle_jax.heads.eagle.loss import EagleLoss, add_noise
from eagle_jax.heads.loss import Batch, pair_weights, target_features
from eagle_jax.heads.rows import PackedRows
from eagle_jax.heads.settings import ChainLoss
from eagle_jax.models import transformer
from eagle_jax.models.layers import LayerConfig
from eagle_jax.models.rope import RopeConfig
from eagle_jax.models.transformer import (
    Transformer,
    TransformerConfig,
    output_head,
)
from eagle_jax.training.encode import EncodedExample
from eagle_jax.training.packing import pack

LAYER = LayerConfig(
    hidden_size=16,
    intermediate_size=24,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=10000.0),
)
TARGET = Transformer(
    config=TransformerConfig(layer=LAYER, num_layers=2, vocab_size=19, max_positions=64)
)

FEATURES = jax.jit(target_features, static_argnums=0)
HEAD = EagleHead(config=EagleHeadConfig(layer=LAYER, vocab_size=19, max_positions=64))
LOSS = jax.jit(HEAD.loss, static_argnums=2)
LENGTHS = ((7, 3), (5, 5), (2, 9, 1))  # Of the segments of each row of 12 tokens.


@pytest.fixture(scope="module")
def setting() -> SimpleNamespace:
    target_params = transformer.init_params(jax.random.key(0), TARGET.config)
    # Larger than initial weights, so that every term of the loss counts.

    def grow(x: jax.Array) -> jax.Array:
        return x * 8 if x.ndim == 2 else x

    target_params = jax.tree.map(grow, target_params)
    params = jax.tree.map(grow, HEAD.init(jax.random.key(1)))
    params = dataclasses.replace(params, fc_bias=jnp.linspace(-0.5, 0.5, 16))
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
    features = FEATURES(TARGET, target_params, rows)
    return SimpleNamespace(
        params=params,
        target_params=target_params,
        rows=rows,
        samples=samples,
        features=features,
    )


def loss_of(setting: SimpleNamespace, config: EagleLoss, key: jax.Array | None = None):
    batch = Batch(
        rows=setting.rows,
        features=setting.features,
        tables=setting.target_params,
        key=key,
    )
    return LOSS(setting.params, batch, config)


def rotate(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Rotate-half embedding of `[n, heads, 4]`."""
    angles = positions[:, None] * 10000.0 ** (-np.arange(0, 4, 2) / 4)
    cos = np.tile(np.cos(angles), 2)[:, None]
    sin = np.tile(np.sin(angles), 2)[:, None]
    return x * cos + np.concatenate([-x[..., 2:], x[..., :2]], axis=-1) * sin


def numpy_head(
    weights: dict[str, np.ndarray], embeddings: np.ndarray, features: np.ndarray
) -> np.ndarray:
    """One head over one sample: `[n, 16]` and `[n, 16]` to `[n, 16]`, float64."""
    n = len(features)
    x = np.concatenate([embeddings, features], axis=1) @ weights["fc"].T
    x = x + weights["fc_bias"]
    query = rotate((x @ weights["query"].T).reshape(n, 4, 4), np.arange(n))
    key = rotate((x @ weights["key"].T).reshape(n, 2, 4), np.arange(n))
    value = (x @ weights["value"].T).reshape(n, 2, 4)
    mixed = np.zeros((n, 4, 4))
    for i in range(n):
        for head in range(4):
            scores = key[: i + 1, head // 2] @ query[i, head] / 2.0
            shares = np.exp(scores - scores.max())
            mixed[i, head] = shares / shares.sum() @ value[: i + 1, head // 2]
    x = x + mixed.reshape(n, 16) @ weights["output"].T
    scale = np.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-5)
    normed = x / scale * weights["mlp_norm"]
    gate = normed @ weights["mlp.gate"].T
    inner = gate / (1 + np.exp(-gate)) * (normed @ weights["mlp.up"].T)
    return x + inner @ weights["mlp.down"].T


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def numpy_weights(setting: SimpleNamespace) -> dict[str, np.ndarray]:
    """The head's weights in `[out, in]`, as the official files hold them."""
    (table,) = HEAD.tensor_names().values()
    named = host_tensors(setting.params, setting.params, table, "float32")
    return {
        ours.removeprefix("layer."): np.asarray(named[official], np.float64)
        for ours, official in table.items()
        if official in named
    }


def numpy_chain(
    setting: SimpleNamespace, tokens: np.ndarray, features: np.ndarray, levels: int
) -> list[np.ndarray]:
    """The levels `[16]` drafted where the true features `[n, 16]` end.

    Every pair follows all others of its chain, drafted ones as they were drafted.
    """
    weights, table = numpy_weights(setting), np.asarray(setting.target_params.embedding)
    outputs = []
    for last in range(len(features), len(features) + levels):
        embeddings = table[tokens[1 : last + 1]].astype(np.float64)
        outputs.append(numpy_head(weights, embeddings, features)[-1])
        features = np.concatenate([features, outputs[-1][None]])
    return outputs


def numpy_token_loss(logits: np.ndarray, p: np.ndarray, config: ChainLoss) -> float:
    log_q = log_softmax(logits)
    entropy = -sum(p[x] * log_q[x] for x in range(len(p)))
    if config.token_loss == "cross-entropy":
        return entropy
    return -np.log(sum(min(p[x], np.exp(log_q[x])) for x in range(len(p))))


def numpy_loss(setting: SimpleNamespace, config: EagleLoss) -> list[float]:
    """The losses over every pair that counts, level by level, sample by sample."""
    head = np.asarray(output_head(setting.target_params), np.float64)
    rows, levels = setting.rows, config.alignment or 1
    sums = np.zeros((levels, 5))  # Smooth L1, token loss, top-K, agreement, count.
    for row, segments in enumerate(rows.segments):
        for segment in range(1, segments.max() + 1):
            slots = np.flatnonzero(segments == segment)
            tokens, mask = rows.tokens[row, slots], rows.loss_mask[row, slots]
            features = np.asarray(setting.features, np.float64)[row, slots]
            for i in range(len(slots) - 1):
                left = min(levels, len(slots) - 1 - i)
                chain = numpy_chain(setting, tokens, features[: i + 1], left)
                for n, predicted in enumerate(chain):
                    if not mask[i + n + (config.mask == "next")]:
                        continue
                    gap = np.abs(predicted - features[i + n + 1])
                    logits = predicted @ head
                    p = np.exp(log_softmax(features[i + n + 1] @ head))
                    top = np.argsort(-p)[: config.top_k_loss]
                    sums[n] += (
                        np.where(gap < 1, gap**2 / 2, gap - 0.5).mean(),
                        numpy_token_loss(logits, p, config),
                        -sum(p[x] * log_softmax(logits)[x] for x in top),
                        logits.argmax() == p.argmax(),
                        1,
                    )
    counts = np.maximum(sums[:, 4], 1)
    feature_loss, loss, top_k = (sums[:, :3].T / counts).sum(axis=1)
    total = config.feature_weight * feature_loss + config.token_weight * loss
    total += config.top_k_weight * top_k
    agreements = sums[:, 3] / counts
    length = agreements.cumprod().sum()
    return [total, feature_loss, loss, agreements[0], length, sums[0, 4]]


@pytest.mark.parametrize(
    "config",
    [
        EagleLoss(token_weight=0.0),
        EagleLoss(),
        EagleLoss(feature_weight=2.0, token_weight=1.0, token_loss="alpha"),
        EagleLoss(alignment=3, top_k_loss=4, top_k_weight=0.5),
        EagleLoss(alignment=2, token_loss="alpha", top_k_loss=99),
        # More levels than the longest sample has pairs.
        EagleLoss(alignment=10, mask="official"),
    ],
)
def test_the_loss_is_the_papers(setting: SimpleNamespace, config: EagleLoss) -> None:
    loss, m = loss_of(setting, config)
    found = (loss, m.feature_loss, m.token_loss, m.agreement, m.chain_length, m.pairs)
    np.testing.assert_allclose(found, numpy_loss(setting, config), rtol=1e-5)


def gradient_of(loss: Callable[[Any], jax.Array], params: Any) -> np.ndarray:
    """That of the fusing matrix, of a program that is traced anew."""
    return np.asarray(jax.jit(jax.grad(lambda params: loss(params)))(params).fc)


@pytest.mark.parametrize("is_cut", [True, False])
def test_no_gradient_flows_through_the_features_between_levels(
    setting: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, is_cut: bool
) -> None:
    def loss(params: Any) -> jax.Array:
        batch = Batch(
            rows=setting.rows, features=setting.features, tables=setting.target_params
        )
        return HEAD.loss(params, batch, EagleLoss(alignment=2))[0]

    def recycle(head: Any, params: Any, outputs: jax.Array) -> jax.Array:
        return jax.lax.stop_gradient(outputs) if is_cut else outputs

    ours = gradient_of(loss, setting.params)
    monkeypatch.setattr(EagleHead, "recycle", recycle)
    theirs = gradient_of(loss, setting.params)
    assert np.allclose(ours, theirs, atol=1e-6) == is_cut


def test_packing_changes_no_loss(setting: SimpleNamespace) -> None:
    _, together = loss_of(setting, EagleLoss())
    alone = []
    for sample in setting.samples:
        rows = pack([sample], len(sample.tokens))
        features = FEATURES(TARGET, setting.target_params, rows)
        one = SimpleNamespace(**{**vars(setting), "rows": rows, "features": features})
        alone.append(loss_of(one, EagleLoss())[1])
    for name in ("feature_loss", "token_loss", "agreement"):
        total = sum(float(getattr(m, name) * m.pairs) for m in alone)
        count = sum(float(m.pairs) for m in alone)
        np.testing.assert_allclose(
            float(getattr(together, name)), total / count, rtol=1e-5
        )


def test_gradients_flow_to_the_head_only(setting: SimpleNamespace) -> None:
    def loss(params, borrowed, target_params):
        features = target_features(TARGET, target_params, setting.rows)
        batch = Batch(
            rows=setting.rows,
            features=features,
            tables=borrowed,
            key=jax.random.key(0),
        )
        return HEAD.loss(params, batch, EagleLoss())[0]

    to_head, *to_others = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(
        setting.params, setting.target_params, setting.target_params
    )
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(to_head))
    assert all(np.abs(leaf).max() == 0 for leaf in jax.tree.leaves(to_others))


def test_pairs_count_by_their_token_and_officially_by_their_feature() -> None:
    #            one sample of five tokens, then one of two, then padding
    segments = np.array([[1, 1, 1, 1, 1, 2, 2, 0]], np.int32)
    mask = np.array([[0, 0, 1, 1, 1, 1, 1, 0]], bool)
    empty = np.zeros((1, 8), np.int32)
    rows = PackedRows(tokens=empty, segments=segments, positions=empty, loss_mask=mask)
    assert pair_weights(rows, "next").tolist() == [[0, 1, 1, 1, 0, 1, 0, 0]]
    assert pair_weights(rows, "official").tolist() == [[0, 0, 1, 1, 0, 1, 0, 0]]
    # At the place where a chain begins stands what its later levels weigh.
    assert pair_weights(rows, "next", 1).tolist() == [[1, 1, 1, 0, 0, 0, 0, 0]]
    assert pair_weights(rows, "official", 1).tolist() == [[0, 1, 1, 0, 0, 0, 0, 0]]
    for level in (4, 6, 7, 20):
        assert not pair_weights(rows, "next", level).any()


@pytest.mark.parametrize("emptied", ["segments", "loss_mask"])
def test_nothing_to_predict_gives_a_loss_of_zero(
    setting: SimpleNamespace, emptied: str
) -> None:
    nothing = np.zeros_like(getattr(setting.rows, emptied))
    rows = dataclasses.replace(setting.rows, **{emptied: nothing})
    one = SimpleNamespace(**{**vars(setting), "rows": rows})
    config = EagleLoss(alignment=3, top_k_loss=4, top_k_weight=0.5)
    loss, metrics = loss_of(one, config)
    assert float(loss) == 0.0 and float(metrics.pairs) == 0.0


def test_noise_is_uniform_within_its_bounds() -> None:
    noise = np.asarray(add_noise(jax.random.key(0), jnp.zeros((4, 64, 32)), 0.1))
    assert np.abs(noise).max() <= 0.1
    histogram = np.histogram(noise, bins=10, range=(-0.1, 0.1))[0] / noise.size
    np.testing.assert_allclose(histogram, 0.1, atol=0.01)


def test_noise_touches_the_inputs_not_the_wanted_features(
    setting: SimpleNamespace,
) -> None:
    def loss(noise: float, weight: float) -> float:
        config = EagleLoss(noise=noise, token_weight=weight)
        return float(loss_of(setting, config, jax.random.key(3))[0])

    assert loss(0.0, 0.1) == float(loss_of(setting, EagleLoss())[0])
    assert loss(0.5, 0.1) != loss(0.0, 0.1)
    # A head that ignores features gives the same loss whatever the noise.
    blind = dataclasses.replace(setting.params, fc=jnp.zeros_like(setting.params.fc))
    deaf = SimpleNamespace(**{**vars(setting), "params": blind})
    losses = [
        float(loss_of(deaf, EagleLoss(noise=n), jax.random.key(3))[0])
        for n in (0.0, 0.5)
    ]
    assert losses[0] == losses[1]
