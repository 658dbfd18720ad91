"""A target and a drafter without weights, whose logits are a function of the path.

Whole decoding loops run with them in milliseconds, and since every path has logits
of its own, a stale cache slot or a mask that shows a sibling changes the text.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from eagle_jax import tree as trees
from eagle_jax.config import TreeConfig
from eagle_jax.interface import Draws, PromptChunk, TargetOutput, Verified
from eagle_jax.sampling import SamplingParams, process_logits


def path_code(tokens: jax.Array, positions: jax.Array) -> jax.Array:
    """Returns each token's code, its share of its path's state.

    The state of a path is the sum of its tokens' codes, modulo 2**32: it depends on
    what was seen at which position, and, like attention, not on any order of reading.

    Args:
        tokens: `[...]` int32, the tokens.
        positions: `[...]` int32, their absolute positions.

    Returns:
        The codes, `[...]` uint32, whose bits are well mixed.
    """
    code = tokens.astype(jnp.uint32) * jnp.uint32(2654435761)
    code = code + (positions.astype(jnp.uint32) + jnp.uint32(1)) * jnp.uint32(40503)
    return _mix(code)


def _mix(code: jax.Array) -> jax.Array:
    """Mixes every bit into all bits; it compiles far quicker than a PRNG."""
    for shift, factor in ((16, 2246822507), (13, 3266489909)):
        code = (code ^ (code >> shift)) * jnp.uint32(factor)
    return code ^ (code >> 16)


def path_logits(
    state: jax.Array, *, vocab_size: int, sharpness: float, seed: int
) -> jax.Array:
    """Returns the logits after paths.

    Args:
        state: `[...]` uint32, the sums of the paths' `path_code`.
        vocab_size: The number of tokens, `V`. Static.
        sharpness: The standard deviation of the logits. Static.
        seed: The model's seed: another seed is another model. Static.

    Returns:
        `[..., V]` float32, uniform with this deviation.
    """
    offset = jnp.uint32(seed * 7919 + 1) * jnp.uint32(2246822519)
    words = jnp.arange(vocab_size, dtype=jnp.uint32) * jnp.uint32(3266489917) + offset
    bits = _mix(state[..., None] ^ _mix(words))
    # The upper 24 bits: float32 holds them exactly.
    uniform = (bits >> 8).astype(jnp.float32) / 2**24
    return sharpness * 12**0.5 * (uniform - 0.5)


@struct.dataclass(kw_only=True)
class ToyCache:
    """The codes of the confirmed tokens.

    Attributes:
        codes: `[B, S]` uint32, the `path_code` of each confirmed token.
        length: `[B]` int32, the number of confirmed tokens.
    """

    codes: jax.Array
    length: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToyTarget:
    """A `Target` without weights.

    Attributes:
        vocab_size: The number of tokens, `V`.
        sharpness: The standard deviation of the logits.
        seed: The model's seed: another seed is another model.
    """

    vocab_size: int = 8
    sharpness: float = 2.0
    seed: int = 0

    def init_cache(self, batch: int, capacity: int) -> ToyCache:
        """Returns an empty cache, see `Target.init_cache`."""
        return ToyCache(
            codes=jnp.zeros((batch, capacity), jnp.uint32),
            length=jnp.zeros(batch, jnp.int32),
        )

    def forward(
        self,
        params: Any,
        tokens: jax.Array,
        positions: jax.Array,
        mask: jax.Array | None,
        cache: ToyCache,
    ) -> TargetOutput:
        """Returns each path's state as hidden state and feature."""
        del params
        codes = path_code(tokens, positions)
        if mask is None:
            mask = jnp.tri(tokens.shape[1], dtype=bool)[None]
        zero = jnp.uint32(0)
        is_cached = jnp.arange(cache.codes.shape[1]) < cache.length[:, None]
        past = jnp.where(is_cached, cache.codes, zero).sum(axis=1, dtype=jnp.uint32)
        seen = jnp.where(mask, codes[:, None, :], zero).sum(axis=2, dtype=jnp.uint32)
        state = (past[:, None] + seen)[..., None]
        return TargetOutput(hidden=state, features=state, entries=codes)

    def unembed(self, params: Any, hidden: jax.Array) -> jax.Array:
        """Returns the logits after paths, see `Target.unembed`."""
        del params
        return path_logits(
            hidden[..., 0],
            vocab_size=self.vocab_size,
            sharpness=self.sharpness,
            seed=self.seed,
        )

    def commit(
        self, cache: ToyCache, entries: jax.Array, path: jax.Array, count: jax.Array
    ) -> ToyCache:
        """Appends the codes of accepted tokens, see `Target.commit`."""
        window = jnp.take_along_axis(entries, path, axis=1)
        write = jax.vmap(functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=0))
        return ToyCache(
            codes=write(cache.codes, window, cache.length), length=cache.length + count
        )


