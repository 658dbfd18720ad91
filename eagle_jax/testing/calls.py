"""Calls of a target over trees of known paths, for checking what it returns."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.interface import Cache, Target, TargetOutput
from eagle_jax.testing.asserts import check

LONGEST = 16
"""The tokens of a text that is read at once, and the slots of the caches."""

READ_ROWS = 18
"""The texts that are read at once."""

ROWS = 3
"""The rows of all other calls."""


class Caller:
    """A target whose calls are compiled once per shape."""

    def __init__(
        self, target: Target, params: Any, vocab_size: int, atol: float
    ) -> None:
        """Keeps the arguments of `assert_valid_target`."""
        self.target, self.params = target, params
        self.vocab_size, self.atol = vocab_size, atol
        self.name = type(target).__name__
        self._run = jax.jit(self._traced)
        self._commit = jax.jit(lambda *arguments: target.commit(*arguments))

    def run(
        self, tokens: Any, positions: Any, mask: Any, cache: Cache
    ) -> tuple[jax.Array, TargetOutput]:
        """Returns the logits `[B, T, V]` and the output of `Target.forward`."""
        tokens, positions = (jnp.asarray(x, jnp.int32) for x in (tokens, positions))
        mask = None if mask is None else jnp.asarray(mask)
        logits, first, output = self._run(self.params, tokens, positions, mask, cache)
        wrong = self.differs(first, logits[:, 0]) & np.isfinite(logits[:, 0]).all(-1)
        check(
            not wrong.any(),
            f"{self.name}.unembed: the logits of hidden states [B, E] are not those of "
            "the same states in [B, T, E]; without an axis of tokens it mixes up the "
            "rows, or scales them otherwise",
        )
        return logits, output

    def commit(self, cache: Cache, entries: Any, path: Any, count: Any) -> Cache:
        """Returns the cache after `Target.commit`."""
        path, count = (jnp.asarray(x, jnp.int32) for x in (path, count))
        return self._commit(cache, entries, path, count)

    def read(
        self, texts: Sequence[Sequence[int]], length: int = LONGEST
    ) -> tuple[np.ndarray, np.ndarray]:
        """Reads texts causally, each alone: the judge of all other calls.

        At most `READ_ROWS` texts are padded to `length` tokens; logits and features are
        `[READ_ROWS, length, V]` and `[..., F]`.
        """
        assert len(texts) <= READ_ROWS
        tokens = np.zeros((READ_ROWS, length), int)
        for row, text in enumerate(texts):
            tokens[row, : len(text)] = text
        positions = np.broadcast_to(np.arange(length), tokens.shape)
        nothing = self.target.init_cache(READ_ROWS, 0)
        logits, output = self.run(tokens, positions, None, nothing)
        return np.asarray(logits), np.asarray(output.features)

    def differs(self, found: Any, expected: Any) -> np.ndarray:
        """Returns where, on all axes but the last, arrays differ; NaN does."""
        found, expected = (np.asarray(x, np.float64) for x in (found, expected))
        largest = np.abs(expected).max(initial=1, where=np.isfinite(expected))
        return ~(np.abs(found - expected).max(axis=-1) <= self.atol * largest)

    def _traced(
        self, params: Any, tokens: Any, positions: Any, mask: Any, cache: Cache
    ) -> tuple[jax.Array, jax.Array, TargetOutput]:
        target, given = self.target, jax.tree.leaves(cache)
        output = target.forward(params, tokens, positions, mask, cache)
        left = jax.tree.leaves(cache)
        check(
            [*map(id, given)] == [*map(id, left)],
            f"{self.name}.forward writes into the cache that it was given; return what "
            "is new as entries, and leave the writing to commit",
        )
        logits = target.unembed(params, output.hidden)
        # A prompt's first token is chosen from one row of logits.
        first = target.unembed(params, output.hidden[:, 0])
        for array in (logits, first):
            check(
                array.shape[-1] == self.vocab_size,
                f"{self.name}.unembed returns {array.shape[-1]} logits per token, but "
                f"vocab_size is {self.vocab_size}",
            )
        return logits, first, output


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """New tokens for each row, a tree or a chain.

    Attributes:
        texts: The tokens that are committed in each row.
        tokens: `[B, T]` int, the new tokens.
        parents: `[B][T]`, the parent of each, -1 for the first and for padding.
        longest: The tokens to which texts are padded that judge it.
    """

    texts: list[list[int]]
    tokens: np.ndarray
    parents: Sequence[Sequence[int]]
    longest: int = LONGEST

    @property
    def is_causal(self) -> bool:
        """Whether every row is a chain: the mask is `None` then."""
        chain = [*range(-1, self.tokens.shape[1] - 1)]
        return all([*row] == chain for row in self.parents)

    @property
    def is_node(self) -> np.ndarray:
        """`[B, T]` bool, false in padding."""
        is_node = np.array(self.parents) >= 0
        is_node[:, 0] = True
        return is_node

    @property
    def nodes(self) -> Iterator[tuple[int, ...]]:
        """Every row and node."""
        return iter(np.ndindex(*self.tokens.shape))

    def path(self, row: int, node: int) -> list[int]:
        """Returns a node's ancestors, root first, and itself."""
        parent = self.parents[row][node]
        return [*(self.path(row, parent) if parent >= 0 else ()), node]

    def text(self, row: int, path: Sequence[int]) -> list[int]:
        """Returns a row's tokens, and those of a path after them."""
        return self.texts[row] + self.tokens[row, list(path)].tolist()

    def run(
        self, caller: Caller, cache: Cache, shift: int = 0
    ) -> tuple[jax.Array, TargetOutput]:
        """Returns logits and output; all positions are `shift` too large."""
        mask = np.zeros((*self.tokens.shape, self.tokens.shape[1]), bool)
        positions = np.zeros(self.tokens.shape, int)
        for row, node in self.nodes:
            path = self.path(row, node)
            mask[row, node, path] = True
            positions[row, node] = len(self.texts[row]) + len(path) - 1 + shift
        visible = None if self.is_causal else mask
        return caller.run(self.tokens, positions, visible, cache)

    def judged(self, caller: Caller) -> tuple[np.ndarray, np.ndarray]:
        """Returns logits and features as they should be, `[B, T, V or F]`.

        Padding gets those of some node.
        """
        texts: list[list[int]] = []
        places: dict[tuple[int, ...], tuple[int, int]] = {}
        # From the end, the first path with a node in it is one to a leaf.
        for row, node in reversed([*self.nodes]):
            if (row, node) in places or not self.is_node[row, node]:
                continue
            path, begin = self.path(row, node), len(self.texts[row])
            for place, above in enumerate(path, begin):
                places[row, above] = len(texts), place
            texts.append(self.text(row, path))
        found = np.array([places.get(node, (0, 0)) for node in self.nodes])
        index = tuple(found.T.reshape(2, *self.tokens.shape))
        logits, features = caller.read(texts, self.longest)
        return logits[index], features[index]

    def without_padding(self) -> "Call":
        """Returns the call with children of the root instead of padding."""
        parents = np.where(self.is_node, self.parents, 0)
        return dataclasses.replace(self, parents=parents.tolist())

    def with_token(self, row: int, node: int, vocab_size: int) -> "Call":
        """Returns the call with another token in one place."""
        tokens = self.tokens.copy()
        tokens[row, node] = (tokens[row, node] + 1) % vocab_size
        return dataclasses.replace(self, tokens=tokens)

    def rolled(self, row: int) -> "Call":
        """Returns the call with this row first."""
        return dataclasses.replace(
            self,
            texts=[*self.texts[row:], *self.texts[:row]],
            tokens=np.roll(self.tokens, -row, axis=0),
            parents=[*self.parents[row:], *self.parents[:row]],
        )


@dataclasses.dataclass(frozen=True)
class Commit:
    """A commit, and the call that it took its entries from.

    Attributes:
        call: The call.
        seen: The cache that the call saw.
        cache: The cache that was written to.
        path: `[B, P]` int.
        count: `[B]` int.
    """

    call: Call
    seen: Cache
    cache: Cache
    path: np.ndarray
    count: np.ndarray

    def run(self, caller: Caller, first: int = 0) -> Cache:
        """Returns the new cache, with one row put before those before it."""
        seen, cache = rolled(self.seen, first), rolled(self.cache, first)
        _, output = self.call.rolled(first).run(caller, seen)
        path, count = (np.roll(x, -first, axis=0) for x in (self.path, self.count))
        return caller.commit(cache, output.entries, path, count)

    @property
    def texts(self) -> list[list[int]]:
        """The tokens of each row after the commit."""
        pairs = zip(self.path, self.count, strict=True)
        return [
            self.call.text(row, path[:count]) for row, (path, count) in enumerate(pairs)
        ]


def rolled(cache: Cache, row: int) -> Cache:
    """Returns a cache with this row first: every leaf has the batch first."""
    return jax.tree.map(lambda leaf: jnp.roll(leaf, -row, axis=0), cache)
