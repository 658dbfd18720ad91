"""The costs of a round's parts on a machine: verifying by nodes, drafting by level."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from eagle_jax.benchmarks.timing import (
    draft_body,
    medians,
    time_decoding,
    time_loop,
    verify_body,
)
from eagle_jax.config import TreeConfig
from eagle_jax.decoding import autoregressive, speculative
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.requests import Requests
from eagle_jax.decoding.state import start
from eagle_jax.interface import Params
from eagle_jax.tuning.recording import all_candidates


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepCosts:
    """The seconds that the calls of a round take, for a batch.

    Attributes:
        token: The seconds of a step of plain decoding.
        verify: The seconds of the target's forward and unembed, by number of nodes.
        read: The seconds of drafting the first level, which reads the accepted tokens,
            by width.
        step: The seconds of drafting each further level, by width.
        overhead: The seconds of the rest of a round, whatever its tree.
    """

    token: float
    verify: dict[int, float]
    read: dict[int, float]
    step: dict[int, float]
    overhead: float = 0.0

    def round_seconds(self, tree: TreeConfig) -> float:
        """Returns the expected seconds of a round; sizes between are interpolated.

        Raises:
            KeyError: If no tree of this width was timed.
        """
        nodes = sorted(self.verify)
        verify = np.interp(tree.num_nodes, nodes, [self.verify[n] for n in nodes])
        further = (tree.levels - 1) * self.step[tree.width]
        return float(verify) + self.read[tree.width] + further + self.overhead


def time_steps(
    decoder_of: Callable[[TreeConfig], Decoder],
    params: Params,
    requests: Requests,
    *,
    num_slots: int,
    nodes: Sequence[int],
    widths: Sequence[int],
    depth: int,
    repeats: int = 7,
    report: Callable[[int], None] = lambda done: None,
) -> StepCosts:
    """Times the parts of a round beside a cache of realistic length.

    One whole round is timed too: the time it takes beside its parts is the overhead.

    Args:
        decoder_of: A function that returns the decoder which grows a tree.
        params: The parameters of target and drafter.
        requests: The requests, `B` rows; their prompts fill the caches, and whole steps
            are timed over the tokens that they ask for. Loops of parts are as long.
        num_slots: The number of cache slots, `S`.
        nodes: The numbers of nodes to verify.
        widths: The widths of the trees to draft, `K`.
        depth: The number of levels over which the cost of one is averaged; each adds to
            the time that compiling takes.
        repeats: The number of measurements per figure.
        report: Called with the number of programs compiled so far, `num_programs` in
            all.

    Returns:
        The costs, medians of the measurements.
    """
    whole = _middle_tree(nodes, widths, depth)
    decoder = decoder_of(whole)
    begin = jax.jit(start, static_argnums=0, static_argnames=("num_slots",))
    state, features = begin(decoder, params, requests, num_slots=num_slots)
    iterations = int(requests.max_new_tokens.max()) - 1
    programs: dict[tuple[str, int], Callable[[], float]] = {
        (name, 0): time_decoding(
            library, decoder, params, requests, num_slots=num_slots
        )
        for name, library in (("token", autoregressive), ("round", speculative))
    }
    for count in sorted({*nodes, whole.num_nodes}):
        programs["verify", count] = time_loop(
            verify_body(decoder.target, count), params, state, iterations
        )
    for width in widths:
        for name, levels in (("read", 1), ("draft", depth)):
            # Reranking must sort no more than a real tree's nodes.
            tree = all_candidates(levels, width)
            kept = max(min(tree.num_nodes, max(nodes)), levels + 1)
            decoder = decoder_of(dataclasses.replace(tree, num_nodes=kept))
            drafted = _prefill(decoder, params, requests, features, num_slots)
            begun = dataclasses.replace(state, drafter_state=drafted)
            programs[name, width] = time_loop(
                draft_body(decoder), params, begun, iterations
            )
    return _costs(medians(programs, repeats, report), whole, depth)


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


def _costs(
    seconds: Mapping[tuple[str, int], float], whole: TreeConfig, depth: int
) -> StepCosts:
    """Returns the costs of a round's parts from the times of the programs."""

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


def _prefill(
    decoder: Decoder,
    params: Params,
    requests: Requests,
    features: jax.Array,
    num_slots: int,
) -> Any:
    drafter = decoder.drafter
    assert drafter is not None

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
