"""What a tree is grown with: a model that predicts what follows a node."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from eagle_jax.models import cache as kv
from eagle_jax.ordering import after

Run = Callable[[jax.Array, jax.Array], tuple[jax.Array, tuple[kv.KeyValues, ...]]]
"""Runs a model: from the tokens `[B, P]` after those that wait, the root after the last
of them, and positions `[B, P]` to outputs `[B, P, X]` and what its layers cache."""


class DraftModel(Protocol):
    """A model that drafts, whatever the shape of the tree.

    Its state knows the confirmed text and holds back what the last round confirmed
    until the root after it is known. `X` is what it passes from a node to its
    children: an EAGLE head's predicted feature, a small model's hidden state. It
    chooses among `W` of the target's `V` tokens, in their order; mostly `W = V`.
    """

    @property
    def vocab_size(self) -> int:
        """`V`, the target's. Static."""
        ...

    def init_state(self, batch: int, capacity: int, depth: int) -> Any:
        """Returns an empty state.

        Args:
            batch: `B`. Static.
            capacity: `S`, slots per row. Static.
            depth: `D`, so that paths of `P = D + 1` tokens can wait. Static.
        """
        ...

    def prefill(
        self,
        params: Any,
        state: Any,
        tokens: jax.Array,
        features: jax.Array,
        lengths: jax.Array,
    ) -> Any:
        """See `Drafter.prefill`."""
        ...

    def advance(
        self,
        state: Any,
        tokens: jax.Array,
        features: jax.Array,
        count: jax.Array,
    ) -> Any:
        """See `Drafter.advance`; no model runs before the next `read`."""
        ...

    def read(self, params: Any, state: Any, root: jax.Array) -> tuple[jax.Array, Any]:
        """Reads what waited, and the root; returns the root's output `[B, X]`."""
        ...

    def step(
        self,
        params: Any,
        state: Any,
        tokens: jax.Array,
        above: jax.Array,
        visible: jax.Array,
        earlier: Any,
        *,
        level: int,
    ) -> tuple[jax.Array, Any]:
        """Runs the model over drafted nodes of one level, beside its cache.

        Args:
            params: Of the model.
            state: From `read`; not changed, drafts leave nothing behind.
            tokens: `[B, M]` int32, of the nodes.
            above: `[B, M, X]`, their parents' outputs.
            visible: `[B, M, U]` bool over all nodes run so far in this round, oldest
                first, the `M` of this call at the end.
            earlier: What the last call of this round returned, `None` at first.
            level: Depth of the nodes, at least 1. Static.

        Returns:
            Their outputs `[B, M, X]`, and `earlier` for the next call.
        """
        ...

    def logits(self, params: Any, outputs: jax.Array) -> jax.Array:
        """Returns float32 logits `[..., W]` of outputs `[..., X]`."""
        ...

    def tokens(self, params: Any, choices: jax.Array) -> jax.Array:
        """Returns the target's tokens for places in the axis of `logits`.

        A later place is a higher token: ties go to the lower token either way.

        Args:
            params: Of the model.
            choices: Integers `[...]` in `0 .. W - 1`.

        Returns:
            `[...]`, in `0 .. V - 1`.
        """
        ...


def read_waiting(state: Any, root: jax.Array, run: Run) -> tuple[jax.Array, Any]:
    """Reads confirmed tokens that waited until the root after them was known.

    Args:
        state: With a `cache`, `tokens` `[B, P]` that wait, and their `count` `[B]`.
        root: `[B]` int32.
        run: Runs a model over those tokens.

    Returns:
        The output `[B, X]` at the last of them, the first where there are none, and
        the state with all of them in its cache.
    """
    rows = jnp.broadcast_to(jnp.arange(state.tokens.shape[1]), state.tokens.shape)
    last = jnp.maximum(state.count - 1, 0)[:, None]
    rolled = jnp.roll(state.tokens, -1, 1)
    following = jnp.where(rows == last, root[:, None], rolled)
    outputs, entries = run(following, state.cache.length[:, None] + rows)
    output = jnp.take_along_axis(outputs, last[..., None], axis=1)[:, 0]
    cache = kv.commit(state.cache, entries, rows, after(state.count, output[:, 0]))
    nothing = jnp.zeros_like(state.count)
    return output, dataclasses.replace(state, cache=cache, count=nothing)
