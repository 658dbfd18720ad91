"""What a round's parts cost on a machine: verifying by width, drafting by level.

Each figure is the median over compiled loops with a carried dependence, timed in turn.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.config import TreeConfig
from eagle_jax.decoding import autoregressive, speculative
from eagle_jax.decoding.requests import Requests
from eagle_jax.decoding.sampling import draft_sampling
from eagle_jax.decoding.speculative import AcceptanceRule
from eagle_jax.decoding.state import DecodeState, start
from eagle_jax.evaluation.recording import all_candidates
from eagle_jax.interface import Drafter, Params, Target

Body = Callable[[Any, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Seconds per call, for a batch.

    Attributes:
        token: A step of plain decoding.
        verify: By number of nodes, the target's forward and unembed over them.
        read: By width, drafting the first level: what was accepted is read.
        step: By width, drafting each further level.
        overhead: Rest of a round, whatever its tree.
    """

    token: float
    verify: dict[int, float]
    read: dict[int, float]
    step: dict[int, float]
    overhead: float = 0.0

    def round_seconds(self, tree: TreeConfig) -> float:
        """Returns the expected duration of a round; sizes between are interpolated."""
        nodes = sorted(self.verify)
        verify = np.interp(tree.num_nodes, nodes, [self.verify[n] for n in nodes])
        further = (tree.levels - 1) * self.step[tree.width]
        return float(verify) + self.read[tree.width] + further + self.overhead


def time_steps(
    target: Target,
    drafter_of: Callable[[TreeConfig], Drafter],
    params: Params,
    requests: Requests,
    *,
    num_slots: int,
    acceptance: AcceptanceRule,
    nodes: Sequence[int],
    widths: Sequence[int],
    depth: int,
    repeats: int = 7,
    report: Callable[[int], None] = lambda done: None,
) -> StepCosts:
    """Times the parts of a round beside a cache of realistic length.

    One whole round is timed too: what it takes beside its parts is the overhead.

    Args:
        target: Static.
        drafter_of: Makes the drafter that grows a tree.
        params: Of both.
        requests: `B` rows; their prompts fill the caches, and whole steps are timed
            over the tokens that they ask for. Loops of parts are as long.
        num_slots: `S`.
        acceptance: Static.
        nodes: Numbers of nodes to verify.
        widths: `K` of the trees to draft.
        depth: Levels over which the cost of one is averaged; each adds to the time
            that compiling takes.
        repeats: Measurements per figure.
        report: Called with the number of programs compiled so far, `num_programs` in
            all.
    """
    greedy = acceptance == "greedy"
    begin = jax.jit(start, static_argnums=0, static_argnames=("num_slots", "greedy"))
    state, features = begin(
        target, params.target, requests, num_slots=num_slots, greedy=greedy
    )
    iterations = int(requests.max_new_tokens.max()) - 1
    whole = _middle_tree(nodes, widths, depth)
    settings = (target, drafter_of(whole), params, requests)
    programs: dict[tuple[str, int], Callable[[], float]] = {
        ("token", 0): _time_tokens(target, params, requests, num_slots, greedy),
        ("round", 0): _time_rounds(*settings, num_slots, acceptance),
    }
    for count in sorted({*nodes, whole.num_nodes}):
        inputs = (params.target, state)
        programs["verify", count] = _timed(_verify(target, count), inputs, iterations)
    for width in widths:
        for name, levels in (("read", 1), ("draft", depth)):
            # Reranking sorts no more than a real tree's nodes.
            tree = all_candidates(levels, width)
            kept = max(min(tree.num_nodes, max(nodes)), levels + 1)
            drafter = drafter_of(dataclasses.replace(tree, num_nodes=kept))
            drafted = _prefill(drafter, params, requests, features, num_slots)
            inputs = (params.drafter, dataclasses.replace(state, drafter_state=drafted))
            body = _draft(drafter, requests)
            programs[name, width] = _timed(body, inputs, iterations)
    return _costs(_medians(programs, repeats, report), whole, depth)


def num_programs(nodes: Sequence[int], widths: Sequence[int], depth: int) -> int:
    """Returns how many programs `time_steps` compiles."""
    verified = {*nodes, _middle_tree(nodes, widths, depth).num_nodes}
    return 2 + len(verified) + 2 * len(widths)


