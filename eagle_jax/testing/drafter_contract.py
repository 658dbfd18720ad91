"""What the author of a drafter runs once: does it keep the protocol?"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.decoding import autoregressive, speculative
from eagle_jax.decoding.decoder import AcceptanceRule, Decoder
from eagle_jax.decoding.growth import grow
from eagle_jax.decoding.requests import Requests, make_requests
from eagle_jax.decoding.speculative import Round
from eagle_jax.decoding.state import DecodeState
from eagle_jax.errors import InputError
from eagle_jax.interface import Drafter, Params, Target
from eagle_jax.prng import make_key
from eagle_jax.testing.asserts import assert_same_tokens, assert_valid_tree, check
from eagle_jax.tree.structure import ROOT, DraftTree

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

_DRAWN_ROWS, _DRAWN_CALLS = 16, 256
"""The rows of a call of `propose`, and the calls, from which drafts are counted."""


def assert_valid_drafter(
    drafter: Drafter,
    params: Any,
    target: Target,
    target_params: Any,
    vocab_size: int,
) -> None:
    """Checks all that the decoding loop takes for granted about a drafter.

    It decodes a few short texts in batches of four, at temperature 0 and 1, round by
    round. Of a drafter that draws its drafts (`DraftTree.draft_logits`) it counts those
    of 4096 trees: a right one is refused once in a million times.

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
        with jax.default_matmul_precision("highest"):
            decoder = Decoder(target=target, drafter=drafter, acceptance="rejection")
            is_drawn = _check_draws(decoder, weights, vocab_size)
            for rule in ("greedy", "coupled", *["rejection"] * is_drawn):
                decoder = dataclasses.replace(decoder, acceptance=rule)
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
    if decoder.acceptance != "rejection":  # Its tokens are others by right.
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
    for node in 1 + np.flatnonzero(tree.is_node[1:]):
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
        state, done = speculative.decode_round(decoder, params, state)
        rounds.append(jax.device_get(done))
    return rounds, state


def _check_draws(decoder: Decoder, params: Params, vocab_size: int) -> bool:
    """Compares drawn children with the distribution they are said to be drawn from.

    Were it another, rejection would give the text another distribution. Returns whether
    the drafter draws at all; if not, nothing is compared.
    """
    assert decoder.drafter is not None
    drafter, rows = decoder.drafter, _DRAWN_ROWS
    requests = make_requests(
        [_TEXTS[0][0]] * rows,
        max_new_tokens=1 + decoder.depth,
        temperature=[1.0, 0.7] * (rows // 2),
        top_k=[0, min(3, vocab_size - 1)] * (rows // 2),
        prompt_bucket=8,
        vocab_size=vocab_size,
    )

    def prefill() -> DecodeState:
        num_slots = 64 + decoder.depth
        return speculative.prefill(decoder, params, requests, num_slots=num_slots)

    def propose(state: DecodeState, key: jax.Array) -> DraftTree:
        draws = speculative.round_draws(decoder, params, state)
        draws = dataclasses.replace(draws, keys=jax.random.split(key, rows))
        root, drafted = jnp.zeros_like(state.root), state.drafter_state
        return drafter.propose(params.drafter, drafted, root, draws)[0]

    keys = jax.random.split(make_key(0), _DRAWN_CALLS)
    if jax.eval_shape(propose, jax.eval_shape(prefill), keys[0]).draft_logits is None:
        return False
    state, compare = prefill(), jax.jit(lambda *given: _compare(propose(*given)))
    sums = (np.asarray(compare(state, key), np.float64) for key in keys)
    excess, variance = sum(sums, start=np.zeros(()))
    # Bernstein's inequality: all of a right drafter's are smaller, save once in 1e6.
    exponent = math.log(2e6 * excess.size)
    allowed = np.sqrt(2 * exponent * variance) + 2 / 3 * exponent
    worst = int(np.argmax(np.abs(excess) / allowed))
    node, token = divmod(worst, excess.shape[1])
    by = excess[node, token]
    which = "likely tokens" if token == vocab_size else f"token {token}"
    check(
        bool((np.abs(excess) <= allowed).all()),
        f"{type(drafter).__name__}.propose: node {node} is not drawn from the "
        f"draft_logits of its parent; in {rows * _DRAWN_CALLS} trees {which} came "
        f"{abs(by):.0f} times too {'often' if by > 0 else 'seldom'}. Give those that "
        "the node's children are drawn from, after temperature and filters, one after "
        "the other and never twice, with draws.keys",
    )
    return True


def _compare(tree: DraftTree) -> jax.Array:
    """Returns how often each token was drawn too often, and the variance of that.

    Each node is compared with the softmax of its parent's `draft_logits`, without its
    elder siblings. The last column sums the probabilities of the drawn tokens: it shows
    distributions of other nodes, which on average may be right. Both are summed over
    the rows, `[2, N, V + 1]` float32.
    """
    assert tree.draft_logits is not None
    num_nodes, vocab_size = tree.draft_logits.shape[1:]
    is_child = tree.is_node & (tree.parents >= 0)
    parents = jnp.where(is_child, tree.parents, ROOT)
    drawn = jax.nn.one_hot(tree.tokens, vocab_size) * is_child[..., None]
    is_elder = (parents[:, :, None] == parents[:, None, :]) & jnp.tri(
        num_nodes, k=-1, dtype=bool
    )
    taken = jnp.einsum("bij,bjv->biv", is_elder.astype(jnp.float32), drawn) > 0
    logits = jnp.take_along_axis(tree.draft_logits, parents[..., None], axis=1)
    law = jax.nn.softmax(jnp.where(taken, -jnp.inf, logits))
    mean = (law**2).sum(axis=-1, keepdims=True)
    excess = [drawn - law, (drawn * law).sum(axis=-1, keepdims=True) - mean]
    variance = [law - law**2, (law**3).sum(axis=-1, keepdims=True) - mean**2]
    both = jnp.stack([jnp.concatenate(x, axis=-1) for x in (excess, variance)])
    return jnp.where(is_child[..., None], both, 0.0).sum(axis=1)
