"""What the steps of one run cost, for its record."""

from collections.abc import Callable

import jax

from eagle_jax.decoding import speculative
from eagle_jax.decoding.requests import Requests, round_up_slots
from eagle_jax.decoding.speculative import AcceptanceRule
from eagle_jax.decoding.state import DecodeState
from eagle_jax.evaluation.timing import (
    draft_body,
    medians,
    time_loop,
    time_rounds,
    time_tokens,
    verify_body,
)
from eagle_jax.interface import Drafter, Draws, Params, Target

StepSeconds = dict[str, float | None]

_ITERATIONS = 8


def measure_steps(
    target: Target,
    drafter: Drafter | None,
    params: Params,
    requests: Requests,
    *,
    max_length: int,
    acceptance: AcceptanceRule,
    repeats: int = 5,
) -> StepSeconds:
    """Times the steps of a batch: medians over repeats, compilation left out.

    A round and a token are timed as the loops that decode texts run them; a round's
    parts in loops of their own, right behind the prompts.

    Args:
        target: Static.
        drafter: Static; `None` where nothing is drafted.
        params: Of both.
        requests: `B` rows, which shall not stop early.
        max_length: Prompt plus output, as in the texts that are timed.
        acceptance: Static.
        repeats: Measurements per figure.

    Returns:
        Seconds per step of the whole batch: "token" of plain decoding, "draft" and
        "verify" of a round, and "commit", which is what else a round takes. `None`
        for what does not exist: rounds without a drafter, steps of texts of one token.
    """
    seconds: StepSeconds = dict.fromkeys(("draft", "verify", "commit", "token"))
    if int((requests.max_length - requests.prompt_lengths).max()) == 1:
        return seconds
    longest = max(max_length, requests.prompts.shape[1])
    slots, greedy = round_up_slots(longest, depth=0), acceptance == "greedy"
    programs: dict[str, Callable[[], float]] = {
        "token": time_tokens(target, params, requests, slots, greedy)
    }
    if drafter is None:
        return seconds | medians(programs, repeats)
    slots = round_up_slots(longest, depth=drafter.depth)
    settings = (target, drafter, params, requests)
    state = speculative.prefill(*settings, num_slots=slots, acceptance=acceptance)
    body = draft_body(
        drafter,
        requests,
        acceptance,
        speculative.vocab_size(target, params.target, state),
    )
    num_nodes = _num_nodes(drafter, params, requests, state)
    programs["round"] = time_rounds(*settings, slots, acceptance)
    parts = {
        "draft": (body, params.drafter),
        "verify": (verify_body(target, num_nodes), params.target),
    }
    for name, (body, weights) in parts.items():
        programs[name] = time_loop(body, (weights, state), _ITERATIONS)
    timed = medians(programs, repeats)
    rest = max(timed.pop("round") - timed["draft"] - timed["verify"], 0.0)
    return seconds | timed | {"commit": rest}


def _num_nodes(
    drafter: Drafter, params: Params, requests: Requests, state: DecodeState
) -> int:
    """Returns `N` of what a drafter proposes; nothing is computed."""
    draws = Draws(sampling=requests.sampling, noise=None, keys=requests.keys)
    tree, _ = jax.eval_shape(
        drafter.propose, params.drafter, state.drafter_state, state.root, draws
    )
    return tree.tokens.shape[1]
