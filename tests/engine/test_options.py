"""What XLA is asked for."""

import jax
import jax.numpy as jnp
import pytest
from jax.errors import JaxRuntimeError

from eagle_jax.engine import options, programs
from eagle_jax.engine.options import options_of
from tests.engine.test_engine import DRAFTER, MakeEngine, make_engine

__all__ = ["make_engine"]


def test_few_rows_and_thousands_are_multiplied_otherwise_and_to_the_same() -> None:
    matrix = jax.random.normal(jax.random.key(0), (256, 512))
    product = jax.jit(jnp.matmul)
    for rows in (1, 2, 8, 63, 64, 2048):
        x = jax.random.normal(jax.random.key(rows), (rows, 256))
        compiled = product.lower(x, matrix).compile(options_of(rows))
        default = product.lower(x, matrix).compile()
        assert jnp.allclose(compiled(x, matrix), default(x, matrix), atol=1e-4)
        is_same = compiled.as_text() == default.as_text()
        assert is_same == (rows in (1, 2, 64))


def test_an_xla_without_the_option_compiles_as_it_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise JaxRuntimeError("No such compile option")

    options._by_eigen.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(jax.stages.Lowered, "compile", refuse)
        assert options_of(8) is None
    options._by_eigen.cache_clear()


@pytest.mark.parametrize("drafter", [DRAFTER, None], ids=["drafts", "plain"])
def test_options_are_of_all_tokens_that_are_read_at_once(
    drafter: object, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = list[int]()
    monkeypatch.setattr(programs, "PROGRAMS", programs.Store())
    monkeypatch.setattr(programs, "options_of", found.append)
    queue = make_engine(drafter=drafter, batch_size=2, new_tokens=8)
    for seed in range(2):
        request = queue.pair.request(seed=seed)
        queue.add(queue.pair.text([1, 2, 3], request, index=seed))
    list(queue.run())
    nodes = 1 if drafter is None else DRAFTER.num_nodes
    assert found[-1] == 2 * nodes
    assert found[0] == 2 * 64  # Both prompts are padded.
