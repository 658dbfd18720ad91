"""What a tree is grown with: a model that predicts what follows a node."""

from typing import Any, Protocol

import jax


class DraftModel(Protocol):
    """A model that drafts, whatever the shape of the tree.

    Its state knows the confirmed text and holds back what the last round confirmed
    until the root behind it is known. `X` is what it passes from a node to its
    children: an EAGLE head's predicted feature, a small model's hidden state.
    """

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
        """Returns float32 logits `[..., V]` of outputs `[..., X]`."""
        ...
