"""The cost of a round of every method, beside the model calls that it needs.

Every figure comes from a compiled loop with a carried dependence; the programs are
timed in turn, over and over, so that a ratio compares neighbours in time.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.config import TreeConfig
from eagle_jax.decoding import speculative
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.requests import Requests
from eagle_jax.decoding.state import DecodeState
from eagle_jax.drafting import TreeDrafter, find_tree_drafter
from eagle_jax.engine import Pair
from eagle_jax.engine.ladder import num_nodes
from eagle_jax.engine.options import options_of
from eagle_jax.interface import Drafter, Params, Target
from eagle_jax.methods import PLAIN

Body = Callable[[Params, DecodeState, jax.Array], jax.Array]
"""A function from parameters, a state and roots `[B]` to a `_witness` of its work."""

FIGURES = ("round", "bare calls", "overhead", "round / token")
"""The figures of a method; the last two are ratios, the others milliseconds.

"bare calls" are the draft model's calls, if there is one, and then the target's over as
many rows as the method has nodes, in one loop, so that neither finds its weights in a
cache that the other would have used; "overhead" is the round over the bare calls, and
"round / token" over one of plain decoding.
"""


def time_rounds(
    pairs: Mapping[str, Pair],
    requests: Requests,
    *,
    num_slots: int,
    iterations: int,
    repeats: int,
    report: Callable[[int], None],
) -> dict[str, dict[str, float]]:
    """Times a token of plain decoding and a round of every method, all in turn.

    Args:
        pairs: The methods' pairs by name; they share the target's weights.
        requests: The requests, `B` rows of more than `iterations` new tokens.
        num_slots: The number of cache slots, `S`.
        iterations: The number of calls per measurement.
        repeats: The number of measurements per figure.
        report: Called with the number of finished repeats.

    Returns:
        By each method's name, plain decoding first, the medians of its `FIGURES`.
    """
    plain = next(iter(pairs.values())).with_drafter(None)
    programs: dict[tuple[str, str], Callable[[], float]] = {}
    for name, pair in {PLAIN.name: plain, **pairs}.items():
        decoder = Decoder(target=pair.target, drafter=pair.drafter, acceptance="greedy")
        programs[name, "round"], state = time_decoding(
            decoder, pair.params, requests, num_slots=num_slots
        )
        bodies = [_verify_body(pair.target, num_nodes(pair.drafter))]
        grower = find_tree_drafter(pair.drafter)
        if grower is not None:
            bodies.insert(0, _draft_calls(grower))
        programs[name, "calls"] = _time_loop(bodies, pair, state, iterations)
    for program in programs.values():
        program()  # The first run touches all memory.
    turns = []
    for repeat in range(repeats):
        turns.append([1e3 * program() for program in programs.values()])
        report(repeat + 1)
    times = dict(zip(programs, np.array(turns).T, strict=True))
    costs: dict[str, dict[str, float]] = {}
    for name in (PLAIN.name, *pairs):
        measured, calls = times[name, "round"], times[name, "calls"]
        ratios = (measured / calls, measured / times[PLAIN.name, "round"])
        medians = map(np.median, (measured, calls, *ratios))
        costs[name] = dict(zip(FIGURES, map(float, medians), strict=True))
    return costs


def time_decoding(
    decoder: Decoder, params: Params, requests: Requests, *, num_slots: int
) -> tuple[Callable[[], float], DecodeState]:
    """Returns a timer of one round, or of one token without a drafter, in seconds.

    The longest request says how many steps are timed. The state in which they begin is
    returned too.
    """

    def prefill() -> DecodeState:
        state = speculative.prefill(decoder, params, requests, num_slots=num_slots)
        return jax.block_until_ready(state)

    first = prefill()
    lowered = speculative.decode.lower(decoder, params, first)
    decode = lowered.compile(_options(decoder.drafter, first))

    def run() -> float:
        state = prefill()
        started = time.perf_counter()
        state = jax.block_until_ready(decode(params, state))
        return (time.perf_counter() - started) / max(int(state.num_rounds.max()), 1)

    return run, first


def time_drafts(pair: Pair, state: DecodeState, iterations: int) -> Callable[[], float]:
    """Returns a timer of the draft model's calls of a round, in seconds."""
    grower = find_tree_drafter(pair.drafter)
    assert grower is not None, "this method has no draft model"
    return _time_loop([_draft_calls(grower)], pair, state, iterations)


def _verify_body(target: Target, num_nodes: int) -> Body:
    """Returns the target's call of a round, whose cost does not depend on the mask."""

    def body(params: Params, state: DecodeState, root: jax.Array) -> jax.Array:
        tokens = jnp.broadcast_to(root[:, None], (root.shape[0], num_nodes))
        positions = jnp.broadcast_to((state.lengths - 1)[:, None], tokens.shape)
        visible = jnp.tri(num_nodes, dtype=bool)
        mask = jnp.broadcast_to(visible, (root.shape[0], *visible.shape))
        output = target.forward(
            params.target, tokens, positions, mask, state.target_cache
        )
        return _witness(target.unembed(params.target, output.hidden), output)

    return body


def _draft_calls(drafter: TreeDrafter) -> Body:
    """Returns a draft model's calls of one round, over as many nodes as in its tree."""
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
        result = _witness(model.logits(weights, output[:, None], level=1), drafted)
        outputs, earlier, seen = output[:, None], None, 0
        for level, size in enumerate(sizes, 1):
            shape = (root.shape[0], size)
            tokens = _waiting(jnp.broadcast_to(root[:, None], shape), result)
            above = jnp.broadcast_to(outputs[:, :1], (*shape, outputs.shape[-1]))
            visible = jnp.tri(size, size + seen, seen, dtype=bool)
            visible = jnp.broadcast_to(visible, (root.shape[0], *visible.shape))
            outputs, earlier = model.step(
                weights, drafted, tokens, above, visible, earlier, level=level
            )
            logits = model.logits(weights, outputs, level=level + 1)
            result, seen = _witness(logits, earlier), seen + size
        return result

    return body


def _time_loop(
    bodies: Sequence[Body], pair: Pair, state: DecodeState, iterations: int
) -> Callable[[], float]:
    """Returns a function that times the bodies, one after another, in seconds."""
    params = pair.params

    @jax.jit
    def loop(params: Params, state: DecodeState) -> jax.Array:
        def step(_: jax.Array, root: jax.Array) -> jax.Array:
            for body in bodies:
                root = _waiting(root, body(params, state, root))
            return root

        return jax.lax.fori_loop(0, iterations, step, state.root)

    program = loop.lower(params, state).compile(_options(pair.drafter, state))

    def run() -> float:
        started = time.perf_counter()
        jax.block_until_ready(program(params, state))
        return (time.perf_counter() - started) / iterations

    return run


def _options(drafter: Drafter | None, state: DecodeState) -> Any:
    return options_of(len(state.root) * num_nodes(drafter))


def _waiting(tokens: jax.Array, result: jax.Array) -> jax.Array:
    """Returns the tokens as they are, but not before the result of another call."""
    # It is never true, but the compiler cannot know.
    return jnp.where(result > 1e30, 0, tokens)


def _witness(*results: Any) -> jax.Array:
    """Returns one number that needs every result in full."""
    leaves = jax.lax.optimization_barrier(jax.tree.leaves(results))
    firsts = (x.reshape(-1)[0].astype(jnp.float32) for x in leaves)
    return sum(firsts, jnp.zeros((), jnp.float32))
