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

from eagle_jax.config import require, require_counts
from eagle_jax.interface import Draws, PromptChunk, Verified
from eagle_jax.parsing import check_types
from eagle_jax.tree import ROOT, DraftTree, join

_NOTHING = -1
"""The tokens of a place in the pool that is free; never an index."""


@struct.dataclass(kw_only=True)
class LookaheadState:
    """The window and the pool of n-grams.

    Attributes:
        window: `[B, level - 1, W']` int32, the window's rows, the oldest first, in its
            first width: it begins `W' = window + level - 2` columns wide with one row,
            and each of the first rounds adds a row and takes a column off. Column `i`
            of row 0 stands `i` tokens after the root (column 0 is the root itself, and
            undefined here), and each row's cell one token after the one above it.
        filled: `[B]` int32, how many rows there are, 1 to `level - 1`.
        newest: `[B, W']` int32, the nodes of the newest row's cells in the tree that
            `propose` returned; undefined between rounds.
        pool: `[B, V, guesses * (level - 1)]` int32, for every token the tokens that
            followed it in `guesses` n-grams, the newest last; -1 in free places, which
            come first. The n-grams lie flat, as accelerators pad the last axes.
    """

    window: jax.Array
    filled: jax.Array
    newest: jax.Array
    pool: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class LookaheadConfig:
    """The sizes of lookahead decoding.

    Attributes:
        level: The length of its n-grams, the key token included.
        window: The positions ahead that are guessed at together.
        guesses: The n-grams that are kept per token, and tried.
    """

    level: int = 5
    window: int = 7
    guesses: int = 7

    def __post_init__(self) -> None:
        """Refuses sizes below their range."""
        check_types(self)
        require_counts(self, level=2, window=1, guesses=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LookaheadDrafter:
    """Lookahead decoding behind the `Drafter` protocol; it has no parameters.

    As published (`ALWAYS_FWD_ONE`) the window takes one step per round, however many
    tokens were accepted, and holds the target's most likely tokens at any temperature.
    The published prefill carries the window's first row along; here the first round
    does, which is the published procedure for the prompt with its first emitted token
    appended. The published code verifies nothing until all rows are there; here every
    round does.

    Attributes:
        vocab_size: The number of tokens the target knows, `V`.
        level: The length of an n-gram, the key token included: the paper's `N`.
        window: The number of columns of the window: the paper's `W`.
        guesses: The n-grams that are kept per token, and tried: the paper's `G`.
    """

    vocab_size: int
    level: int = 5
    window: int = 7
    guesses: int = 7

    def __post_init__(self) -> None:
        """Refuses sizes below their range."""
        require(self.level >= 2, "level", self.level, "at least 2")
        for name in ("vocab_size", "window", "guesses"):
            value = getattr(self, name)
            require(value >= 1, name, value, "at least 1")

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
        rows = self.level - 1
        return max(growing, rows * (self.window + self.guesses))

    @property
    def first_width(self) -> int:
        """The number of columns of a window of one row, `W'`."""
        return self.window + self.level - 2

    def init_state(self, batch: int, capacity: int) -> LookaheadState:
        """See `Drafter.init_state`."""
        del capacity
        rows, width = self.level - 1, self.first_width
        pool = (batch, self.vocab_size, self.guesses * rows)
        return LookaheadState(
            window=jnp.zeros((batch, rows, width), jnp.int32),
            filled=jnp.ones(batch, jnp.int32),
            newest=jnp.zeros((batch, width), jnp.int32),
            pool=jnp.full(pool, _NOTHING, jnp.int32),
        )

    def prefill_chunk(
        self, params: Any, state: LookaheadState, chunk: PromptChunk
    ) -> LookaheadState:
        """See `Drafter.prefill_chunk`; the window begins with random tokens.

        They are the same ones for the same prompt, whatever else is in the batch.
        """
        del params
        words = jax.random.bits(jax.random.key(0), (self.first_width,))
        lengths = chunk.lengths[:, None].astype(words.dtype)
        places = (words % lengths).astype(jnp.int32)
        first = jnp.take_along_axis(chunk.prompts, places, axis=1)
        return dataclasses.replace(state, window=state.window.at[:, 0].set(first))

    def propose(
        self, params: Any, state: LookaheadState, root: jax.Array, draws: Draws
    ) -> tuple[DraftTree, LookaheadState]:
        """See `Drafter.propose`."""
        del params, draws
        tree, newest = jax.vmap(self._draft)(state, root)
        return tree, dataclasses.replace(state, newest=newest)

    def advance(
        self, params: Any, state: LookaheadState, verified: Verified
    ) -> LookaheadState:
        """See `Drafter.advance`; reads the logits after the window's newest row."""
        del params
        cells = state.newest[:, :, None]
        logits = jnp.take_along_axis(verified.logits, cells, axis=1)
        follows = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        root, is_running = verified.tree.tokens[:, ROOT], verified.count > 0
        return jax.vmap(self._step)(state, root, follows, is_running)

    def _draft(
        self, state: LookaheadState, root: jax.Array
    ) -> tuple[DraftTree, jax.Array]:
        """Returns the tree of one row, and `[W']` the nodes of its newest row's cells.

        Column `i` of the window ends a path: `i` cells along row 0, then down.
        """
        columns = jnp.arange(self.first_width)
        ends = jnp.where(columns < self._width(state), columns + state.filled - 1, 0)
        steps = jnp.arange(1, self.depth + 1)
        down = jnp.clip(steps - columns[:, None], 0, self.level - 2)
        along = jnp.minimum(steps, columns[:, None])
        known = state.pool[root].reshape(self.guesses, self.level - 1)
        short = (0, self.depth - (self.level - 1))
        known = jnp.pad(known, ((0, 0), short), constant_values=_NOTHING)
        paths = jnp.concatenate([state.window[down, along], known])
        exists = jnp.concatenate([steps <= ends[:, None], known != _NOTHING])
        tree, nodes = join(root, paths, exists, num_nodes=self.num_nodes)
        from_root = jnp.pad(nodes, ((0, 0), (1, 0)), constant_values=ROOT)
        return tree, from_root[columns, ends]

    def _step(
        self,
        state: LookaheadState,
        root: jax.Array,
        follows: jax.Array,
        is_running: jax.Array,
    ) -> LookaheadState:
        """Returns the state of one row after a round.

        Args:
            state: The row's state.
            root: `[]` int32, the token that the round began with.
            follows: `[W']` int32, the most likely token after each cell of the newest
                row.
            is_running: `[]` bool; false leaves the row as it is.
        """
        is_full = state.filled == self.level - 1
        window = state.window.at[0, 0].set(root)
        rows = jnp.concatenate([window, follows[None]])
        # What follows column `i` stands one token further ahead, and so does the root.
        is_new = jnp.arange(self.level - 1) == state.filled
        longer = jnp.roll(jnp.where(is_new[:, None], follows, window), -1, axis=1)
        moved = jnp.where(is_full, rows[1:], longer)
        return dataclasses.replace(
            state,
            window=jnp.where(is_running, moved, state.window),
            filled=state.filled + (is_running & ~is_full),
            pool=self._push(
                state.pool,
                rows[0, : self.window],
                rows[1:, : self.window].T,
                is_running & is_full,
            ),
        )

    def _push(
        self, pool: jax.Array, keys: jax.Array, ngrams: jax.Array, is_due: jax.Array
    ) -> jax.Array:
        """Returns the pool of one row with the window's n-grams.

        Pushing one after the other, each to the end of its key's list (from where it
        stood, if it did) and the oldest out of a full one, leaves the newest `guesses`
        different n-grams. So all lists are made at once, and the pool is read once and
        written once: in place, as the carry of a loop must be.

        Args:
            pool: `[V, guesses * (level - 1)]` int32.
            keys: `[window]` int32, the first tokens.
            ngrams: `[window, level - 1]` int32, the tokens after them.
            is_due: `[]` bool; false leaves the pool as it is.
        """
        shape = (self.window, self.guesses, self.level - 1)
        old = pool[keys].reshape(shape)
        is_ours = keys[:, None] == keys
        again = (old[:, :, None] == ngrams).all(axis=-1) & is_ours[:, None]
        is_old = (old[..., 0] != _NOTHING) & ~again.any(axis=-1)
        twin = (ngrams[:, None] == ngrams).all(axis=-1) & is_ours
        is_last = ~jnp.triu(twin, 1).any(axis=-1)
        # `[W, guesses + W]`: each key's list and the pushes, the newest last.
        is_kept = jnp.concatenate([is_old, is_ours & is_last], axis=1)
        pushed = jnp.broadcast_to(ngrams, (self.window, *ngrams.shape))
        every = jnp.concatenate([old, pushed], axis=1)
        every = jnp.where(is_kept[..., None], every, _NOTHING)
        newest = jnp.argsort(is_kept, axis=1, stable=True)[:, -self.guesses :]
        lists = jnp.take_along_axis(every, newest[..., None], axis=1)
        # Out of range: dropped. Equal keys write equal lists.
        places = jnp.where(is_due, keys, self.vocab_size)
        return pool.at[places].set(lists.reshape(self.window, -1), mode="drop")

    def _width(self, state: LookaheadState) -> jax.Array:
        """Returns how many columns of one row's window there are, `[]` int32."""
        return self.first_width + 1 - state.filled
