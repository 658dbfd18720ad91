"""Loops that end early, without their number of steps holding up a GPU."""

import functools
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

State = TypeVar("State")


def while_at_most(
    most: int,
    cond: Callable[[State], jax.Array],
    body: Callable[[State], State],
    start: State,
) -> State:
    """Runs a loop as long as a condition holds, at most `most` times.

    XLA:GPU copies the condition of a `while` to the host before each step and waits for
    it. So GPUs take all steps, and those after the end change nothing; elsewhere the
    loop ends.

    >>> while_at_most(9, lambda x: x < 5, lambda x: x + 2, jnp.array(0))
    Array(6, dtype=int32, weak_type=True)

    Args:
        most: The number of steps after which the condition cannot hold. Static.
        cond: The condition, `[]` bool.
        body: The step.
        start: The state before the first step.

    Returns:
        The state after the last step.
    """

    def step(_: jax.Array, state: State) -> State:
        goes_on = cond(state)
        keep = functools.partial(jnp.where, goes_on)
        return jax.tree.map(keep, body(state), state)

    return jax.lax.platform_dependent(
        start,
        cuda=lambda start: jax.lax.fori_loop(0, most, step, start),
        default=lambda start: jax.lax.while_loop(cond, body, start),
    )
