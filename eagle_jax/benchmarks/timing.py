"""Timers of decoding: whole loops, and their parts in loops of their own.

Every figure comes from a compiled loop with a carried dependence; the programs are run
in turn, over and over, so that differences compare neighbours in time.
"""

import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from eagle_jax.config import TreeConfig
from eagle_jax.decoding import autoregressive, speculative
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.requests import Requests
from eagle_jax.decoding.state import DecodeState
from eagle_jax.drafting import TreeDrafter
from eagle_jax.interface import Draws, Params, Target

Body = Callable[[Params, DecodeState, jax.Array], jax.Array]
"""A function from parameters, a state and roots `[B]` to a `witness` of its work."""

Name = TypeVar("Name", bound=Hashable)


def in_turn(
    programs: Mapping[Name, Callable[[], float]],
    repeats: int,
    *,
    measured: Callable[[int], None] = lambda done: None,
) -> dict[Name, list[float]]:
    """Runs all programs in turn, over and over.

    Args:
        programs: The programs by name, each of which returns a time in seconds.
        repeats: The number of measurements per program; a call before them compiles it.
        measured: Called with the number of finished repeats.

    Returns:
        The times of each program, in seconds.
    """
    for program in programs.values():
        program()  # Compiles, and touches all memory once.
    times: dict[Name, list[float]] = {name: [] for name in programs}
    for repeat in range(repeats):
        for name, program in programs.items():
            times[name].append(program())
        measured(repeat + 1)
    return times


def time_decoding(
    decoder: Decoder, params: Params, requests: Requests, *, num_slots: int
) -> tuple[Callable[[], float], DecodeState]:
    """Returns a timer of one round, or of one token without a drafter, in seconds.

    Args:
        decoder: The decoder. Static.
        params: The parameters of target and drafter.
        requests: The requests, `B` rows, of which the longest says how many steps are
            timed.
        num_slots: The number of cache slots, `S`. Static.

    Returns:
        The timer, and the state in which its rounds begin.
    """
    library = autoregressive if decoder.drafter is None else speculative

    def prefill() -> DecodeState:
        state = library.prefill(decoder, params, requests, num_slots=num_slots)
        return jax.block_until_ready(state)

    def run() -> float:
        state = prefill()
        started = time.perf_counter()
        state = jax.block_until_ready(library.decode(decoder, params, state))
        return (time.perf_counter() - started) / max(int(state.num_rounds.max()), 1)

    return run, prefill()


def verify_body(target: Target, num_nodes: int) -> Body:
    """Returns the target's call of a round, whose cost does not depend on the mask."""

    def body(params: Params, state: DecodeState, root: jax.Array) -> jax.Array:
        tokens = jnp.broadcast_to(root[:, None], (root.shape[0], num_nodes))
        positions = jnp.broadcast_to((state.lengths - 1)[:, None], tokens.shape)
        visible = jnp.tri(num_nodes, dtype=bool)
        mask = jnp.broadcast_to(visible, (root.shape[0], *visible.shape))
        output = target.forward(
            params.target, tokens, positions, mask, state.target_cache
        )
        return witness(target.unembed(params.target, output.hidden), output)

    return body


def draft_calls(drafter: TreeDrafter) -> Body:
    """Returns the calls of a draft model in one round, without growing a tree.

    Args:
        drafter: The drafter, whose tree says how many nodes each call has.
    """
    model, tree = drafter.model, drafter.tree
    if isinstance(tree, TreeConfig):
        sizes = [tree.width] * (drafter.depth - 1)
    else:
        sizes = [len(level.inner) for level in tree.levels[:-1]]

    def body(params: Params, state: DecodeState, root: jax.Array) -> jax.Array:
        weights, drafted = params.drafter, state.drafter_state
        # The switch's state has that of its draft model inside.
        drafted = getattr(drafted, "model", drafted)
        output, drafted = model.read(weights, drafted, root)
        result = witness(model.logits(weights, output[:, None], level=1), drafted)
        outputs, earlier, seen = output[:, None], None, 0
        for level, size in enumerate(sizes, 1):
            shape = (root.shape[0], size)
            # It is never true, but the compiler cannot know: the next call must wait.
            tokens = jnp.broadcast_to(root[:, None], shape) + (result > 1e30)
            above = jnp.broadcast_to(outputs[:, :1], (*shape, outputs.shape[-1]))
            visible = jnp.tri(size, size + seen, seen, dtype=bool)
            visible = jnp.broadcast_to(visible, (root.shape[0], *visible.shape))
            outputs, earlier = model.step(
                weights, drafted, tokens, above, visible, earlier, level=level
            )
            logits = model.logits(weights, outputs, level=level + 1)
            result, seen = witness(logits, earlier), seen + size
        return result

    return body


def num_nodes(decoder: Decoder, params: Params, state: DecodeState) -> int:
    """Returns how many nodes the target verifies in a round, `N`, 1 without a drafter.

    Nothing is computed.
    """
    if decoder.drafter is None:
        return 1
    draws = Draws(sampling=state.rows.sampling, noise=None, keys=state.rows.keys)
    tree, _ = jax.eval_shape(
        decoder.drafter.propose, params.drafter, state.drafter_state, state.root, draws
    )
    return tree.tokens.shape[1]


def time_loop(
    body: Body, params: Params, state: DecodeState, iterations: int
) -> Callable[[], float]:
    """Returns a function that times one call of `body`, in seconds."""

    @jax.jit
    def loop(params: Params, state: DecodeState) -> jax.Array:
        def step(_: jax.Array, root: jax.Array) -> jax.Array:
            # It is never true, but the compiler cannot know: the next call must wait.
            is_huge = body(params, state, root) > 1e30
            return jnp.where(is_huge, root + 1, root)

        return jax.lax.fori_loop(0, iterations, step, state.root)

    def run() -> float:
        started = time.perf_counter()
        jax.block_until_ready(loop(params, state))
        return (time.perf_counter() - started) / iterations

    return run


def witness(*results: Any) -> jax.Array:
    """Returns one number that needs every result in full."""
    leaves = jax.lax.optimization_barrier(jax.tree.leaves(results))
    return sum((x.reshape(-1)[0].astype(jnp.float32) for x in leaves), jnp.zeros(()))
