"""Logits by the output head that a model holds."""

import jax
import jax.numpy as jnp
import pytest

from eagle_jax.models.transformer import unembed, unembed_by
from tests import tiny

SHAPES = [(1, 1), (2, 1), (1, 3), (7,), (8, 1), (2, 2, 3)]


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_number_of_rows_has_the_logits_of_each_row_alone(
    shape: tuple[int, ...], *, is_tied: bool
) -> None:
    params = tiny.target_params(tiny.target_config(tie_embeddings=is_tied))
    table = params.embedding.T if is_tied else params.output_head
    width = params.embedding.shape[1]
    hidden = jax.random.normal(jax.random.key(1), (*shape, width))
    logits = jax.jit(unembed_by, static_argnames="cap")(params, hidden, cap=30.0)
    rows = [unembed(table, row, 30.0) for row in hidden.reshape(-1, width)]
    assert logits.shape == (*shape, table.shape[1])
    assert jnp.allclose(logits.reshape(len(rows), -1), jnp.stack(rows), atol=1e-5)


@pytest.mark.parametrize("rows", [1, 2, 7, 8])
def test_cpus_multiply_two_to_seven_rows_with_a_tied_head_as_eight(rows: int) -> None:
    params = tiny.target_params(tiny.target_config(tie_embeddings=True))
    vocabulary, width = params.embedding.shape
    hidden = jnp.ones((rows, 1, width))
    text = jax.jit(unembed_by).lower(params, hidden).compile().as_text()
    assert (f"f32[8,{vocabulary}]" in str(text)) == (rows > 1)