def _middle_tree(nodes: Sequence[int], widths: Sequence[int], depth: int) -> TreeConfig:
    """Returns the tree of the whole round: of middle width, and as few nodes."""
    width = sorted(widths)[len(widths) // 2]
    most = min(all_candidates(depth, width).num_nodes, max(nodes))
    count = max(min(most, sorted(nodes)[len(nodes) // 2]), 2)
    return TreeConfig(num_nodes=count, depth=depth, width=width)


def _medians(
    programs: Mapping[tuple[str, int], Callable[[], float]],
    repeats: int,
    report: Callable[[int], None],
) -> dict[tuple[str, int], float]:
    """Runs all programs in turn, over and over."""
    for number, program in enumerate(programs.values(), 1):
        program()  # Compiles, and touches all memory once.
        report(number)
    times: dict[tuple[str, int], list[float]] = {key: [] for key in programs}
    for _ in range(repeats):
        for key, program in programs.items():
            times[key].append(program())
    return {key: statistics.median(values) for key, values in times.items()}


def _costs(
    seconds: Mapping[tuple[str, int], float], whole: TreeConfig, depth: int
) -> StepCosts:
    """Tells a round's parts apart."""

    def by_size(name: str) -> dict[int, float]:
        return {size: x for (part, size), x in seconds.items() if part == name}

    read, draft = by_size("read"), by_size("draft")
    further = {k: (draft[k] - read[k]) / max(depth - 1, 1) for k in read}
    parts = StepCosts(
        token=seconds["token", 0],
        verify=by_size("verify"),
        read=read,
        step={k: max(x, 0.0) for k, x in further.items()},
    )
    rest = seconds["round", 0] - parts.round_seconds(whole)
    return dataclasses.replace(parts, overhead=max(rest, 0.0))


def _time_tokens(
    target: Target, params: Params, requests: Requests, num_slots: int, greedy: bool
) -> Callable[[], float]:
    """Returns what times a step of plain decoding, seconds."""

    def run() -> float:
        state = autoregressive.prefill(
            target, params.target, requests, num_slots=num_slots, greedy=greedy
        )
        jax.block_until_ready(state)
        started = time.perf_counter()
        state = autoregressive.decode(
            target, params.target, requests, state, greedy=greedy
        )
        jax.block_until_ready(state)
        return (time.perf_counter() - started) / max(int(state.num_rounds.max()), 1)

    return run


def _time_rounds(
    target: Target,
    drafter: Drafter,
    params: Params,
    requests: Requests,
    num_slots: int,
    acceptance: AcceptanceRule,
) -> Callable[[], float]:
    """Returns what times a whole round, seconds."""
    settings = (target, drafter, params, requests)

    def run() -> float:
        state = speculative.prefill(
            *settings, num_slots=num_slots, acceptance=acceptance
        )
        jax.block_until_ready(state)
        started = time.perf_counter()
        state = speculative.decode(*settings, state, acceptance=acceptance)
        jax.block_until_ready(state)
        return (time.perf_counter() - started) / max(int(state.num_rounds.max()), 1)

    return run


def _prefill(
    drafter: Drafter,
    params: Params,
    requests: Requests,
    features: jax.Array,
    num_slots: int,
) -> Any:
    @jax.jit
    def prefill(weights: Any, features: jax.Array) -> Any:
        return drafter.prefill(
            weights,
            drafter.init_state(requests.prompts.shape[0], num_slots),
            requests.prompts,
            features,
            requests.prompt_lengths,
        )

    return prefill(params.drafter, features)


def _verify(target: Target, num_nodes: int) -> Body:
    """The target's call of a round; what the mask shows does not change its cost."""

    def body(inputs: tuple[Any, DecodeState], root: jax.Array) -> jax.Array:
        params, state = inputs
        tokens = jnp.broadcast_to(root[:, None], (root.shape[0], num_nodes))
        positions = jnp.broadcast_to((state.lengths - 1)[:, None], tokens.shape)
        visible = jnp.tri(num_nodes, dtype=bool)
        mask = jnp.broadcast_to(visible, (root.shape[0], *visible.shape))
        output = target.forward(params, tokens, positions, mask, state.target_cache)
        return _witness(target.unembed(params, output.hidden), output)

    return body


def _draft(drafter: Drafter, requests: Requests) -> Body:
    """The drafting of a round, with its cache update."""

    def body(inputs: tuple[Any, DecodeState], root: jax.Array) -> jax.Array:
        params, state = inputs
        sampling = draft_sampling(requests, state.lengths - 1)
        return _witness(drafter.propose(params, state.drafter_state, root, sampling))

    return body


def _timed(
    body: Body, inputs: tuple[Any, DecodeState], iterations: int
) -> Callable[[], float]:
    """Returns what times one call of `body`, seconds."""

    @jax.jit
    def loop(inputs: tuple[Any, DecodeState]) -> jax.Array:
        def step(_: jax.Array, root: jax.Array) -> jax.Array:
            # Never true, but the compiler cannot know: the next call must wait.
            is_huge = body(inputs, root) > 1e30
            return jnp.where(is_huge, root + 1, root)

        return jax.lax.fori_loop(0, iterations, step, inputs[1].root)

    def run() -> float:
        started = time.perf_counter()
        jax.block_until_ready(loop(inputs))
        return (time.perf_counter() - started) / iterations

    return run


def _witness(*results: Any) -> jax.Array:
    """Returns one number that needs every result in full."""
    leaves = jax.lax.optimization_barrier(jax.tree.leaves(results))
    return sum((x.reshape(-1)[0].astype(jnp.float32) for x in leaves), jnp.zeros(()))
