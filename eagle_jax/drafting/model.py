"""What a tree is grown with: a model that predicts what follows a node."""

from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import struct

from eagle_jax.models import cache as kv
from eagle_jax.ordering import after


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


@struct.dataclass(kw_only=True)
class Waiting:
    """Confirmed tokens that a model reads once the next root is known.

    Attributes:
        following: `[B, P]` int32, the token after each, the root after the last.
        rows: `[B, P]` int32, `0 .. P - 1`.
        last: `[B, 1]` int32, the last real row; 0 in a row that has none.
        count: `[B]` int32, real rows.
    """

    following: jax.Array
    rows: jax.Array
    last: jax.Array
    count: jax.Array

    @classmethod
    def before(cls, root: jax.Array, tokens: jax.Array, count: jax.Array) -> "Waiting":
        """Puts the root `[B]` after the first `count` of the tokens `[B, P]`."""
        rows = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        last = jnp.maximum(count - 1, 0)[:, None]
        following = jnp.where(rows == last, root[:, None], jnp.roll(tokens, -1, 1))
        return cls(following=following, rows=rows, last=last, count=count)

    def commit(
        self, cache: kv.KVCache, entries: tuple[kv.KeyValues, ...], outputs: jax.Array
    ) -> tuple[jax.Array, kv.KVCache]:
        """Caches what was read.

        Args:
            cache: Of before the call.
            entries: Of the call over the `P` rows.
            outputs: `[B, P, X]`, its outputs.

        Returns:
            The last real row's output `[B, X]`, and the cache.
        """
        output = jnp.take_along_axis(outputs, self.last[..., None], axis=1)[:, 0]
        count = after(self.count, output[:, 0])
        return output, kv.commit(cache, entries, self.rows, count)
