"""The cost of a round of every method, beside the model calls that it needs."""

import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.benchmarks.rounds import Spread
from eagle_jax.benchmarks.timing import (
    Body,
    in_turn,
    time_decoding,
    time_loop,
    verify_body,
    witness,
)
from eagle_jax.config import TreeConfig
from eagle_jax.decoding import autoregressive, speculative
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.requests import Requests
from eagle_jax.decoding.state import DecodeState
from eagle_jax.drafting import TreeDrafter, find_tree_drafter
from eagle_jax.interface import Params

FIGURES = ("round", "bare verify", "bare drafts", "overhead", "round / token")
"""The figures of a method; the last two are ratios, the others milliseconds."""


def time_methods(
    methods: Mapping[str, tuple[Decoder, Params]],
    requests: Requests,
    *,
    num_slots: int,
    iterations: int = 24,
    repeats: int = 9,
    report: Callable[[int], None] = lambda done: None,
) -> dict[str, dict[str, Spread]]:
    """Times a round of every method, all in turn.

    Args:
        methods: Decoders with their parameters, by name; they share their target.
        requests: The requests, `B` rows of at least `iterations` new tokens.
        num_slots: The number of cache slots, `S`.
        iterations: The number of calls per measurement.
        repeats: The number of measurements per figure.
        report: Called with the number of finished repeats.

    Returns:
        For every method its `FIGURES`: "bare verify" is the target's call over as many
        rows as the tree has nodes, "bare drafts" the draft model's calls alone, 0 for
        methods without one; "overhead" is the round over their sum.
    """
    programs: dict[tuple[str, str], Callable[[], float]] = {}
    for name, (decoder, params) in methods.items():
        time = functools.partial(time_decoding, num_slots=num_slots)
        programs["token", "token"] = time(autoregressive, decoder, params, requests)
        programs[name, "round"] = time(speculative, decoder, params, requests)
        state = speculative.prefill(decoder, params, requests, num_slots=num_slots)
        verify = verify_body(decoder.target, getattr(decoder.drafter, "num_nodes", 1))
        programs[name, "bare verify"] = time_loop(verify, params, state, iterations)
        grower = find_tree_drafter(decoder.drafter)
        if grower is not None:
            body = draft_calls(grower)
            programs[name, "bare drafts"] = time_loop(body, params, state, iterations)
    found = in_turn(programs, repeats, measured=report)
    times = {key: 1e3 * np.array(seconds) for key, seconds in found.items()}
    token = times.pop(("token", "token"))
    return {name: _figures(name, times, token) for name in methods}


def _figures(
    name: str, times: dict[tuple[str, str], np.ndarray], token: np.ndarray
) -> dict[str, Spread]:
    measured, verify = times[name, "round"], times[name, "bare verify"]
    drafts = times.get((name, "bare drafts"), np.zeros_like(verify))
    columns = (measured, verify, drafts, measured / (verify + drafts), measured / token)
    found = zip(FIGURES, columns, strict=True)
    return {figure: Spread.of(values.tolist()) for figure, values in found}


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
