"""Chains of training against the heads that decode."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.checkpoints.load import shapes_of
from eagle_jax.heads import Head
from eagle_jax.heads.chains import draft_chains
from eagle_jax.heads.eagle3 import Eagle3HeadConfig
from eagle_jax.heads.rows import PackedRows
from eagle_jax.training.encode import EncodedExample
from eagle_jax.training.packing import pack
from tests import tiny
from tests.helpers import whole_prompts

LEVELS, LENGTHS = 4, (7, 1, 6, 14, 3, 2)  # Of segments, in rows of 14 tokens.
EAGLE3: dict[str, Any] = {
    "draft_vocab_size": 40,
    "feature_size": 3 * tiny.LAYER.hidden_size,
}
HEADS: dict[str, Any] = {
    "eagle2": tiny.HEAD,
    "eagle2, without bias": tiny.head_config(fc_bias=False, num_kv_heads=4),
    "eagle3": Eagle3HeadConfig(**tiny.sizes(), **EAGLE3),
    "eagle3, normed": Eagle3HeadConfig(
        **tiny.sizes(num_kv_heads=4),
        **EAGLE3,
        has_feature_norms=True,
        recycles_normed=True,
    ),
    "eagle3, window": Eagle3HeadConfig(
        **tiny.sizes(qk_norm=True),
        **EAGLE3,
        norm_before_fc=True,
        norm_before_residual=True,
        sliding_window=2,  # Fewer than the levels of a chain.
    ),
    "eagle3, three layers": Eagle3HeadConfig(**tiny.sizes(), **EAGLE3, num_layers=3),
}


def packed_rows() -> PackedRows:
    random = np.random.default_rng(0)
    samples = [random.integers(64, size=n).astype(np.int32) for n in LENGTHS]
    masks = [np.ones(n, bool) for n in LENGTHS]
    pairs = zip(samples, masks, strict=True)
    return pack([EncodedExample(tokens=t, loss_mask=m) for t, m in pairs], 14)


def trained_chains(
    head: Any,
    params: Any,
    table: jax.Array,
    features: jax.Array,
    rows: PackedRows,
) -> list[jax.Array]:
    features = head.fuse(params, features)
    return draft_chains(head, params, table, features, rows, steps=LEVELS)


def decoded_chains(
    model: Head, params: Any, tokens: jax.Array, features: jax.Array
) -> list[jax.Array]:
    """Drafts a chain of teacher tokens after every prompt of `[n]` tokens."""
    num = tokens.shape[0]
    prompts, known = (jnp.stack([x] * num) for x in (tokens, features))
    state = model.init_state(num, num + LEVELS + 1, LEVELS)
    chunk = whole_prompts(prompts, jnp.arange(num) + 1, known)
    state = model.prefill_chunk(params, state, chunk)
    output, state = model.read(params, state, jnp.roll(tokens, -1))
    outputs, earlier = [output], None
    for level in range(1, LEVELS):
        node = jnp.roll(tokens, -level - 1)[:, None]
        above = outputs[-1][:, None]
        visible = jnp.ones((num, 1, level), bool)
        found, earlier = model.step(
            params, state, node, above, visible, earlier, level=level
        )
        outputs.append(found[:, 0])
    return outputs


@pytest.mark.parametrize("name", HEADS)
def test_a_level_is_what_decoding_drafts_after_true_features(name: str) -> None:
    model, rows = tiny.head_of(HEADS[name]), packed_rows()
    # Of a size that lets no level grow: the bound is one of absolute values.
    params = jax.tree.map(lambda x: x * 0.4, tiny.random_like(shapes_of(model.init)))
    target: Any = tiny.random_target()
    shape = (*rows.tokens.shape, model.feature_size)
    features = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    found = jax.jit(lambda *x: jnp.stack(trained_chains(model, *x)))(
        params, target.embedding, features, rows
    )
    found = np.asarray(found)
    decode = jax.jit(lambda *x: decoded_chains(model, *x))
    compared, joined = 0, model.join(params, target)
    longest = rows.tokens.shape[1]
    for row, segments in enumerate(rows.segments):
        for segment in range(1, segments.max() + 1):
            slots = np.flatnonzero(segments == segment)
            # What follows a segment is no part of it: zeros that no chain may see.
            inside = np.arange(longest) < len(slots)
            places = np.resize(slots, longest)
            wanted = decode(
                joined,
                np.where(inside, rows.tokens[row, places], 0),
                np.where(inside[:, None], features[row, places], np.float32(0)),
            )
            for level, outputs in enumerate(map(np.asarray, wanted)):
                # As many of the text's tokens are there to be drafted.
                last = len(slots) - level - 1
                near = found[level][row, slots[: max(last, 0)]]
                np.testing.assert_allclose(
                    near, outputs[: max(last, 0)], rtol=1e-5, atol=1e-5
                )
                compared += max(last, 0)
    assert compared == sum(max(n - k - 1, 0) for n in LENGTHS for k in range(LEVELS))
