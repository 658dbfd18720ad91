"""What is read from a compiled program is there, and only inside its loops."""

import jax
import jax.numpy as jnp

from eagle_jax.testing.programs import find_copies, find_host_calls, loop_lines


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
