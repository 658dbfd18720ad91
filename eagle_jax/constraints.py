"""Constraints: which tokens may follow, as a function of the text that was generated.

A constraint changes the target's logits, and so the text that every method must give:
`-inf` for a forbidden token, before temperature, filters and draws. Plain decoding does
so after each token, speculative decoding after each node of the tree, so both give the
same text. Drafts that a constraint forbids could never be accepted; they are not
drafted.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import struct

from eagle_jax.tree import NO_PARENT, ROOT, DraftTree, drop_unconnected


class Constraint(Protocol):
    """A rule about the next token: a frozen dataclass of static settings.

    Its parameters are any pytree. Its state has the batch as axis 0; `advance`, `mask`
    and `is_dead` are written for one row, whose leaves lack that axis, and are mapped
    with `jax.vmap` over rows and nodes. All three must be defined after forbidden
    tokens, too. Where no token is allowed, the text ends: `StopReason.DEAD_END`.
    """

    def init_state(self, params: Any, batch: int) -> Any:
        """Returns the states of rows that have generated nothing.

        Args:
            params: The constraint's parameters.
            batch: The number of rows, `B`. Static.
        """
        ...

    def advance(self, params: Any, state: Any, token: jax.Array) -> Any:
        """Returns the state after one more token, `[]` int32, of one row."""
        ...

    def mask(self, params: Any, state: Any) -> jax.Array:
        """Returns the allowed tokens of one row, `[V]` bool, true where allowed."""
        ...

    def is_dead(self, params: Any, state: Any) -> jax.Array:
        """Returns whether a forbidden token led to the state of one row, `[]` bool."""
        ...


@struct.dataclass(kw_only=True)
class Guide:
    """A constraint with what it knows before a round.

    Attributes:
        constraint: The constraint. Static.
        params: Its parameters.
        state: Its state after the roots, every leaf `[B, ...]`.
    """

    constraint: Constraint = struct.field(pytree_node=False)
    params: Any
    state: Any

    @property
    def at_roots(self) -> Any:
        """The states of the roots, every leaf `[B, 1, ...]`."""
        return jax.tree.map(lambda leaf: leaf[:, None], self.state)

    def advance(self, states: Any, tokens: jax.Array) -> Any:
        """Returns states `[B, M, ...]` after one more token each, `[B, M]` int32."""
        return self._map(self.constraint.advance)(self.params, states, tokens)

    def masks(self, states: Any) -> jax.Array:
        """Returns the tokens allowed in states `[B, M, ...]`, `[B, M, V]` bool."""
        return self._map(self.constraint.mask)(self.params, states)

    def are_dead(self, states: Any) -> jax.Array:
        """Returns whether forbidden tokens led to states `[B, M, ...]`, `[B, M]`."""
        return self._map(self.constraint.is_dead)(self.params, states)

    def children(self, states: Any, parents: jax.Array, tokens: jax.Array) -> Any:
        """Returns the states of some nodes, `[B, M, ...]`.

        Args:
            states: The states of the nodes that their parents are among, `[B, R, ...]`.
            parents: `[B, M]` int32, the place of each node's parent among these.
            tokens: `[B, M]` int32, the nodes' tokens.
        """
        return self.advance(_take(states, parents), tokens)

    def at_nodes(self, tree: DraftTree, depth: int) -> Any:
        """Returns the states after every node, `[B, N, ...]`; of padding, the roots'.

        Args:
            tree: The trees, `[B, N]` fields.
            depth: The depth of the deepest node, `D`. Static.
        """
        above = jnp.where(tree.parents == NO_PARENT, ROOT, tree.parents)
        is_root = tree.parents == NO_PARENT
        roots = _take(self.at_roots, jnp.zeros_like(above))

        # What stands at depth `d` is right after `d` passes over all nodes.
        def descend(_: jax.Array, states: Any) -> Any:
            return _where(is_root, roots, self.children(states, above, tree.tokens))

        return jax.lax.fori_loop(0, depth, descend, roots)

    def prune(self, tree: DraftTree, depth: int) -> DraftTree:
        """Returns trees without forbidden drafts and what hangs below them.

        Drawn trees stay as they are: a forbidden draft is rejected with certainty, and
        to leave out that test would change what its siblings are tested against.

        Args:
            tree: The trees, `[B, N]` fields.
            depth: The depth of the deepest node, `D`. Static.
        """
        if tree.draft_logits is not None:
            return tree
        is_dead = self.are_dead(self.at_nodes(tree, depth))
        cut = dataclasses.replace(
            tree, parents=jnp.where(is_dead, NO_PARENT, tree.parents)
        )
        return jax.vmap(drop_unconnected)(cut)

    def _map(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function of one row, mapped over rows and nodes."""

        def mapped(params: Any, *arguments: Any) -> Any:
            def one(*arguments: Any) -> Any:
                return function(params, *arguments)

            return jax.vmap(jax.vmap(one))(*arguments)

        return mapped


