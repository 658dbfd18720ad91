"""The losses of block heads, against blocks that are drafted one by one."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.heads.block import BlockHead
from eagle_jax.heads.block.loss import choose_anchors
from eagle_jax.heads.loss import Batch
from eagle_jax.models import transformer
from eagle_jax.models.transformer import unembed
from eagle_jax.training.encode import EncodedExample
from eagle_jax.training.packing import pack
from tests import tiny
from tests.helpers import whole_prompts

VOCABULARY, WIDTH, GAMMA = 19, 32, 3.0
LENGTHS = (7, 5, 10, 2)  # Of the segments, in two rows of 12 tokens.
WINDOW = {"sliding_window": 3, "is_causal": True}
HEADS = {
    "dflash": tiny.block(VOCABULARY, is_next=False),
    "dflash, window, causal": tiny.block(VOCABULARY, is_next=False, **WINDOW),
    "dspark": tiny.block(VOCABULARY, is_next=True),
}


@pytest.fixture(scope="module")
def batch() -> Batch:
    random = np.random.default_rng(0)
    samples = [
        EncodedExample(
            tokens=random.integers(VOCABULARY, size=n).astype(np.int32),
            loss_mask=random.random(n) < 0.7,
        )
        for n in LENGTHS
    ]
    features = random.normal(size=(2, 12, 2 * WIDTH)).astype(np.float32)
    return Batch(
        tables=tiny.random_target(tiny.target_config(vocab_size=VOCABULARY)),
        rows=pack(samples, 12),
        features=jnp.array(features),
    )


@functools.partial(jax.jit, static_argnums=0)
def read_text(
    head: BlockHead, params: Any, tokens: Any, num: Any, features: Any, root: Any
) -> Any:
    state = head.init_state(1, 16, head.max_levels)
    chunk = whole_prompts(tokens, num, features)
    return head.read(params, head.prefill_chunk(params, state, chunk), root)[0].logits


def drafted(
    head: BlockHead, params: Any, tokens: np.ndarray, features: Any
) -> list[np.ndarray]:
    """Each level's logits after a text's tokens; its last one is the root."""
    num = len(tokens) - 1
    text = np.zeros((1, 12), np.int32)
    text[0, :num] = tokens[:-1]
    read = np.zeros((1, 12, WIDTH), np.float32)
    read[0, :num] = features[:num]
    logits = read_text(head, params, text, np.array([num]), read, tokens[-1:])
    return [*np.asarray(logits[0])]


def expected(head: BlockHead, batch: Batch, learns: str) -> float:
    params, rows = tiny.heads_params(head, batch.tables), batch.rows
    # What the output head reads: logits of an output head that changes nothing.
    identity = params.replace(output_head=jnp.eye(WIDTH))
    markov, confidence = params.head.markov, params.head.confidence
    table = transformer.output_head(batch.tables)
    sums, weights = 0.0, 0.0
    truths = jax.nn.softmax(unembed(table, batch.features[..., WIDTH:]))
    for row, anchor in np.ndindex(2, 12):
        segment = rows.segments[row, anchor]
        begin = int(np.argmax(rows.segments[row] == segment))

        def counts(place: int, row: int = row, segment: int = segment) -> bool:
            inside = place < 12 and rows.segments[row, place] == segment
            return bool(inside and segment and rows.loss_mask[row, place])

        if not (counts(anchor) and counts(anchor + 1)):
            continue
        text = rows.tokens[row, begin : anchor + 1]
        read = np.asarray(batch.features[row, begin:, :WIDTH])
        states = drafted(head, identity, text, read) if markov else []
        for level, logits in enumerate(drafted(head, params, text, read)):
            place = anchor + level + 1
            if not counts(place):
                break
            truth = truths[row, place - 1]
            before = rows.tokens[row, place - 1]
            if markov:
                logits = logits + markov.before[before] @ markov.after
            law = jax.nn.softmax(logits)
            share = jnp.sum(jnp.minimum(law, truth))
            text_loss = -jnp.log(law[rows.tokens[row, place]])
            loss = {
                "tokens": text_loss,
                "variation": 0.1 * text_loss + 0.9 * jnp.abs(law - truth).sum(),
                "alpha": -jnp.log(share),
            }[learns]
            if markov:
                inputs = jnp.concatenate([states[level], markov.before[before]])
                found = inputs @ confidence.linear[:, 0] + confidence.linear_bias[0]
                chance = jax.nn.sigmoid(found)
                loss -= share * jnp.log(chance) + (1 - share) * jnp.log1p(-chance)
            weight = np.exp(-level / GAMMA)
            sums, weights = sums + weight * loss, weights + weight
    return float(sums / weights)


@pytest.mark.parametrize(
    ("kind", "learns"), [*zip(HEADS, ["tokens", "alpha", "variation"], strict=True)]
)
def test_a_head_learns_what_it_drafts_after_every_token(
    batch: Batch, kind: str, learns: str
) -> None:
    head = HEADS[kind]
    params = tiny.heads_params(head, batch.tables).head
    settings = head.Loss(gamma=GAMMA, block_loss=learns)
    run = jax.jit(functools.partial(head.loss, settings=settings))
    loss, metrics = run(params, batch)
    np.testing.assert_allclose(loss, expected(head, batch, learns), rtol=1e-5)
    assert metrics.loss == loss


@pytest.mark.parametrize("kind", HEADS)
def test_accepted_tokens_are_read_as_a_prompts_are(batch: Batch, kind: str) -> None:
    head, tokens = HEADS[kind], batch.rows.tokens[0]
    params = tiny.heads_params(head, batch.tables)
    features, nothing = batch.features[:1, :, :WIDTH], jnp.zeros((1, 4), jnp.int32)
    chunk = whole_prompts(jnp.array(tokens[None, :4]), jnp.array([4]), features[:, :4])
    read, advance = jax.jit(head.read), jax.jit(head.advance)
    fill = jax.jit(head.prefill_chunk)
    state = fill(params, head.init_state(1, 16, 3), chunk)
    for begin, count in ((4, 3), (7, 1), (8, 2)):
        root = jnp.array(tokens[begin : begin + 1])
        output, state = read(params, state, root)
        wanted = drafted(head, params, tokens[: begin + 1], features[0])
        np.testing.assert_allclose(output.logits[0], wanted[:3], atol=1e-5)
        window = features[:, begin : begin + 4]
        state = advance(state, nothing, window, jnp.array([count]))


def test_anchors_are_other_ones_with_every_key(batch: Batch) -> None:
    chosen = {
        tuple(choose_anchors(batch.rows, 2, jax.random.key(seed))[0][0].tolist())
        for seed in range(20)
    }
    assert len(chosen) > 3


def test_anchors_and_the_tokens_after_them_are_to_be_predicted(batch: Batch) -> None:
    places, exists = choose_anchors(batch.rows, 12, None)
    for row in range(2):
        mask, segments = batch.rows.loss_mask[row], batch.rows.segments[row]
        may = mask[:-1] & mask[1:] & (segments[:-1] == segments[1:])
        assert places[row][exists[row]].tolist() == np.flatnonzero(may).tolist()
