"""The cost of a round of every method, beside the model calls that it needs.

Every figure comes from a compiled loop with a carried dependence; the programs are
timed in turn, over and over, so that a ratio compares neighbours in time.
"""

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from eagle_jax.benchmarks.timing import (
    draft_calls,
    in_turn,
    num_nodes,
    time_decoding,
    time_loop,
    verify_body,
)
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.requests import Requests, make_requests
from eagle_jax.drafting import find_tree_drafter
from eagle_jax.generation.pairs import LoadedPair
from eagle_jax.methods import PLAIN

FIGURES = ("round", "bare verify", "bare drafts", "overhead", "round / token")
"""The figures of a method; the last two are ratios, the others milliseconds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundCost:
    """What a round of a method costs.

    Attributes:
        num_nodes: The number of nodes that the target verifies, `N`.
        figures: The measurements of its `FIGURES`: "bare verify" is the target's call
            over as many rows, "bare drafts" the draft model's calls alone, 0 without
            one; "overhead" is the round over their sum, and "round / token" over one
            of plain decoding.
    """

    num_nodes: int
    figures: dict[str, list[float]]


def arbitrary_requests(
    vocab_size: int, *, batch: int, prompt_length: int, new_tokens: int
) -> Requests:
    """Returns requests with the same arbitrary prompt in every row.

    Args:
        vocab_size: The number of tokens the target knows, `V`.
        batch: The number of rows, `B`.
        prompt_length: The number of tokens of the prompt.
        new_tokens: The number of tokens to generate.
    """
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
        programs[name, "round"], state = time_decoding(
            decoder, pair.params, requests, num_slots=num_slots
        )
        nodes[name] = num_nodes(decoder, pair.params, state)
        bodies = {"bare verify": verify_body(pair.target, nodes[name])}
        grower = find_tree_drafter(pair.drafter)
        if grower is not None:
            bodies["bare drafts"] = draft_calls(grower)
        for figure, body in bodies.items():
            programs[name, figure] = time_loop(body, pair.params, state, iterations)
    found = in_turn(programs, repeats, measured=report)
    times = {key: 1e3 * np.array(seconds) for key, seconds in found.items()}
    costs: dict[str, RoundCost] = {}
    for name, count in nodes.items():
        measured, verify = times[name, "round"], times[name, "bare verify"]
        drafts = times.get((name, "bare drafts"), np.zeros_like(verify))
        ratios = (measured / (verify + drafts), measured / times[PLAIN.name, "round"])
        columns = zip(FIGURES, (measured, verify, drafts, *ratios), strict=True)
        figures = {figure: values.tolist() for figure, values in columns}
        costs[name] = RoundCost(num_nodes=count, figures=figures)
    return costs