@struct.dataclass(kw_only=True)
class ToyDraftState:
    """The confirmed text as one number.

    Attributes:
        state: `[B]` uint32, the sum of the confirmed tokens' codes.
        length: `[B]` int32, the number of confirmed tokens.
    """

    state: jax.Array
    length: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToyDrafter:
    """A `Drafter` that knows the target's logits up to noise.

    Its parameters are one number, the agreement, `[]` float32: 1 drafts with the
    target's own logits, 0 with unrelated ones, -1 with their opposite.

    Attributes:
        target: The target whose logits it imitates.
        tree: The shape of the tree.
    """

    target: ToyTarget
    tree: TreeConfig

    @property
    def depth(self) -> int:
        """The depth of the deepest node that may be proposed, see `Drafter.depth`."""
        return self.tree.levels

    def init_state(self, batch: int, capacity: int) -> ToyDraftState:
        """Returns the state of an empty text, see `Drafter.init_state`."""
        del capacity
        return ToyDraftState(
            state=jnp.zeros(batch, jnp.uint32), length=jnp.zeros(batch, jnp.int32)
        )

    def prefill_chunk(
        self, params: Any, state: ToyDraftState, chunk: PromptChunk
    ) -> ToyDraftState:
        """Reads a chunk of the prompts, see `Drafter.prefill_chunk`."""
        del params
        return _confirm(state, chunk.tokens, chunk.count)

    def propose(
        self, params: Any, state: ToyDraftState, root: jax.Array, draws: Draws
    ) -> tuple[trees.DraftTree, ToyDraftState]:
        """Returns the drafted trees and the state, see `Drafter.propose`."""
        propose = functools.partial(
            self._propose_row, params, draws.sampling.any_filter
        )
        rows = (root, state.state, state.length, draws.sampling, draws.noise)
        return jax.vmap(propose)(*rows), state

    def advance(
        self, params: Any, state: ToyDraftState, verified: Verified
    ) -> ToyDraftState:
        """Adds the accepted tokens to the text, see `Drafter.advance`."""
        del params
        return _confirm(state, verified.path_tokens, verified.count)

    def _propose_row(
        self,
        agreement: jax.Array,
        any_filter: jax.Array,
        root: jax.Array,
        confirmed: jax.Array,
        length: jax.Array,
        sampling: SamplingParams,
        noise: jax.Array | None,
    ) -> trees.DraftTree:
        config = self.tree
        if self.depth == 0:
            return trees.root_only(root, config.num_nodes)

        def children_of(states: jax.Array, level: int) -> tuple[jax.Array, jax.Array]:
            scores = self._logits(agreement, states)
            if noise is not None:
                scores = process_logits(scores, sampling, any_filter) + noise[level - 1]
            return trees.top_children(scores, config.width)

        states = confirmed + path_code(root, length)
        children = children_of(states, 1)
        candidates, frontier = trees.first_level(*children, depth=self.depth)
        states = states[None]
        for level in range(2, self.depth + 1):
            codes = path_code(frontier.tokens, length + level - 1)
            states = states[frontier.parents] + codes
            children = children_of(states, level)
            candidates, frontier = trees.expand(
                candidates, frontier, *children, level=level, rank_by=config.rank_by
            )
        return trees.rerank(
            candidates,
            root,
            num_nodes=config.num_nodes,
            rank_by=config.rank_by,
            use_rerank=config.rerank,
        )

    def _logits(self, agreement: jax.Array, states: jax.Array) -> jax.Array:
        target = self.target
        logits = functools.partial(
            path_logits,
            states,
            vocab_size=target.vocab_size,
            sharpness=target.sharpness,
        )
        noise = (1 - jnp.abs(agreement)) * logits(seed=target.seed + 1)
        return agreement * logits(seed=target.seed) + noise


def _confirm(
    state: ToyDraftState, tokens: jax.Array, count: jax.Array
) -> ToyDraftState:
    """Adds the first `count` (`[B]`) of the tokens (`[B, W]` int32) to the text."""
    offsets = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    codes = path_code(tokens, state.length[:, None] + offsets)
    is_new = offsets < count[:, None]
    total = jnp.where(is_new, codes, jnp.uint32(0)).sum(axis=1, dtype=jnp.uint32)
    return ToyDraftState(state=state.state + total, length=state.length + count)
