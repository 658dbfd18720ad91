"""The state that a decoding loop carries, and how a text grows and ends."""

import dataclasses
import enum
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from eagle_jax.constraints import Guide, follow
from eagle_jax.decoding.logprobs import Logprobs
from eagle_jax.decoding.requests import RowSettings
from eagle_jax.decoding.windows import write_window
from eagle_jax.interface import Cache
from eagle_jax.tree import ROOT, DraftTree


class StopReason(enum.IntEnum):
    """The reason why a row is finished: nothing can be raised inside a loop."""

    RUNNING = 0
    """The text goes on."""
    STOP_TOKEN = 1
    """A stop token was emitted; it is the text's last token."""
    MAX_TOKENS = 2
    """`max_new_tokens` were emitted."""
    MAX_LENGTH = 3
    """Prompt and output together reached `max_length`."""
    FREE = 4
    """The row holds no text: nothing was inserted yet, or it was freed."""
    DEAD_END = 5
    """No token is allowed after the text."""
    STOP_STRING = 6
    """The text contains a stop string; the host sees it, no loop does."""

    @property
    def finish_reason(self) -> str | None:
        """The reason as OpenAI and vLLM name it, "constraint" for a dead end.

        It is `None` while the text goes on.
        """
        return _FINISH_REASONS.get(self.name)


_FINISH_REASONS = {
    "STOP_TOKEN": "stop",
    "STOP_STRING": "stop",
    "MAX_TOKENS": "length",
    "MAX_LENGTH": "length",
    "DEAD_END": "constraint",
}


@struct.dataclass(kw_only=True)
class DecodeState:
    """A batch in the middle of its text.

    The last emitted token is the root of the next round; it is not in the cache
    yet, which holds `lengths - 1` tokens between rounds. A state is complete by
    itself, and every leaf has the batch as axis 0.

    Attributes:
        rows: The settings of each row and the limits where it ends, `[B]` fields.
        tokens: `[B, S]` int32, prompt and output; 0 after the length.
        lengths: `[B]` int32, tokens of prompt and output.
        stop_reason: `[B]` int32, each row's `StopReason`.
        target_cache: The target's cache of the confirmed text.
        drafter_state: The drafter's state; `()` without a drafter.
        accept_lengths: `[B, S]` int32, drafted tokens accepted in each round of the
            row, uncut by limits; 0 after `num_rounds`.
        num_rounds: `[B]` int32, rounds in which the row was running.
        expected: `[B, 2]` float32, the sums over them of the probabilities, as the
            draft has them, that a draft of level 1 is accepted, and one of level 2.
        constraint_state: The constraint's state after each row's text, the root
            included; `()` without a constraint.
        logprobs: The log-probabilities of the text's tokens; `None` unless the decoder
            was asked for them.
    """

    rows: RowSettings
    tokens: jax.Array
    lengths: jax.Array
    stop_reason: jax.Array
    target_cache: Cache
    drafter_state: Any
    accept_lengths: jax.Array
    num_rounds: jax.Array
    expected: jax.Array
    constraint_state: Any = ()
    logprobs: Logprobs | None = None

    @property
    def is_running(self) -> jax.Array:
        """`[B]` bool, true in rows whose text goes on."""
        return self.stop_reason == StopReason.RUNNING

    @property
    def root(self) -> jax.Array:
        """`[B]` int32, the last emitted tokens."""
        last = (self.lengths - 1)[:, None]
        return jnp.take_along_axis(self.tokens, last, axis=1)[:, 0]


def begin_state(
    rows: RowSettings, tokens: jax.Array, stop_reason: StopReason, **parts: Any
) -> DecodeState:
    """Returns a state of rows that hold their prompts alone, tokens `[B, S]` int32.

    Its `parts` are what a prefill leaves: caches and states.
    """
    nothing = jnp.zeros_like(rows.prompt_lengths)
    # No array twice, for it is donated.
    return DecodeState(
        rows=rows,
        tokens=tokens,
        lengths=nothing + rows.prompt_lengths,
        stop_reason=nothing + stop_reason,
        accept_lengths=jnp.zeros_like(tokens),
        num_rounds=nothing,
        expected=jnp.zeros((len(tokens), 2), jnp.float32),
        **parts,
    )


