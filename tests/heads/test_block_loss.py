"""The losses of block heads, against blocks that are drafted one by one."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.heads.block.draft import BlockHead
from eagle_jax.heads.block.loss import choose_anchors
from eagle_jax.heads.loss import Batch
from eagle_jax.models import transformer
from eagle_jax.models.transformer import unembed
from eagle_jax.training.encode import EncodedExample
from eagle_jax.training.packing import pack
from tests import tiny
from tests.helpers import whole_prompts

VOCABULARY, WIDTH, GAMMA = 19, 32, 3.0
LENGTHS = ((7, 5), (10, 2))  # Of the segments of each row of 12 tokens.
HEADS = {
    "dflash": tiny.block(VOCABULARY, is_next=False),
    "dflash, window, causal": tiny.block(
        VOCABULARY, is_next=False, sliding_window=3, is_causal=True
    ),
    "dspark": tiny.block(VOCABULARY, is_next=True),
}


@pytest.fixture(scope="module")
def setting() -> SimpleNamespace:
    tables = tiny.random_target(tiny.target_config(vocab_size=VOCABULARY))
    random = np.random.default_rng(0)
    samples = [
        EncodedExample(
            tokens=random.integers(VOCABULARY, size=n).astype(np.int32),
            loss_mask=random.random(n) < 0.7,
        )
        for lengths in LENGTHS
        for n in lengths
    ]
    features = random.normal(size=(2, 12, 2 * WIDTH)).astype(np.float32)
    return SimpleNamespace(
        tables=tables, rows=pack(samples, 12), features=jnp.array(features)
    )


def loss_of(model: BlockHead, given: SimpleNamespace, **settings: Any) -> Any:
    params = tiny.heads_params(model, given.tables)
    batch = Batch(rows=given.rows, features=given.features, tables=given.tables)
    chosen = model.Loss(**({"gamma": GAMMA} | settings))
    return model.loss(params.head, batch, chosen)


def drafted(
    model: BlockHead, params: Any, tokens: np.ndarray, features: np.ndarray
) -> list[np.ndarray]:
    """Each level's logits after a text's tokens; its last one is the root."""
    text = jnp.array(tokens[None, :-1]), jnp.array([len(tokens) - 1])
    state = model.init_state(1, 16, model.max_levels)
    if len(tokens) > 1:
        chunk = whole_prompts(*text, jnp.array(features[None, : len(tokens) - 1]))
        state = model.prefill_chunk(params, state, chunk)
    output, _ = model.read(params, state, jnp.array(tokens[-1:]))
    return [np.asarray(output.logits[0, level]) for level in range(model.max_levels)]


def expected(model: BlockHead, given: SimpleNamespace, learns: str) -> float:
    params, rows = tiny.heads_params(model, given.tables), given.rows
    sums, weights = 0.0, 0.0
    table = transformer.output_head(given.tables)
    for row in range(2):
        for anchor in range(12):
            segment = rows.segments[row, anchor]
            begin = int(np.argmax(rows.segments[row] == segment))

            def counts(place: int, row: int = row, segment: int = segment) -> bool:
                inside = place < 12 and rows.segments[row, place] == segment
                return bool(inside and segment and rows.loss_mask[row, place])

            if not (counts(anchor) and counts(anchor + 1)):
                continue
            text = rows.tokens[row, begin : anchor + 1]
            read = np.asarray(given.features[row, begin:, :WIDTH])
            levels = drafted(model, params, text, read)
            for level, logits in enumerate(levels):
                place = anchor + level + 1
                if not counts(place):
                    break
                hidden = given.features[row, place - 1, WIDTH:]
                truth = jax.nn.softmax(unembed(table, hidden))
                before, markov = rows.tokens[row, place - 1], params.head.markov
                if markov is not None:
                    logits = logits + markov.before[before] @ markov.after
                law = jax.nn.softmax(logits)
                share = jnp.sum(jnp.minimum(law, truth))
                text_loss = -jnp.log(law[rows.tokens[row, place]])
                loss = {
                    "tokens": text_loss,
                    "variation": 0.1 * text_loss + 0.9 * jnp.abs(law - truth).sum(),
                    "alpha": -jnp.log(share),
                }[learns]
                if markov is not None:
                    state = states(model, params, text, read)[level]
                    inputs = [state, markov.before[before]]
                    weight, bias = (
                        params.head.confidence.linear[:, 0],
                        params.head.confidence.linear_bias[0],
                    )
                    chance = jax.nn.sigmoid(jnp.concatenate(inputs) @ weight + bias)
                    loss -= share * jnp.log(chance) + (1 - share) * jnp.log1p(-chance)
                weight = np.exp(-level / GAMMA)
                sums, weights = sums + weight * loss, weights + weight
    return float(sums / weights)


def states(model: BlockHead, params: Any, tokens: Any, features: Any) -> Any:
    """What the output head reads: logits of an output head that changes nothing."""
    identity = params.replace(output_head=jnp.eye(WIDTH))
    return drafted(model, identity, tokens, features)


@pytest.mark.parametrize(
    ("kind", "learns"),
    [
        ("dflash", "tokens"),
        ("dflash, window, causal", "alpha"),
        ("dspark", "variation"),
    ],
)
def test_a_head_learns_what_it_drafts_after_every_token(
    setting: SimpleNamespace, kind: str, learns: str
) -> None:
    loss, metrics = loss_of(HEADS[kind], setting, block_loss=learns)
    wanted = expected(HEADS[kind], setting, learns)
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    assert metrics.loss == loss


@pytest.mark.parametrize("kind", HEADS)
def test_accepted_tokens_are_read_as_a_prompts_are(
    setting: SimpleNamespace, kind: str
) -> None:
    model, tokens = HEADS[kind], setting.rows.tokens[0]
    params = tiny.heads_params(model, setting.tables)
    features = setting.features[:1, :, :WIDTH]
    chunk = whole_prompts(jnp.array(tokens[None, :4]), jnp.array([4]), features[:, :4])
    state = model.init_state(1, 16, 3)
    state = model.prefill_chunk(params, state, chunk)
    for begin, count in ((4, 3), (7, 1), (8, 2)):
        root = jnp.array(tokens[begin : begin + 1])
        output, state = model.read(params, state, root)
        wanted = drafted(model, params, tokens[: begin + 1], np.asarray(features[0]))
        np.testing.assert_allclose(output.logits[0], wanted[:3], atol=1e-5)
        window = features[:, begin : begin + 4]
        state = model.advance(
            state, jnp.zeros((1, 4), jnp.int32), window, jnp.array([count])
        )


def test_anchors_are_other_ones_with_every_key(setting: SimpleNamespace) -> None:
    chosen = {
        tuple(choose_anchors(setting.rows, 2, jax.random.key(seed))[0][0].tolist())
        for seed in range(20)
    }
    assert len(chosen) > 3


def test_anchors_and_the_tokens_after_them_are_to_be_predicted(
    setting: SimpleNamespace,
) -> None:
    places, exists = choose_anchors(setting.rows, 12, None)
    for row in range(2):
        mask, segments = setting.rows.loss_mask[row], setting.rows.segments[row]
        may = mask[:-1] & mask[1:] & (segments[:-1] == segments[1:])
        found = places[row][exists[row]]
        assert found.tolist() == np.flatnonzero(may).tolist()
