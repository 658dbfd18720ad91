"""Constraints: which tokens may follow, as a function of the text that was generated.

A constraint changes the target's logits, and so the text that every method must give:
`-inf` for a forbidden token, after the processors of the path and before temperature,
filters and draws. Plain decoding does so after each token, speculative decoding after
each node of the tree, so both give the same text. Drafts that are forbidden could never
be accepted; they are not drafted.
"""

import dataclasses
import functools
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import struct

from eagle_jax import processors
from eagle_jax.processors import PathState, Text
from eagle_jax.tree import NO_PARENT, ROOT, DraftTree, drop_unconnected


class Constraint(Protocol):
    """A rule about the next token: a frozen dataclass of static settings.

    Its parameters are any pytree. Its state has the batch as axis 0; `advance` and
    `mask` are written for one row, whose leaves lack that axis, and are mapped with
    `jax.vmap` over rows and nodes. Both must be defined after forbidden tokens, too.
    Where no token is allowed, the text ends: `StopReason.DEAD_END`.
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


@struct.dataclass(kw_only=True)
class Guide:
    """A constraint and processors with what they know before a round.

    Attributes:
        constraint: The constraint, `None` without one. Static.
        params: Its parameters.
        state: Its state after the roots, every leaf `[B, ...]`.
        text: The texts that processors read, `None` without any.
        depth: The depth of the deepest node, `D`. Static.
        known: `[W]` int32, the tokens that logits are of; `None` for all.
        places: `[V]` int32, the place of each token among them, `W` if it has none.
    """

    constraint: Constraint | None = struct.field(pytree_node=False, default=None)
    params: Any = ()
    state: Any = ()
    text: Text | None = None
    depth: int = struct.field(pytree_node=False)
    known: jax.Array | None = None
    places: jax.Array | None = None

    @property
    def at_roots(self) -> Any:
        """The states of the roots, every leaf `[B, 1, ...]`."""
        path = None
        if self.text is not None:
            path = PathState.at_roots(len(self.text.length), self.depth)
        return jax.tree.map(lambda leaf: leaf[:, None], (self.state, path))

    def of_known(self, known: jax.Array, vocab_size: int) -> "Guide":
        """Returns a guide for logits `[..., W]` of some of `V` tokens, `[W]` int32."""
        size = len(known)
        places = jnp.full(vocab_size, size, jnp.int32)
        places = places.at[known].set(jnp.arange(size, dtype=jnp.int32))
        return dataclasses.replace(self, known=known, places=places)

    def advance(self, states: Any, tokens: jax.Array) -> Any:
        """Returns states `[B, M, ...]` after one more token each, `[B, M]` int32."""
        state, path = states
        if self.constraint is not None:
            advance = functools.partial(self.constraint.advance, self.params)
            state = jax.vmap(jax.vmap(advance))(state, tokens)
        if path is not None:
            path = jax.vmap(jax.vmap(processors.advance))(path, tokens)
        return state, path

    def process(self, states: Any, logits: jax.Array) -> jax.Array:
        """Returns logits `[B, M, V]` in states `[B, M, ...]`: `-inf` if forbidden.

        Args:
            states: The states.
            logits: `[B, M, V]` float32, or `[B, 1, V]` for all nodes.
        """
        (state, path), num_nodes = states, jax.tree.leaves(states)[0].shape[1]
        shape = (logits.shape[0], num_nodes, logits.shape[2])
        logits = jnp.broadcast_to(logits, shape)
        if self.text is not None:
            apply = jax.vmap(processors.apply, in_axes=(None, 0, 0, None))
            apply = jax.vmap(apply, in_axes=(0, 0, 0, None))
            logits = apply(self.text, path, logits, self.places)
        if self.constraint is not None:
            mask = functools.partial(self.constraint.mask, self.params)
            masks = jax.vmap(jax.vmap(mask))(state)
            if self.known is not None:
                masks = masks[..., self.known]
            logits = jnp.where(masks, logits, -jnp.inf)
        return logits

    def children(self, states: Any, parents: jax.Array, tokens: jax.Array) -> Any:
        """Returns the states of some nodes, `[B, M, ...]`.

        Args:
            states: The states of the nodes that their parents are among, `[B, R, ...]`.
            parents: `[B, M]` int32, the place of each node's parent among these.
            tokens: `[B, M]` int32, the nodes' tokens.
        """
        return self.advance(_take(states, parents), tokens)

    def at_nodes(self, tree: DraftTree) -> Any:
        """Returns the states after every node, `[B, N, ...]`; of padding, the roots'.

        Args:
            tree: The trees, `[B, N]` fields.
        """
        above = jnp.where(tree.parents == NO_PARENT, ROOT, tree.parents)
        is_root = tree.parents == NO_PARENT
        roots = _take(self.at_roots, jnp.zeros_like(above))

        # What stands at depth `d` is right after `d` passes over all nodes.
        def descend(_: jax.Array, states: Any) -> Any:
            return _where(is_root, roots, self.children(states, above, tree.tokens))

        return jax.lax.fori_loop(0, self.depth, descend, roots)


def process(guide: Guide | None, logits: jax.Array) -> jax.Array:
    """Returns logits `[B, V]` after the roots, as a guide leaves them."""
    if guide is None:
        return logits
    return guide.process(guide.at_roots, logits[:, None])[:, 0]


def process_nodes(guide: Guide | None, logits: jax.Array, tree: DraftTree) -> jax.Array:
    """Returns logits `[B, N, V]` after all nodes, as a guide leaves them.

    Args:
        guide: The guide after the roots, `None` to leave the logits as they are.
        logits: `[B, N, V]` float32.
        tree: The trees, `[B, N]` fields.
    """
    if guide is None:
        return logits
    return guide.process(guide.at_nodes(tree), logits)


def prune(guide: Guide | None, tree: DraftTree, logits: jax.Array) -> DraftTree:
    """Returns trees without forbidden drafts and what hangs below them.

    Drawn trees stay as they are: a forbidden draft is rejected with certainty, and to
    leave out that test would change what its siblings are tested against.

    Args:
        guide: The guide after the roots, `None` to leave the trees as they are.
        tree: The trees, `[B, N]` fields.
        logits: `[B, N, V]` float32, what the guide made of the target's.
    """
    above = jnp.maximum(tree.parents, ROOT)
    is_cut = find_forbidden(guide, logits, above, tree.tokens)
    if is_cut is None or tree.draft_logits is not None:
        return tree
    cut = dataclasses.replace(tree, parents=jnp.where(is_cut, NO_PARENT, tree.parents))
    return jax.vmap(drop_unconnected)(cut)


def find_forbidden(
    guide: Guide | None, logits: jax.Array, nodes: jax.Array, tokens: jax.Array
) -> jax.Array | None:
    """Returns which tokens may not follow nodes, `[B, M]` bool; `None` if any may.

    Where no token is allowed, whichever is chosen is forbidden.

    Args:
        guide: The guide after the roots, `None` if any token may follow.
        logits: `[B, N, V]` float32, what the guide made of the target's.
        nodes: `[B, M]` int32.
        tokens: `[B, M]` int32.
    """
    if guide is None:
        return None
    rows = jnp.arange(len(logits))[:, None]
    return logits[rows, nodes, tokens] == -jnp.inf


def follow(guide: Guide | None, tokens: jax.Array, count: jax.Array) -> Any:
    """Returns the constraint's states after more tokens; `()` without a constraint.

    Args:
        guide: The guide before these tokens, `None` without one.
        tokens: `[B, W]` int32, the tokens, padded at the end.
        count: `[B]` int32, real tokens per row, 0 .. `W`.
    """
    if guide is None or guide.constraint is None:
        return ()
    alone = dataclasses.replace(guide, text=None)

    def take(index: jax.Array, states: Any) -> Any:
        after = alone.advance(states, tokens[:, index][:, None])
        return _where((index < count)[:, None], after, states)

    states = jax.lax.fori_loop(0, tokens.shape[1], take, alone.at_roots)
    return jax.tree.map(lambda leaf: leaf[:, 0], states)[0]


def _take(states: Any, places: jax.Array) -> Any:
    """Returns the states `[B, M, ...]` at some places, `[B, M]` int32, of `[B, R]`."""
    take = jax.vmap(lambda row, index: row[index])
    return jax.tree.map(lambda leaf: take(leaf, places), states)


def _where(condition: jax.Array, yes: Any, no: Any) -> Any:
    """Returns states `[B, M, ...]`, one per entry of the condition, `[B, M]` bool."""
    choose = jax.vmap(jax.vmap(jnp.where))
    return jax.tree.map(lambda yes, no: choose(condition, yes, no), yes, no)