def emit(
    state: DecodeState,
    tokens: jax.Array,
    count: jax.Array,
    guide: Guide | None,
    is_forbidden: jax.Array | None,
) -> tuple[DecodeState, jax.Array]:
    """Appends tokens to the running rows, up to where each text ends.

    The result is that of appending them one by one: the first stop token, the last
    allowed token or the last slot ends the row, and tokens after it are dropped. So
    does a forbidden token, which is dropped itself.

    Args:
        state: The state, whose finished rows stay as they are.
        tokens: `[B, W]` int32, the tokens, padded at the end.
        count: `[B]` int32, real tokens per row, 1 .. `W`.
        guide: What guides the text before these tokens, `None` for nothing.
        is_forbidden: `[B, W]` bool, the tokens that may not follow; `None` for none.

    Returns:
        The new state, and how many tokens each row took, `[B]` int32.
    """
    otherwise: Any = StopReason.RUNNING
    if is_forbidden is not None:
        allowed = jnp.where(
            is_forbidden.any(1), jnp.argmax(is_forbidden, axis=1), count
        )
        otherwise = jnp.where(allowed < count, StopReason.DEAD_END, otherwise)
        count = jnp.minimum(count, allowed)
    is_stop = (tokens[:, :, None] == state.rows.stop_tokens[:, None, :]).any(axis=-1)
    # Tokens up to and including the first stop token.
    until_stop = jnp.where(is_stop.any(1), jnp.argmax(is_stop, axis=1) + 1, count + 1)
    generated = state.lengths - state.rows.prompt_lengths
    room_by_count = state.rows.max_new_tokens - generated
    room_by_length = state.rows.max_length - state.lengths
    room = jnp.minimum(room_by_count, room_by_length)
    taken = jnp.minimum(jnp.minimum(count, until_stop), room)
    taken = jnp.where(state.is_running, taken, 0).astype(jnp.int32)

    # The first that holds of a stop token, the count and the length.
    reason = jnp.where(taken == room_by_length, StopReason.MAX_LENGTH, otherwise)
    reason = jnp.where(taken == room_by_count, StopReason.MAX_TOKENS, reason)
    reason = jnp.where(taken == until_stop, StopReason.STOP_TOKEN, reason)
    state = dataclasses.replace(
        state,
        tokens=write_window(state.tokens, tokens, state.lengths, taken),
        lengths=state.lengths + taken,
        stop_reason=jnp.where(state.is_running, reason, state.stop_reason),
        constraint_state=follow(guide, tokens, taken),
    )
    return state, taken


def record_round(
    state: DecodeState, num_accepted: jax.Array, tree: DraftTree | None = None
) -> DecodeState:
    """Records how many drafts a round accepted, in the running rows.

    Args:
        state: The state before the round.
        num_accepted: `[B]` int32, the accepted drafts.
        tree: The drafted trees, `[B, N]` fields; `None` for none.
    """
    expected = state.expected
    if tree is not None:
        above = jnp.maximum(tree.parents, ROOT)  # The root's is `NO_PARENT`.
        levels = tree.parents, jnp.take_along_axis(tree.parents, above, axis=1)
        in_level = jnp.stack(levels, axis=1) == ROOT
        values = jnp.where(in_level, jnp.exp(tree.log_values)[:, None], 0.0)
        chances = jnp.minimum(values.sum(axis=2), 1.0)
        expected += jnp.where(state.is_running[:, None], chances, 0.0)
    rows = jnp.arange(state.lengths.shape[0])
    slots = state.accept_lengths.shape[1]
    slot = jnp.where(state.is_running, state.num_rounds, slots)
    return dataclasses.replace(
        state,
        accept_lengths=state.accept_lengths.at[rows, slot].set(
            num_accepted, mode="drop"
        ),
        num_rounds=state.num_rounds + state.is_running.astype(jnp.int32),
        expected=expected,
    )


def record_logprobs(
    state: DecodeState,
    logits: jax.Array,
    tokens: jax.Array,
    count: jax.Array,
    path: jax.Array | None = None,
) -> DecodeState:
    """Records the log-probabilities of the newest tokens, if they are asked for.

    Args:
        state: The state after `emit` of these tokens.
        logits: `[B, N, V]` float32, the target's own after the nodes.
        tokens: `[B, W]` int32, the tokens that were to be emitted.
        count: `[B]` int32, how many of them were.
        path: `[B, W]` int32, the node before each token; `None` for the only node.
    """
    logprobs = state.logprobs
    if logprobs is None:
        return state
    if path is not None:  # Other nodes' logits are not looked at.
        logits = jnp.take_along_axis(logits, path[..., None], axis=1)
    logprobs = logprobs.written(logits, tokens, state.lengths - count, count)
    return dataclasses.replace(state, logprobs=logprobs)
