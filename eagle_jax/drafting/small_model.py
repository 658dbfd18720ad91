"""Any target as a draft model (Leviathan et al. 2022; Chen et al. 2023)."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from eagle_jax.drafting.model import read_waiting
from eagle_jax.interface import Cache, DraftingTarget, Entries, PromptChunk, Target
from eagle_jax.interface.ordering import after
from eagle_jax.interface.prefill import read_chunk
from eagle_jax.models.layers import take_token


@struct.dataclass(kw_only=True)
class SmallModelState:
    """The confirmed text of each row as the small model has read it.

    Attributes:
        cache: The cache of the confirmed text up to the first of `tokens`, included.
        length: `[B]` int32, the number of tokens in the cache.
        tokens: `[B, P]` int32, the last accepted path, root first; its first token is
            in the cache already, and the next root will stand after its last.
        count: `[B]` int32, how many of them are real.
    """

    cache: Cache
    length: jax.Array
    tokens: jax.Array
    count: jax.Array


class _Drafts(NamedTuple):
    """All drafts of a round so far, to be run again: `[B, U]` and `[B, U, U]` bool."""

    tokens: jax.Array
    positions: jax.Array
    mask: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmallModel:
    """Any `Target` with the vocabulary of the larger one, as a `DraftModel`.

    Its outputs are hidden states, `X = E`; its parameters are the target's. A
    `DraftingTarget` runs each level of a tree once. Any other target runs all drafts
    of the round again at each level, beside its cache: the trees are the same, and a
    round runs `K * D * (D - 1) / 2` nodes in place of `K * (D - 1)`, in as many calls.

    Attributes:
        target: The small model itself.
        vocab_size: See `DraftModel.vocab_size`.
    """

    target: Target
    vocab_size: int

    @property
    def max_levels(self) -> int | None:
        """See `DraftModel.max_levels`."""
        return None

    def init_state(self, batch: int, capacity: int, depth: int) -> SmallModelState:
        """See `DraftModel.init_state`."""
        return SmallModelState(
            cache=self.target.init_cache(batch, capacity),
            length=jnp.zeros(batch, jnp.int32),
            tokens=jnp.zeros((batch, depth + 1), jnp.int32),
            count=jnp.zeros(batch, jnp.int32),
        )

    def prefill_chunk(
        self, params: Any, state: SmallModelState, chunk: PromptChunk
    ) -> SmallModelState:
        """See `Drafter.prefill_chunk`; only the root is left to be read."""
        count = chunk.count
        _, cache = read_chunk(
            self.target,
            params,
            chunk.tokens,
            count,
            chunk.begin,
            state.cache,
            is_whole=chunk.features.shape[1] == chunk.prompts.shape[1],
        )
        length, one = state.length + count, jnp.ones_like(count)
        return dataclasses.replace(state, cache=cache, length=length, count=one)

    def truncate(self, state: SmallModelState, length: jax.Array) -> SmallModelState:
        """See `Truncating`, which its target must be, too."""
        target: Any = self.target
        cache = target.truncate(state.cache, length)
        return dataclasses.replace(state, cache=cache, length=length)

    def advance(
        self,
        state: SmallModelState,
        tokens: jax.Array,
        features: jax.Array,
        count: jax.Array,
    ) -> SmallModelState:
        """See `Drafter.advance`."""
        return dataclasses.replace(state, tokens=tokens, count=count)

    def read(
        self, params: Any, state: SmallModelState, root: jax.Array
    ) -> tuple[jax.Array, SmallModelState]:
        """See `DraftModel.read`; it reads the path after the old root, and the new."""

        def run(
            following: jax.Array, rows: jax.Array, last: jax.Array
        ) -> tuple[jax.Array, Entries]:
            positions = state.length[:, None] + rows
            output = self.target.forward(
                params, following, positions, None, state.cache
            )
            return take_token(output.hidden, last), output.entries

        def commit(
            cache: Cache, entries: Entries, rows: jax.Array, count: jax.Array
        ) -> Cache:
            # A target's writes need not depend on `count`, which waits for the read.
            rows = after(rows, count[:, None])
            return self.target.commit(cache, entries, rows, count)

        output, read = read_waiting(state, root, run, commit)
        return output, dataclasses.replace(read, length=state.length + state.count)

    def step(
        self,
        params: Any,
        state: SmallModelState,
        tokens: jax.Array,
        above: jax.Array,
        visible: jax.Array,
        earlier: Any,
        *,
        level: int,
    ) -> tuple[jax.Array, Any]:
        """See `DraftModel.step`; the parents' outputs are not read."""
        positions = state.length[:, None] + jnp.full_like(tokens, level - 1)
        drafts = _Drafts(tokens, positions, visible)
        if isinstance(self.target, DraftingTarget):
            output = self.target.forward_after(params, *drafts, state.cache, earlier)
            return output.hidden, output.entries
        if earlier is not None:
            drafts = _join(earlier, drafts)
        output = self.target.forward(params, *drafts, state.cache)
        return output.hidden[:, -tokens.shape[1] :], drafts

    def logits(self, params: Any, outputs: jax.Array, *, level: int) -> jax.Array:
        """See `DraftModel.logits`."""
        return self.target.unembed(params, outputs)

    def tokens(self, params: Any, choices: jax.Array) -> jax.Array:
        """See `DraftModel.tokens`; the vocabulary is the target's, so `W = V`."""
        return choices


def _join(earlier: _Drafts, new: _Drafts) -> _Drafts:
    """Returns all drafts; the mask of the new ones, `[B, M, U]`, is complete."""
    unseen = ((0, 0), (0, 0), (0, new.tokens.shape[1]))
    return _Drafts(
        tokens=jnp.concatenate([earlier.tokens, new.tokens], axis=1),
        positions=jnp.concatenate([earlier.positions, new.positions], axis=1),
        mask=jnp.concatenate([jnp.pad(earlier.mask, unseen), new.mask], axis=1),
    )
