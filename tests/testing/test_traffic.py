"""Bytes and operations of compiled programs, counted by hand."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from eagle_jax.testing.traffic import memory_bytes, repeated_flops

_ROWS = jnp.ones((64, 256))
_MATRIX = jnp.ones((256, 256))
_TABLE = jnp.ones((10_000, 256))
_PRODUCT_BYTES = 4 * (2 * 64 * 256 + 256 * 256)
_PRODUCT_FLOPS = 2 * 64 * 256 * 256


def compiled(program: Callable[..., Any], *inputs: Any, donated: int = 0) -> Any:
    donate = range(donated)
    return jax.jit(program, donate_argnums=tuple(donate)).lower(*inputs).compile()


def product(rows: jax.Array, matrix: jax.Array) -> jax.Array:
    return rows @ matrix


def repeat(rows: jax.Array, matrix: jax.Array, times: int) -> jax.Array:
    return jax.lax.fori_loop(0, times, lambda _, rows: rows @ matrix, rows)


def until_large(rows: jax.Array, matrix: jax.Array) -> jax.Array:
    return jax.lax.while_loop(
        lambda rows: rows[0, 0] < 1e30, lambda rows: repeat(rows, matrix, 3), rows
    )


def test_a_product_moves_its_operands_and_its_result() -> None:
    text = compiled(product, _ROWS, _MATRIX).as_text()
    assert memory_bytes(text) == _PRODUCT_BYTES
    assert repeated_flops(text) == 0


@pytest.mark.parametrize("times", [2, 5, 1000])
def test_a_loop_counts_as_often_as_it_runs(times: int) -> None:
    """XLA counts its body once; beside the product it may copy the rows."""
    program = compiled(lambda x, w: repeat(x, w, times), _ROWS, _MATRIX)
    text = program.as_text()
    flops = program.cost_analysis()["flops"]
    assert flops == pytest.approx(_PRODUCT_FLOPS, rel=1e-3)
    assert repeated_flops(text) == (times - 1) * _PRODUCT_FLOPS
    copied = 2 * 4 * 64 * 256
    least = times * _PRODUCT_BYTES
    assert least <= memory_bytes(text) <= least + (times + 2) * (copied + 100)


def test_a_loop_of_unknown_length_counts_once() -> None:
    text = compiled(until_large, _ROWS, _MATRIX).as_text()
    assert repeated_flops(text) == 2 * _PRODUCT_FLOPS
    assert 3 * _PRODUCT_BYTES < memory_bytes(text) < 6 * _PRODUCT_BYTES


def test_a_gather_reads_its_rows_alone() -> None:
    text = compiled(lambda table, i: table[i], _TABLE, jnp.arange(4)).as_text()
    assert memory_bytes(text) == pytest.approx(2 * 4 * 4 * 256, abs=100)


@pytest.mark.parametrize(
    "update",
    [
        lambda table, rows, i: jax.lax.dynamic_update_slice(table, rows, (i, 0)),
        lambda table, rows, i: table.at[i + jnp.arange(4)].set(rows),
    ],
    ids=["slice", "scatter"],
)
def test_an_update_in_place_writes_its_rows_alone(update: Callable[..., Any]) -> None:
    text = compiled(update, jnp.ones_like(_TABLE), _TABLE[:4], 5, donated=1).as_text()
    rows = 4 * 4 * 256
    # Where XLA writes a scatter as a loop, it also reads what it replaces.
    assert 2 * rows <= memory_bytes(text) < 3 * rows + 400


def test_of_two_branches_one_counts() -> None:
    def choose(rows: jax.Array, matrix: jax.Array) -> jax.Array:
        pick = rows[0, 0] > 0
        return jax.lax.cond(pick, lambda: rows @ matrix, lambda: rows @ matrix.T)

    text = compiled(choose, _ROWS, _MATRIX).as_text()
    assert _PRODUCT_BYTES <= memory_bytes(text) < 2 * _PRODUCT_BYTES


def test_what_runs_once_is_no_part_of_a_loops_round() -> None:
    def loop(rows: jax.Array, matrix: jax.Array) -> jax.Array:
        matrix = jnp.sort(matrix, axis=0)
        return jax.lax.fori_loop(0, rows.shape[0], lambda _, x: x @ matrix, rows)

    square = jnp.ones((128, 128))
    text = compiled(loop, jnp.ones((8, 128)), square).as_text()
    inside, all_ = (memory_bytes(text, in_loops=only) for only in (True, False))
    assert 0 < inside <= all_ - 2 * square.nbytes


_ON_A_TPU = """\
HloModule m, is_scheduled=true

%part (p: bf16[1024,256]) -> bf16[256,256] {
  %p = bf16[1024,256]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %s = bf16[256,256]{1,0:T(8,128)(2,1)S(1)} slice(%p), slice={[0:256], [0:256]}
}

ENTRY %main (x: bf16[1024,256]) -> bf16[256,256] {
  %x = bf16[1024,256]{1,0:T(8,128)(2,1)} parameter(0)
  %b = ((bf16[1024,256]{1,0:T(8,128)(2,1)}), bf16[256,256]{1,0:T(8,128)(2,1)S(1)}, \
s32[]{:S(2)}) async-start(%x), calls=%part
  %e = bf16[256,256]{1,0:T(8,128)(2,1)S(1)} async-done(%b)
  ROOT %y = bf16[256,256]{1,0:T(8,128)(2,1)} add(%e, %e)
}
"""


def test_vector_memory_costs_nothing() -> None:
    """The part that is brought there is read once, the sum written once."""
    assert memory_bytes(_ON_A_TPU) == 2 * (2 * 256 * 256)


_IN_PIECES = """\
HloModule m, is_scheduled=true

ENTRY %main (x: bf16[1024,256]) -> bf16[512,256] {
  %x = bf16[1024,256]{1,0:T(8,128)(2,1)} parameter(0)
  %a = ((bf16[1024,256]{1,0:T(8,128)(2,1)}), bf16[512,256]{1,0:T(8,128)(2,1)S(1)}, \
s32[]{:S(2)}) slice-start(%x), slice={[0:512], [0:256]}
  %b = ((bf16[1024,256]{1,0:T(8,128)(2,1)}), bf16[512,256]{1,0:T(8,128)(2,1)S(1)}, \
s32[]{:S(2)}) slice-start(%x), slice={[512:1024], [0:256]}
  %c = bf16[512,256]{1,0:T(8,128)(2,1)S(1)} slice-done(%a)
  %d = bf16[512,256]{1,0:T(8,128)(2,1)S(1)} slice-done(%b)
  ROOT %y = bf16[512,256]{1,0:T(8,128)(2,1)S(1)} add(%c, %d)
}
"""


def test_what_comes_in_pieces_is_read_once() -> None:
    assert memory_bytes(_IN_PIECES) == 2 * 1024 * 256
