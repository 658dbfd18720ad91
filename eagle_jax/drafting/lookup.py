"""Prompt lookup: tokens that followed the last words before may follow them again.

This is prompt lookup decoding (Saxena 2023) in fixed shapes: the longest earlier match
of the text's end is searched in the whole text so far, prompt and output, and the
tokens after it are drafted. Several matches make a tree.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from eagle_jax.config import require, require_counts
from eagle_jax.interface import Draws, PromptChunk, Verified
from eagle_jax.parsing import check_types
from eagle_jax.tree import DraftTree, join


@struct.dataclass(kw_only=True)
class LookupState:
    """The text of each row, root excluded.

    Attributes:
        tokens: `[B, S]` int32, the tokens of the text.
        length: `[B]` int32, how many of them are real.
    """

    tokens: jax.Array
    length: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class LookupConfig:
    """Prompt lookup with about as many nodes as a tree.

    Attributes:
        num_nodes: The number of nodes of one verification, `N`, root included: as many
            matches are followed as it allows, `width` at most.
        depth: The number of tokens drafted after a match, `D`.
        width: The largest number of matches that are followed.
        max_ngram: The most tokens by which earlier text is told to match the text's
            end; a longer match is copied first.
    """

    num_nodes: int = 60
    depth: int = 6
    width: int = 10
    max_ngram: int = 3

    def __post_init__(self) -> None:
        """Refuses sizes outside their range."""
        check_types(self)
        require_counts(self, num_nodes=1, depth=0, width=1)
        require(1 <= self.max_ngram <= 64, "max_ngram", self.max_ngram, "1 to 64")

    @property
    def levels(self) -> int:
        """The levels worth drafting: of `N` nodes none is deeper than `N - 1`."""
        return min(self.depth, self.num_nodes - 1)

    @property
    def num_matches(self) -> int:
        """The number of matches that are followed, at least 1."""
        return max(min(self.width, (self.num_nodes - 1) // max(self.levels, 1)), 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LookupDrafter:
    """Prompt lookup behind the `Drafter` protocol; it has no parameters.

    Attributes:
        depth: The number of tokens drafted after a match, `D`.
        num_matches: The number of matches that are followed; 1 makes a chain, and
            `N = 1 + D * num_matches`.
        max_ngram: The largest number of tokens that a match has in common with the
            text's end; a longer match comes first, then an earlier one.
    """

    depth: int = 10
    num_matches: int = 1
    max_ngram: int = 3

    def __post_init__(self) -> None:
        """Refuses sizes below their range."""
        require_counts(self, depth=0, num_matches=1, max_ngram=1)

    @property
    def num_nodes(self) -> int:
        """The number of nodes of the tree, `N`."""
        return 1 + self.depth * self.num_matches

    def init_state(self, batch: int, capacity: int) -> LookupState:
        """See `Drafter.init_state`."""
        return LookupState(
            tokens=jnp.zeros((batch, capacity), jnp.int32),
            length=jnp.zeros(batch, jnp.int32),
        )

    def prefill_chunk(
        self, params: Any, state: LookupState, chunk: PromptChunk
    ) -> LookupState:
        """See `Drafter.prefill_chunk`."""
        text = jax.lax.dynamic_update_slice_in_dim(
            state.tokens, chunk.tokens, chunk.begin, axis=1
        )
        return LookupState(tokens=text, length=state.length + chunk.count)

    def truncate(self, state: LookupState, length: jax.Array) -> LookupState:
        """See `Truncating`."""
        return dataclasses.replace(state, length=length)

    def propose(
        self, params: Any, state: LookupState, root: jax.Array, draws: Draws
    ) -> tuple[DraftTree, LookupState]:
        """See `Drafter.propose`."""
        return self.draft(state, root)[0], state

    def draft(self, state: LookupState, root: jax.Array) -> tuple[DraftTree, jax.Array]:
        """Returns the trees, `[B, N]` fields, and how long the longest matches are.

        Args:
            state: The text of each row, root excluded.
            root: `[B]` int32, the last emitted tokens.

        Returns:
            The trees, and `[B]` int32, the number of tokens, root included, that each
            row's longest match has in common with the text's end; `max_ngram` at most.
        """
        batch = root.shape[0]
        text = state.tokens.at[jnp.arange(batch), state.length].set(root)
        return jax.vmap(self._draft)(text, state.length + 1)

    def advance(
        self, params: Any, state: LookupState, verified: Verified
    ) -> LookupState:
        """See `Drafter.advance`; tokens of the path past `count` are overwritten."""
        write = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=0)
        text = jax.vmap(write)(state.tokens, verified.path_tokens, state.length)
        return LookupState(tokens=text, length=state.length + verified.count)

    def _draft(self, text: jax.Array, length: jax.Array) -> tuple[DraftTree, jax.Array]:
        """Returns `draft` of one row, whose text `[S]` ends with the root."""
        starts, matched = find_matches(
            text, length, max_ngram=self.max_ngram, num_matches=self.num_matches
        )
        steps = jnp.arange(self.depth)
        places = starts[:, None] + steps
        exists = (matched > 0)[:, None] & (places < length)
        drafts = text[jnp.minimum(places, text.shape[0] - 1)]
        root, num_nodes = text[length - 1], self.num_nodes
        return join(root, drafts, exists, num_nodes=num_nodes), matched[0]


def find_matches(
    text: jax.Array, length: jax.Array, *, max_ngram: int, num_matches: int
) -> tuple[jax.Array, jax.Array]:
    """Returns where the end of a text stood before, the longest match first.

    >>> text = jnp.array([5, 6, 7, 5, 6, 8, 5, 6, 0, 0])
    >>> find_matches(text, jnp.array(8), max_ngram=3, num_matches=2)
    (Array([2, 5], dtype=int32), Array([2, 2], dtype=int32))

    Args:
        text: `[S]` int32, the tokens of the text.
        length: `[]` int32, how many of them are real, at least 1.
        max_ngram: The largest number of tokens that are compared. Static.
        num_matches: The number of matches wanted. Static.

    Returns:
        `[num_matches]` int32, the places after the matches, and `[num_matches]` int32,
        how many tokens they have in common with the text's end, 0 where there is no
        match. Of matches of equal length the earlier comes first.
    """
    capacity = text.shape[0]
    places = jnp.arange(capacity)
    is_same = (places >= 1) & (places < length)
    matched = jnp.zeros(capacity, jnp.int32)
    for back in range(1, max_ngram + 1):
        before = text[jnp.maximum(places - back, 0)]
        wanted = text[jnp.maximum(length - back, 0)]
        is_same &= (places >= back) & (length >= back) & (before == wanted)
        matched += is_same.astype(jnp.int32)
    scores = jnp.where(matched > 0, matched * capacity + (capacity - places), 0)
    count = min(num_matches, capacity)
    _, found = jax.lax.top_k(scores, count)
    missing = (0, num_matches - count)
    return (
        jnp.pad(found.astype(jnp.int32), missing),
        jnp.pad(matched[found], missing),
    )
