"""The cost of a round of every method, beside the model calls that it needs.

Every figure comes from a compiled loop with a carried dependence; the programs are
timed in turn, over and over, so that a ratio compares neighbours in time.
"""

import dataclasses
import statistics
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
from eagle_jax.decoding import autoregressive, speculative
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.requests import Requests, make_requests
from eagle_jax.drafting import find_tree_drafter
from eagle_jax.interface import Params
from eagle_jax.methods import PLAIN

FIGURES = ("round", "bare verify", "bare drafts", "overhead", "round / token")
"""The figures of a method; the last two are ratios, the others milliseconds."""

"""The name of plain decoding, whose round is one token."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spread:
    """The summary of repeated measurements, in milliseconds or the figure's own unit.

    Attributes:
        median: The median.
        low: The smallest measurement.
        high: The largest measurement.
    """

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> "Spread":
        """Returns the summary of measurements."""
        return cls(median=statistics.median(values), low=min(values), high=max(values))


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundCost:
    """What a round of a method costs.

    Attributes:
        num_nodes: The number of nodes that the target verifies, `N`.
        figures: Its `FIGURES`: "bare verify" is the target's call over as many rows,
            "bare drafts" the draft model's calls alone, 0 without one; "overhead" is
            the round over their sum, and "round / token" over one of plain decoding.
    """

    num_nodes: int
    figures: dict[str, Spread]


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
    methods: Mapping[str, tuple[Decoder, Params]],
    requests: Requests,
    *,
    num_slots: int,
    iterations: int = 24,
    repeats: int = 9,
    report: Callable[[int], None] = lambda done: None,
) -> dict[str, RoundCost]:
    """Times a token of plain decoding and a round of every method, all in turn.

    Args:
        methods: Decoders with their parameters, by name; they share their target.
        requests: The requests, `B` rows of more than `iterations` new tokens.
        num_slots: The number of cache slots, `S`.
        iterations: The number of calls per measurement.
        repeats: The number of measurements per figure.
        report: Called with the number of finished repeats.

    Returns:
        The cost of each by its name, plain decoding first.
    """
    first, weights = next(iter(methods.values()))
    plain = dataclasses.replace(first, drafter=None), weights
    programs: dict[tuple[str, str], Callable[[], float]] = {}
    nodes: dict[str, int] = {}
    for name, (decoder, params) in {PLAIN.name: plain, **methods}.items():
        library = autoregressive if decoder.drafter is None else speculative
        settings = (decoder, params, requests)
        programs[name, "round"] = time_decoding(library, *settings, num_slots=num_slots)
        state = library.prefill(*settings, num_slots=num_slots)
        nodes[name] = num_nodes(decoder, params, state)
        bodies = {"bare verify": verify_body(decoder.target, nodes[name])}
        grower = find_tree_drafter(decoder.drafter)
        if grower is not None:
            bodies["bare drafts"] = draft_calls(grower)
        for figure, body in bodies.items():
            programs[name, figure] = time_loop(body, params, state, iterations)
    found = in_turn(programs, repeats, measured=report)
    times = {key: 1e3 * np.array(seconds) for key, seconds in found.items()}
    return {
        name: RoundCost(num_nodes=count, figures=_figures(name, times))
        for name, count in nodes.items()
    }


def _figures(name: str, times: dict[tuple[str, str], np.ndarray]) -> dict[str, Spread]:
    measured, verify = times[name, "round"], times[name, "bare verify"]
    drafts = times.get((name, "bare drafts"), np.zeros_like(verify))
    token = times[PLAIN.name, "round"]
    columns = (measured, verify, drafts, measured / (verify + drafts), measured / token)
    found = zip(FIGURES, columns, strict=True)
    return {figure: Spread.of(values.tolist()) for figure, values in found}
