"""What is read from a compiled program is there, and only inside its loops."""

import jax
import jax.numpy as jnp
import pytest

from eagle_jax.testing.programs import (
    count_collectives,
    count_kernels,
    find_copies,
    find_host_calls,
    loop_lines,
)
from tests.instructions import moved_bytes

pytestmark = pytest.mark.usefixtures("optimised")


def test_a_call_of_the_host_is_found_in_a_loop_alone() -> None:
    def step(number: jax.Array) -> jax.Array:
        jax.debug.callback(lambda number: None, number)
        return number + 1

    def inside(number: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda n: n < 9, step, number)

    def outside(number: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda n: n < 9, lambda n: n + 1, step(number))

    for program, is_found in ((inside, True), (outside, False)):
        text = jax.jit(program).lower(jnp.array(0)).compile().as_text()
        assert text is not None
        assert bool(find_host_calls(loop_lines(text))) == is_found


def test_a_copy_of_a_whole_array_is_found_by_its_shape() -> None:
    def turn(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 3, lambda _, x: jnp.sin(x).T + x, x)

    text = jax.jit(turn).lower(jnp.ones((37, 37))).compile().as_text()
    assert text is not None
    lines = loop_lines(text)
    assert find_copies(lines, (37, 37))
    assert not find_copies(lines, (37, 38))


def test_a_copy_is_found_in_any_order_of_axes() -> None:
    lines = [
        "  %a = bf16[2,1,128,2112]{2,3,1,0:T(8,128)(2,1)} transpose(%x)",
        "  ROOT %b = (bf16[2,2112,128]{2,1,0}, u32[]{:S(2)}) copy-start(%x)",
        "  %c = bf16[1,2,2112,128]{3,2,1,0:T(8,128)(2,1)S(1)} copy(%x)",
        "  %d = bf16[1,2,2112,128]{3,2,1,0} dynamic-update-slice(%x, %y)",
        "  %e = bf16[1,2,2112,64]{3,2,1,0} copy(%x)",
    ]
    found = find_copies(lines, (1, 2, 2112, 128))
    assert found == [lines[0].strip(), lines[1].strip()]


def test_collectives_count_once_and_their_bytes_where_they_end() -> None:
    lines = [
        "  %a = ((bf16[1,8]{1,0:T(8,128)(2,1)}), bf16[4,8]{1,0}) all-gather-start(%x)",
        "  %b = bf16[4,8]{1,0:T(8,128)(2,1)S(1)} all-gather-done(%a)",
        "  ROOT %c = (f32[2]{0:T(128)}, s32[3]{0:T(128)}) all-reduce(%x, %y)",
        "  %d = f32[1000]{0} add(%all-reduce.1, %x)",
    ]
    assert count_collectives(lines) == {"all-gather": 1, "all-reduce": 1}
    assert moved_bytes(lines) == 4 * 8 * 2 + 2 * 4 + 3 * 4


def test_kernels_of_a_round_count_as_often_as_they_run() -> None:
    times = 'backend_config={"known_trip_count":{"n":"3"}}'
    text = f"""HloModule toy

%inner (p: f32[2]) -> f32[2] {{
  %p = f32[2]{{0}} parameter(0)
  %twice = f32[2]{{0}} fusion(%p), kind=kLoop, calls=%fused
  ROOT %copy = f32[2]{{0}} copy(%twice)
}}

%goes_on (p: f32[2]) -> pred[] {{
  %p = f32[2]{{0}} parameter(0)
  ROOT %less = pred[] fusion(%p), kind=kLoop, calls=%fused
}}

%round (p: f32[2]) -> f32[2] {{
  %p = f32[2]{{0}} parameter(0)
  %same = f32[2]{{0}} bitcast(%p)
  %dot = (f32[2]{{0}}, s8[64]{{0}}) custom-call(%same), custom_call_target="gemm"
  ROOT %loop = f32[2]{{0}} while(%p), condition=%goes_on, body=%inner, {times}
}}

ENTRY %main (p: f32[2]) -> f32[2] {{
  %p = f32[2]{{0}} parameter(0)
  %before = f32[2]{{0}} fusion(%p), kind=kLoop, calls=%fused
  ROOT %rounds = f32[2]{{0}} while(%before), condition=%goes_on, body=%round
}}
"""
    assert count_kernels(text) == 1 + 3 * (2 + 1) + 1
