"""Draft models: they predict the tokens after a node, and trees are grown with them."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from eagle_jax.interface import Cache, Entries, PromptChunk, Verified
from eagle_jax.interface.ordering import after

Run = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Entries]]
"""A function that runs a model over waiting tokens.

It maps the tokens `[B, P]` after those that wait (after the last of them, the root),
their distances `[B, P]` from the end of the cache, and the place `[B]` of the last of
them, all int32, to the output there, `[B, 1, X]`, and the entries of all.
"""

Commit = Callable[[Cache, Entries, jax.Array, jax.Array], Cache]
"""A function that appends to a cache, see `Target.commit`."""


class DraftModel(Protocol):
    """A model that drafts, whatever the shape of the tree.

    Its state knows the confirmed text and holds back the tokens that the last round
    confirmed until the root after them is known. `X` is the width of the output that a
    node passes to its children: an EAGLE head's predicted feature, a small model's
    hidden state; it may differ from level to level, and be a pytree of such outputs.
    The model chooses among `W` of the target's `V` tokens, in their order; mostly
    `W = V`. A class that inherits from this one does what most do where it has no
    method of its own.
    """

    @property
    def vocab_size(self) -> int:
        """The number of tokens the target knows, `V`. Static."""
        ...

    @property
    def max_levels(self) -> int | None:
        """The number of levels it can draft, `None` for any. Static."""
        return None

    def init_state(self, batch: int, capacity: int, depth: int) -> Any:
        """Returns an empty state.

        Args:
            batch: The number of rows, `B`. Static.
            capacity: The number of slots per row, `S`. Static.
            depth: The depth of the tree, `D`, so that paths of `P = D + 1` tokens can
                wait. Static.
        """
        ...

    def prefill_chunk(self, params: Any, state: Any, chunk: PromptChunk) -> Any:
        """See `Drafter.prefill_chunk`."""
        ...

    def advance(
        self,
        state: Any,
        tokens: jax.Array,
        features: jax.Array,
        count: jax.Array,
    ) -> Any:
        """See `Drafter.advance`; no model runs before the next `read`."""
        new = {"tokens": tokens, "features": features}
        waiting = {
            name: new[name].astype(old.dtype) for name, old in _waiting(state).items()
        }
        return dataclasses.replace(state, count=count, **waiting)

    def read(self, params: Any, state: Any, root: jax.Array) -> tuple[Any, Any]:
        """Reads the tokens that waited, and the root.

        Args:
            params: The model's weights.
            state: The state that `prefill_chunk` or `advance` returned.
            root: `[B]` int32, the last emitted tokens.

        Returns:
            The root's output `[B, X]`, and the state in which nothing waits.
        """
        ...

    def step(
        self,
        params: Any,
        state: Any,
        tokens: jax.Array,
        above: Any,
        visible: jax.Array,
        earlier: Any,
        *,
        level: int,
    ) -> tuple[Any, Any]:
        """Runs the model over drafted nodes of one level, beside its cache.

        Args:
            params: The model's weights.
            state: The state that `read` returned; it stays as it is, since drafts leave
                nothing in it.
            tokens: `[B, M]` int32, the tokens of the nodes.
            above: `[B, M, X]`, the outputs of their parents.
            visible: `[B, M, U]` bool, true where a node sees one of all nodes run so
                far in this round, oldest first, the `M` of this call at the end.
            earlier: The second result of the last call of this round, `None` at first.
            level: The depth of the nodes, at least 1. Static.

        Returns:
            The nodes' outputs `[B, M, X]`, or `[B, 1, X]` if all nodes of the level
            have the same (of a pytree, each leaf by itself), and `earlier` for the next
            call.
        """
        ...

    def logits(self, params: Any, outputs: Any, *, level: int) -> jax.Array:
        """Returns float32 logits `[..., W]` of the tokens after some nodes.

        Args:
            params: The model's weights.
            outputs: `[..., X]`, the outputs of the nodes.
            level: The depth of the nodes' children, at least 1. Static.
        """
        ...

    def tokens(self, params: Any, choices: jax.Array) -> jax.Array:
        """Returns the target's tokens for places in the axis of `logits`.

        A later place is a higher token: ties go to the lower token either way.

        Args:
            params: The model's weights.
            choices: `[...]` int32, places in `0 .. W - 1`.

        Returns:
            The tokens `[...]` int32, in `0 .. V - 1`.
        """
        return choices


def target_tokens(offsets: jax.Array | None, choices: jax.Array) -> jax.Array:
    """Returns the target's tokens for places among the fewer that a model knows.

    Args:
        offsets: `[W]` int32, how much higher each known token is in the target's
            vocabulary than its place; `None` where all are known.
        choices: `[...]` int32, places in `0 .. W - 1`.
    """
    return choices if offsets is None else choices + offsets[choices]


def read_waiting(
    state: Any, root: jax.Array, run: Run, commit: Commit
) -> tuple[jax.Array, Any]:
    """Reads confirmed tokens that waited until the root after them was known.

    Args:
        state: A state with a `cache`, `tokens` `[B, P]` that wait, and their `count`
            `[B]`, both int32.
        root: `[B]` int32, the last emitted tokens.
        run: The function that runs the model over those tokens.
        commit: The function that appends them to the cache.

    Returns:
        The output `[B, X]` at the last of them, or at the first place where there are
        none, and the state with all of them in its cache.
    """
    rows = jnp.broadcast_to(jnp.arange(state.tokens.shape[1]), state.tokens.shape)
    last = jnp.maximum(state.count - 1, 0)
    rolled = jnp.roll(state.tokens, -1, 1)
    following = jnp.where(rows == last[:, None], root[:, None], rolled)
    outputs, entries = run(following, rows, last)
    output = outputs[:, 0]
    cache = commit(state.cache, entries, rows, after(state.count, output[:, 0]))
    nothing = jnp.zeros_like(state.count)
    return output, dataclasses.replace(state, cache=cache, count=nothing)


def postpone(model: DraftModel, params: Any, state: Any, verified: Verified) -> Any:
    """Returns the state after a token that nobody drafted, which waits with others.

    They are read where no place is left: a model reads several tokens in the time of
    one, so that plain decoding is hardly slower for a drafter that goes on later.

    Args:
        model: The draft model.
        params: Its weights.
        state: A state with `tokens` or `features` `[B, P, ...]` that wait, or both, and
            their `count` `[B]`.
        verified: A round whose trees are their roots.
    """
    token, places = verified.path_tokens[:, 0], jnp.arange(len(state.count))
    width = max(x.shape[1] for x in _waiting(state).values())
    state = jax.lax.cond(
        (state.count >= width).any(),
        lambda: model.read(params, state, token)[1],
        lambda: state,
    )
    new = {"tokens": verified.path_tokens, "features": verified.path_features}
    waiting = {
        name: old.at[places, state.count].set(new[name][:, 0].astype(old.dtype))
        for name, old in _waiting(state).items()
    }
    return dataclasses.replace(state, count=state.count + verified.count, **waiting)


def _waiting(state: Any) -> dict[str, jax.Array]:
    """Returns what waits, by the names of a state's fields."""
    names = [name for name in ("tokens", "features") if hasattr(state, name)]
    return {name: getattr(state, name) for name in names}
