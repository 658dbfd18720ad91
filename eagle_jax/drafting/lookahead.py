"""Lookahead: n-grams that the target was led to are tried where they may fit again.

This is lookahead decoding (Fu et al. 2024) in fixed shapes. A window of guesses at the
next positions is refined by the target itself, one step of a Jacobi iteration per
round; the n-grams along which it went are kept, the newest of each first token, and
those of the last emitted token are drafted. Window and n-grams are one tree, which is
verified as any other: where the text goes through the window, that is accepted, too.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from eagle_jax.config import require_counts
from eagle_jax.interface import Draws, PromptChunk, Verified
from eagle_jax.parsing import check_types
from eagle_jax.prng import make_key
from eagle_jax.tree import ROOT, DraftTree, join

_NOTHING = -1
"""The tokens of a place in the pool that is free; never an index."""


@struct.dataclass(kw_only=True)
class LookaheadState:
    """The window and the pool of n-grams.

    Attributes:
        window: `[B, level - 1, W']` int32, the window's rows, the oldest first. It
            begins `W' = window + level - 2` columns wide with one row, and each of the
            first rounds adds a row and takes a column off. Column `i` of row 0 stands
            `i` tokens after the root (column 0 is the root, and undefined here), and
            each row's cell one token after the one above it.
        filled: `[B]` int32, how many rows there are, 1 to `level - 1`.
        pool: `[B, V, guesses * (level - 1)]` int32, for every token the tokens that
            followed it in `guesses` n-grams, the newest last; -1 in free places, which
            come first. The n-grams lie flat, as accelerators pad the last axes.
    """

    window: jax.Array
    filled: jax.Array
    pool: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class LookaheadConfig:
    """The sizes of lookahead decoding.

    Attributes:
        level: The length of its n-grams, the key token included: N in the paper.
        window: The positions ahead that are guessed at together: W in the paper.
        guesses: The n-grams that are kept per token, and tried: G in the paper.
    """

    level: int = 5
    window: int = 7
    guesses: int = 7

    def __post_init__(self) -> None:
        """Refuses sizes below their range."""
        check_types(self)
        require_counts(self, level=2, window=1, guesses=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LookaheadDrafter(LookaheadConfig):
    """Lookahead decoding behind the `Drafter` protocol; it has no parameters.

    As published (`ALWAYS_FWD_ONE`) the window takes one step per round, however many
    tokens were accepted, and holds the target's most likely tokens at any temperature.
    The published prefill carries the window's first row along; here the first round
    does, which is the published procedure for the prompt with its first emitted token
    appended. The published code verifies nothing until all rows are there; here every
    round does. A round without drafts leaves window and pool as they are.

    Attributes:
        vocab_size: The number of tokens the target knows, `V`.
    """

    vocab_size: int

    @property
    def depth(self) -> int:
        """The depth of the window's last cell or of an n-gram's end, `D`."""
        return max(self.first_width - 1, self.level - 1)

    @property
    def num_nodes(self) -> int:
        """The number of nodes of the tree, `N`: root, window and n-grams.

        A window of fewer columns than rows is largest while it still grows, and there
        are no n-grams yet.
        """
        most = max(self.window, (self.first_width + 1) // 2)
        growing = most * (self.first_width + 1 - most)
        return max(growing, (self.level - 1) * (self.window + self.guesses))

    @property
    def first_width(self) -> int:
        """The number of columns of a window of one row, `W'`."""
        return self.window + self.level - 2

    def init_state(self, batch: int, capacity: int) -> LookaheadState:
        """See `Drafter.init_state`; a longer text needs no larger pool."""
        rows, width = self.level - 1, self.first_width
        pool = (batch, self.vocab_size, self.guesses * rows)
        return LookaheadState(
            window=jnp.zeros((batch, rows, width), jnp.int32),
            filled=jnp.ones(batch, jnp.int32),
            pool=jnp.full(pool, _NOTHING, jnp.int32),
        )

    def prefill_chunk(
        self, params: Any, state: LookaheadState, chunk: PromptChunk
    ) -> LookaheadState:
        """See `Drafter.prefill_chunk`; the window begins with random tokens.

        They are the same ones for the same prompt, whatever else is in the batch.
        """
        words = jax.random.bits(make_key(0), (self.first_width,))
        places = words % chunk.lengths[:, None].astype(words.dtype)
        first = jnp.take_along_axis(chunk.prompts, places.astype(jnp.int32), axis=1)
        return dataclasses.replace(state, window=state.window.at[:, 0].set(first))

    def truncate(self, state: LookaheadState, length: jax.Array) -> LookaheadState:
        """See `Truncating`; what later tokens taught is forgotten with them."""
        return self.init_state(len(state.filled), 0)

    def propose(
        self, params: Any, state: LookaheadState, root: jax.Array, draws: Draws
    ) -> tuple[DraftTree, LookaheadState]:
        """See `Drafter.propose`."""
        return jax.vmap(self._draft)(state, root), state

    def advance(
        self, params: Any, state: LookaheadState, verified: Verified
    ) -> LookaheadState:
        """See `Drafter.advance`; reads the logits after the window's newest row."""
        if verified.tree.tokens.shape[1] < self.num_nodes:  # No window was verified.
            return state
        is_running = verified.count > 0
        return jax.vmap(self._step)(state, verified.tree, verified.logits, is_running)

    def _cells(self, state: LookaheadState) -> tuple[jax.Array, jax.Array]:
        """Returns the paths to the newest cells of a row, and where they have tokens.

        Both are `[W', D]`. Column `i` ends one: `i` cells along row 0, then down.
        """
        columns, steps = jnp.arange(self.first_width), jnp.arange(1, self.depth + 1)
        width = self.first_width + 1 - state.filled
        ends = jnp.where(columns < width, columns + state.filled - 1, 0)
        down = jnp.clip(steps - columns[:, None], 0, self.level - 2)
        along = jnp.minimum(steps, columns[:, None])
        return state.window[down, along], steps <= ends[:, None]

    def _draft(self, state: LookaheadState, root: jax.Array) -> DraftTree:
        cells, is_cell = self._cells(state)
        known = state.pool[root].reshape(self.guesses, self.level - 1)
        short = (0, self.depth - (self.level - 1))
        known = jnp.pad(known, ((0, 0), short), constant_values=_NOTHING)
        paths = jnp.concatenate([cells, known])
        exists = jnp.concatenate([is_cell, known != _NOTHING])
        return join(root, paths, exists, num_nodes=self.num_nodes)

    def _step(
        self,
        state: LookaheadState,
        tree: DraftTree,
        logits: jax.Array,
        is_running: jax.Array,
    ) -> LookaheadState:
        """Returns the state of one row after a round; what ended stays as it is."""

        def descend(nodes: jax.Array, step: Any) -> tuple[jax.Array, None]:
            tokens, is_there = step
            is_below = tree.parents == nodes[:, None]
            below = jnp.argmax(is_below & (tree.tokens == tokens[:, None]), axis=1)
            return jnp.where(is_there, below, nodes), None

        cells, is_cell = self._cells(state)
        begin = jnp.full(self.first_width, ROOT)
        newest, _ = jax.lax.scan(descend, begin, (cells.T, is_cell.T))
        follows = jnp.argmax(logits[newest], axis=-1).astype(jnp.int32)
        is_full = state.filled == self.level - 1
        window = state.window.at[0, 0].set(tree.tokens[ROOT])
        rows = jnp.concatenate([window, follows[None]])
        # What follows column `i` stands one token further ahead, and so does the root.
        is_new = jnp.arange(self.level - 1) == state.filled
        longer = jnp.roll(jnp.where(is_new[:, None], follows, window), -1, axis=1)
        moved = jnp.where(is_full, rows[1:], longer)
        keys, *others = rows[:, : self.window]
        keys = jnp.where(is_running & is_full, keys, self.vocab_size)
        return dataclasses.replace(
            state,
            window=jnp.where(is_running, moved, state.window),
            filled=jnp.where(is_running & ~is_full, state.filled + 1, state.filled),
            pool=self._push(state.pool, keys, jnp.stack(others, axis=1)),
        )

    def _push(self, pool: jax.Array, keys: jax.Array, ngrams: jax.Array) -> jax.Array:
        """Returns the pool of one row with n-grams more, the newest last.

        Those `[window, level - 1]` after keys `[window]` past the vocabulary are none.
        """
        places = jnp.arange(self.guesses)

        def push(pool: jax.Array, pushed: Any) -> tuple[jax.Array, None]:
            key, ngram = pushed
            known = pool[key].reshape(self.guesses, -1)
            # It leaves the place that it had; a new one takes the oldest's, the first.
            left = jnp.argmax((known == ngram).all(axis=1))
            moved = known[jnp.where(places < left, places, places + 1)]
            newest = moved.at[-1].set(ngram).reshape(-1)
            return pool.at[key].set(newest, mode="drop"), None

        return jax.lax.scan(push, pool, (keys, ngrams))[0]