def constrain(guide: Guide | None, logits: jax.Array) -> jax.Array:
    """Returns logits `[B, V]` after the roots, as a constraint leaves them."""
    if guide is None:
        return logits
    return mask_logits(logits, guide.masks(guide.at_roots)[:, 0])


def constrain_nodes(
    guide: Guide | None, logits: jax.Array, tree: DraftTree, depth: int
) -> jax.Array:
    """Returns logits `[B, N, V]` after all nodes, as a constraint leaves them.

    Args:
        guide: The constraint after the roots, `None` to leave the logits as they are.
        logits: `[B, N, V]` float32.
        tree: The trees, `[B, N]` fields.
        depth: The depth of the deepest node, `D`. Static.
    """
    if guide is None:
        return logits
    return mask_logits(logits, guide.masks(guide.at_nodes(tree, depth)))


def follow(guide: Guide | None, tokens: jax.Array, count: jax.Array) -> Any:
    """Returns the states of rows after more tokens; `()` without a constraint.

    Args:
        guide: The constraint before these tokens, `None` without one.
        tokens: `[B, W]` int32, the tokens, padded at the end.
        count: `[B]` int32, real tokens per row, 0 .. `W`.
    """
    if guide is None:
        return ()

    def take(index: jax.Array, states: Any) -> Any:
        after = guide.advance(states, tokens[:, index][:, None])
        return _where((index < count)[:, None], after, states)

    states = jax.lax.fori_loop(0, tokens.shape[1], take, guide.at_roots)
    return jax.tree.map(lambda leaf: leaf[:, 0], states)


def count_allowed(guide: Guide, tokens: jax.Array) -> jax.Array:
    """Returns how many tokens come before the first forbidden one, `[B]` int32.

    Where no token is allowed, whichever is chosen is forbidden.

    Args:
        guide: The constraint before these tokens.
        tokens: `[B, W]` int32.
    """

    def take(index: jax.Array, carry: Any) -> Any:
        states, count = carry
        states = guide.advance(states, tokens[:, index][:, None])
        is_dead = guide.are_dead(states)[:, 0]
        return states, jnp.where(is_dead, jnp.minimum(count, index), count)

    num_tokens = tokens.shape[1]
    most = jnp.full(tokens.shape[0], num_tokens, jnp.int32)
    return jax.lax.fori_loop(0, num_tokens, take, (guide.at_roots, most))[1]


def mask_logits(logits: jax.Array, masks: jax.Array) -> jax.Array:
    """Returns logits `[..., V]` with `-inf` where a mask `[..., V]` is false."""
    return jnp.where(masks, logits, -jnp.inf)


def _take(states: Any, places: jax.Array) -> Any:
    """Returns the states `[B, M, ...]` at some places, `[B, M]` int32, of `[B, R]`."""

    def take(leaf: jax.Array) -> jax.Array:
        return jax.vmap(lambda row, index: row[index])(leaf, places)

    return jax.tree.map(take, states)


def _where(condition: jax.Array, yes: Any, no: Any) -> Any:
    """Returns states, one per entry of the condition, `[B]` or `[B, N]` bool."""

    def choose(yes: jax.Array, no: jax.Array) -> jax.Array:
        missing = (1,) * (yes.ndim - condition.ndim)
        return jnp.where(condition.reshape(*condition.shape, *missing), yes, no)

    return jax.tree.map(choose, yes, no)
