"""What the author of a drafter runs once: does it keep the protocol?"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from eagle_jax import checked
from eagle_jax.decoding import autoregressive, speculative
from eagle_jax.decoding.decoder import AcceptanceRule, Decoder
from eagle_jax.decoding.growth import grow
from eagle_jax.decoding.requests import Requests, make_requests
from eagle_jax.decoding.speculative import Round
from eagle_jax.decoding.state import DecodeState
from eagle_jax.errors import InputError
from eagle_jax.interface import Drafter, Params, Target
from eagle_jax.testing.asserts import assert_same_tokens, assert_valid_tree, check
from eagle_jax.tree.structure import ROOT

# Prompts and numbers of new tokens: some texts end while others go on.
_TEXTS = (
    ([1, 2, 0, 1, 2], 18),
    ([2], 2),
    ([0, 1, 1, 2, 0, 1, 1], 18),
    ([1, 0], 9),
    ([0, 2, 2], 5),
)
_ORDERS = ((0, 1, 2, 3), (2, 4, 1, 0))
"""Two batches: texts 0 and 2 are in both, in other rows and beside other texts."""

_SHARED = (0, 2)


def assert_valid_drafter(
    drafter: Drafter,
    params: Any,
    target: Target,
    target_params: Any,
    vocab_size: int,
) -> None:
    """Checks all that the decoding loop takes for granted about a drafter.

    It decodes a few short texts in batches of four, at temperature 0 and 1, round by
    round.

    Args:
        drafter: The drafter.
        params: Its parameters; `()` without weights.
        target: A target that `assert_valid_target` passes; a `ToyTarget` serves a
            drafter that reads no features.
        target_params: The target's parameters.
        vocab_size: The number of tokens, `V`, at least 3.

    Raises:
        AssertionError: If the drafter breaks a rule; names the method, and the round
            and the row.
    """
    weights = Params(target=target_params, drafter=params)
    try:
        for batch in (4, 5):  # With two numbers of rows, no other axis is the batch.
            init = functools.partial(checked.init_state, drafter, batch, 64)
            jax.eval_shape(init)
        with jax.default_matmul_precision("highest"):
            for rule in ("greedy", "coupled"):
                decoder = Decoder(target=target, drafter=drafter, acceptance=rule)
                _check_decoding(decoder, weights, vocab_size)
    except InputError as error:
        raise AssertionError(str(error)) from error


def _check_decoding(decoder: Decoder, params: Params, vocab_size: int) -> None:
    name, num_slots = type(decoder.drafter).__name__, 64 + decoder.depth
    first, second = (
        _requests(order, decoder.acceptance, vocab_size) for order in _ORDERS
    )
    rounds, state = _decode(decoder, params, first, num_slots)
    for number, done in enumerate(rounds):
        for row in np.flatnonzero(done.count):
            _check_tree(f"{name}.propose, round {number}", done, int(row), decoder)
            tokens = done.tree.tokens[row]
            check(
                bool(((tokens >= 0) & (tokens < vocab_size)).all()),
                f"{name}.propose, round {number}: row {row} has the tokens "
                f"{tokens.tolist()}, which must lie in 0 .. {vocab_size - 1}",
            )
    plain = autoregressive.generate(decoder, params, first, num_slots=num_slots)
    try:
        assert_same_tokens(state.tokens, plain.tokens)
    except AssertionError as error:
        raise AssertionError(f"with {name} the text changes: {error}") from error

    others, _ = _decode(decoder, params, second, num_slots)
    reason = (
        "what is drafted for a row depends on its place in the batch, or on the rows "
        "beside it, which may have ended (count 0)"
    )
    _check_alike(f"{name}.propose: {reason}", rounds, others, _ORDERS)
    if decoder.is_greedy:
        grown, _ = _decode(decoder, params, first, num_slots, grow_after=1)
        reason = (
            "a larger state, filled from the beginning of each axis with a smaller "
            "one, leads to other drafts"
        )
        orders = _ORDERS[0], _ORDERS[0]
        _check_alike(f"{name}.init_state: {reason}", rounds, grown, orders)


def _check_tree(where: str, done: Round, row: int, decoder: Decoder) -> None:
    """Checks one row's tree, and that it is no deeper than the drafter says."""
    tree = jax.tree.map(lambda leaf: leaf[row], done.tree)
    try:
        assert_valid_tree(tree)
    except AssertionError as error:
        raise AssertionError(f"{where}, row {row}: {error}") from error
    depths = np.zeros(len(tree.tokens), int)
    for node in range(ROOT + 1, len(depths)):
        if tree.is_node[node]:
            depths[node] = depths[tree.parents[node]] + 1
    check(
        bool(depths.max() <= decoder.depth),
        f"{where}, row {row}: node {depths.argmax()} has depth {depths.max()}, but the "
        f"drafter's depth is {decoder.depth}",
    )


def _check_alike(
    reason: str,
    rounds: list[Round],
    others: list[Round],
    orders: Sequence[Sequence[int]],
) -> None:
    """Compares the trees of the texts that two batches share."""
    for text in _SHARED:
        row, other = (order.index(text) for order in orders)
        for number, (done, again) in enumerate(zip(rounds, others, strict=False)):
            if not (done.count[row] and again.count[other]):
                break
            for field in ("tokens", "parents", "is_node"):
                found = getattr(done.tree, field)[row].tolist()
                expected = getattr(again.tree, field)[other].tolist()
                check(
                    found == expected,
                    f"{reason}: in round {number} one text has the {field} {found} in "
                    f"row {row} and {expected} in row {other} of another run",
                )


def _requests(order: Sequence[int], rule: AcceptanceRule, vocab_size: int) -> Requests:
    prompts, new_tokens = zip(*(_TEXTS[text] for text in order), strict=True)
    return make_requests(
        prompts,
        max_new_tokens=new_tokens,
        temperature=0.0 if rule == "greedy" else 1.0,
        seeds=order,
        prompt_bucket=8,
        vocab_size=vocab_size,
    )


def _decode(
    decoder: Decoder,
    params: Params,
    requests: Requests,
    num_slots: int,
    grow_after: int | None = None,
) -> tuple[list[Round], DecodeState]:
    """Returns all rounds, on the host, and the last state."""
    assert decoder.drafter is not None
    state = speculative.prefill(decoder, params, requests, num_slots=num_slots)
    rounds: list[Round] = []
    while bool(state.is_running.any()):
        if len(rounds) == grow_after:
            state = grow(decoder, state, num_slots=2 * num_slots)
        before = jax.eval_shape(lambda state: state, state.drafter_state)
        state, done = speculative.decode_round(decoder, params, state)
        checked.check_round(decoder.drafter, before, state.drafter_state)
        rounds.append(jax.device_get(done))
    return rounds, state
