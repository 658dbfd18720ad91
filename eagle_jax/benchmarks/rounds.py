"""The cost of a round of every method, beside the model calls that it needs.

Every figure comes from a compiled loop with a carried dependence; the programs are
timed in turn, over and over, so that a ratio compares neighbours in time.
"""

import dataclasses
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.config import TreeConfig
from eagle_jax.decoding import autoregressive, speculative
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.requests import Requests, make_requests
from eagle_jax.decoding.state import DecodeState
from eagle_jax.drafting import TreeDrafter, find_tree_drafter
from eagle_jax.generation.pairs import LoadedPair
from eagle_jax.interface import Params, Target
from eagle_jax.methods import PLAIN

Body = Callable[[Params, DecodeState, jax.Array], jax.Array]
"""A function from parameters, a state and roots `[B]` to a `_witness` of its work."""

Name = TypeVar("Name", bound=Hashable)

FIGURES = ("round", "bare verify", "bare calls", "overhead", "round / token")
"""The figures of a method; the last two are ratios, the others milliseconds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundCost:
    """What a round of a method costs.

    Attributes:
        num_nodes: The number of nodes that the target verifies, `N`.
        figures: The measurements of its `FIGURES`: "bare verify" is the target's call
            over as many rows, "bare calls" the draft model's calls and then the
            target's, in one loop, so that neither finds its weights in a cache that the
            other would have used; "overhead" is the round over the bare calls, and
            "round / token" over one of plain decoding.
    """

    num_nodes: int
    figures: dict[str, list[float]]


def arbitrary_requests(
    vocab_size: int, *, batch: int, prompt_length: int, new_tokens: int
) -> Requests:
    """Returns requests with the same arbitrary prompt in every row."""
    prompt = np.random.default_rng(0).integers(vocab_size, size=prompt_length)
    return make_requests(
        [prompt.tolist()] * batch,
        max_new_tokens=new_tokens,
        prompt_bucket=prompt_length,
    )


def time_rounds(
    pairs: Mapping[str, LoadedPair],
    requests: Requests,
    *,
    num_slots: int,
    iterations: int = 24,
    repeats: int = 9,
    report: Callable[[int], None] = lambda done: None,
) -> dict[str, RoundCost]:
    """Times a token of plain decoding and a round of every method, all in turn.

    Args:
        pairs: The methods' pairs by name; they share the target's weights.
        requests: The requests, `B` rows of more than `iterations` new tokens.
        num_slots: The number of cache slots, `S`.
        iterations: The number of calls per measurement.
        repeats: The number of measurements per figure.
        report: Called with the number of finished repeats.

    Returns:
        The cost of each by its name, plain decoding first.
    """
    plain = dataclasses.replace(next(iter(pairs.values())), drafter=None)
    programs: dict[tuple[str, str], Callable[[], float]] = {}
    nodes: dict[str, int] = {}
    for name, pair in {PLAIN.name: plain, **pairs}.items():
        decoder = Decoder(target=pair.target, drafter=pair.drafter, acceptance="greedy")
        programs[name, "round"], state = _time_decoding(
            decoder, pair.params, requests, num_slots=num_slots
        )
        nodes[name] = getattr(pair.drafter, "num_nodes", 1)  # The root alone.
        verify = _verify_body(pair.target, nodes[name])
        bodies = {"bare verify": verify}
        grower = find_tree_drafter(pair.drafter)
        if grower is not None:
            bodies["bare calls"] = _one_by_one(_draft_calls(grower), verify)
        for figure, body in bodies.items():
            programs[name, figure] = _time_loop(body, pair.params, state, iterations)
    found = _in_turn(programs, repeats, measured=report)
    times = {key: 1e3 * np.array(seconds) for key, seconds in found.items()}
    costs: dict[str, RoundCost] = {}
    for name, count in nodes.items():
        measured, verify = times[name, "round"], times[name, "bare verify"]
        calls = times.get((name, "bare calls"), verify)
        ratios = (measured / calls, measured / times[PLAIN.name, "round"])
        columns = zip(FIGURES, (measured, verify, calls, *ratios), strict=True)
        figures = {figure: values.tolist() for figure, values in columns}
        costs[name] = RoundCost(num_nodes=count, figures=figures)
    return costs


def _in_turn(
    programs: Mapping[Name, Callable[[], float]],
    repeats: int,
    *,
    measured: Callable[[int], None] = lambda done: None,
) -> dict[Name, list[float]]:
    """Runs all programs in turn, over and over, and returns the times of each.

    Args:
        programs: The programs by name, each of which returns a time in seconds.
        repeats: The number of measurements per program; a call before them compiles it.
        measured: Called with the number of finished repeats.
    """
    for program in programs.values():
        program()  # Compiles, and touches all memory once.
    times: dict[Name, list[float]] = {name: [] for name in programs}
    for repeat in range(repeats):
        for name, program in programs.items():
            times[name].append(program())
        measured(repeat + 1)
    return times


def _time_decoding(
    decoder: Decoder, params: Params, requests: Requests, *, num_slots: int
) -> tuple[Callable[[], float], DecodeState]:
    """Returns a timer of one round, or of one token without a drafter, in seconds.

    The longest request says how many steps are timed. The state in which they begin is
    returned too.
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


def _one_by_one(*bodies: Body) -> Body:
    """Returns a body that runs several, each after the one before."""

    def body(params: Params, state: DecodeState, root: jax.Array) -> jax.Array:
        result = jnp.zeros(())
        for one in bodies:
            result = one(params, state, _waiting(root, result))
        return result

    return body


def _time_loop(
    body: Body, params: Params, state: DecodeState, iterations: int
) -> Callable[[], float]:
    """Returns a function that times one call of `body`, in seconds."""

    @jax.jit
    def loop(params: Params, state: DecodeState) -> jax.Array:
        def step(_: jax.Array, root: jax.Array) -> jax.Array:
            return _waiting(root, body(params, state, root))

        return jax.lax.fori_loop(0, iterations, step, state.root)

    def run() -> float:
        started = time.perf_counter()
        jax.block_until_ready(loop(params, state))
        return (time.perf_counter() - started) / iterations

    return run


def _waiting(tokens: jax.Array, result: jax.Array) -> jax.Array:
    """Returns the tokens as they are, but not before the result of another call."""
    # It is never true, but the compiler cannot know.
    return tokens + (result > 1e30)


def _witness(*results: Any) -> jax.Array:
    """Returns one number that needs every result in full."""
    leaves = jax.lax.optimization_barrier(jax.tree.leaves(results))
    return sum((x.reshape(-1)[0].astype(jnp.float32) for x in leaves), jnp.zeros(()))
