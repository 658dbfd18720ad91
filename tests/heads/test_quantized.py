"""Heads that draft by integers of 8 bits."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from eagle_jax.engine import load_pair
from eagle_jax.models.quantized import QuantizedMatrix
from tests.helpers import refused


def load(folder: Path, **settings: Any) -> Any:
    sizes: Any = {"num_nodes": 6, "depth": 3, "width": 2} | settings
    return load_pair(str(folder / "target"), str(folder / "head"), **sizes)


@pytest.fixture(params=["tiny_pair", "eagle3_pair"])
def folder(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


def is_quantized(node: object) -> bool:
    return isinstance(node, QuantizedMatrix)


def test_every_matrix_but_the_table_has_8_bits_and_drafts_as_before(
    folder: Path,
) -> None:
    wide, narrow = load(folder), load(folder, draft_quantization="int8")
    found = jax.tree.leaves(narrow.params.drafter, is_leaf=is_quantized)
    matrices = [leaf for leaf in found if not is_quantized(leaf) and leaf.ndim > 1]
    assert [leaf is narrow.params.drafter.embedding for leaf in matrices] == [True]
    assert not any(map(is_quantized, jax.tree.leaves(narrow.params.target)))

    head, embedding = wide.draft.model, wide.params.drafter.embedding
    tokens = jnp.arange(12, dtype=jnp.int32)[None]
    states = jax.random.normal(
        jax.random.key(0), (1, 12, head.config.layer.hidden_size)
    )
    scores = [
        head.logits(pair.params.drafter, states, level=0) for pair in (wide, narrow)
    ]
    assert jnp.allclose(*scores, atol=0.02 * jnp.abs(scores[0]).max())
    assert not jnp.array_equal(*scores)
    inputs = [
        head.layer_inputs(pair.params.drafter.head, embedding[tokens], states)[1]
        for pair in (wide, narrow)
    ]
    assert jnp.allclose(*inputs, atol=0.02 * jnp.abs(inputs[0]).max())


@pytest.mark.parametrize(
    ("folder", "temperature"),
    [("tiny_pair", 0.0), ("eagle3_pair", 1.0)],
    indirect=["folder"],
)
def test_the_text_is_that_of_plain_decoding(folder: Path, temperature: float) -> None:
    pair = load(folder, draft_quantization="int8")
    plain = load_pair(str(folder / "target"), method="autoregressive")
    asked: Any = {"max_new_tokens": 24, "temperature": temperature, "seed": 3}
    found, expected = (one.generate(["ab", "the"], **asked) for one in (pair, plain))
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]


def test_methods_without_such_weights_refuse_it(tiny_pair: Path) -> None:
    target = str(tiny_pair / "target")
    refused(
        lambda: load_pair(target, method="lookup", draft_quantization="int8"),
        "method lookup does not read `draft_quantization`",
        "eagle2",
    )
    load_pair(target, method="autoregressive", draft_quantization="int8", is_lazy=True)
