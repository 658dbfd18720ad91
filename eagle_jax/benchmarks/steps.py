"""The cost of the steps of one run, for its record."""

from collections.abc import Callable

from eagle_jax.benchmarks.timing import (
    draft_body,
    medians,
    num_nodes,
    time_decoding,
    time_loop,
    verify_body,
)
from eagle_jax.decoding import autoregressive, speculative
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.requests import Requests, round_up_slots
from eagle_jax.interface import Params

StepSeconds = dict[str, float | None]

_ITERATIONS = 8


def measure_steps(
    decoder: Decoder,
    params: Params,
    requests: Requests,
    *,
    max_length: int,
    repeats: int = 5,
) -> StepSeconds:
    """Times the steps of a batch: medians over repeats, compilation left out.

    A round and a token are timed as the loops that decode texts run them; a round's
    parts in loops of their own, right after the prompts.

    Args:
        decoder: The decoder, of which only tokens are timed if it has no drafter.
            Static.
        params: The parameters of target and drafter.
        requests: The requests, `B` rows, which shall not stop early.
        max_length: The tokens of prompt and output, as in the texts that are timed.
        repeats: The number of measurements per figure.

    Returns:
        Seconds per step of the whole batch: "token" of plain decoding, "draft" and
        "verify" of a round, and "commit" for the rest of a round. It is `None` for
        steps that do not exist: rounds without a drafter, any in texts of one token.
    """
    seconds: StepSeconds = dict.fromkeys(("draft", "verify", "commit", "token"))
    if int((requests.max_length - requests.prompt_lengths).max()) == 1:
        return seconds
    longest = max(max_length, requests.prompts.shape[1])
    settings = (decoder, params, requests)
    slots = round_up_slots(longest, depth=0)
    programs: dict[str, Callable[[], float]] = {
        "token": time_decoding(autoregressive, *settings, num_slots=slots)
    }
    if decoder.drafter is None:
        return seconds | medians(programs, repeats)
    slots = round_up_slots(longest, depth=decoder.depth)
    programs["round"] = time_decoding(speculative, *settings, num_slots=slots)
    state = speculative.prefill(*settings, num_slots=slots)
    parts = {
        "draft": draft_body(decoder),
        "verify": verify_body(decoder.target, num_nodes(decoder, params, state)),
    }
    for name, body in parts.items():
        programs[name] = time_loop(body, params, state, _ITERATIONS)
    timed = medians(programs, repeats)
    rest = max(timed.pop("round") - timed["draft"] - timed["verify"], 0.0)
    return seconds | timed | {"commit": rest}
