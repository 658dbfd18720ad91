"""Block heads as draft models: one pass gives every level its distribution."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from eagle_jax.heads.block.model import (
    BlockHeadConfig,
    block_states,
    markov_logits,
    own_mask,
    read_features,
    text_entries,
)
from eagle_jax.heads.feature import HeadParams, join
from eagle_jax.heads.head import Head
from eagle_jax.interface import PromptChunk
from eagle_jax.interface.ordering import after
from eagle_jax.models import cache as kv
from eagle_jax.models.layers import AttentionContext
from eagle_jax.models.transformer import output_head, unembed


@struct.dataclass(kw_only=True)
class BlockState:
    """The confirmed text of each row as the layers read it.

    Attributes:
        cache: The cache of the layers, of the text alone: blocks leave nothing in it.
        features: `[B, P, F]`, the target's features of confirmed tokens that are not
            read yet, oldest first.
        count: `[B]` int32, how many of them are real.
    """

    cache: kv.KVCache
    features: jax.Array
    count: jax.Array


@struct.dataclass(kw_only=True)
class BlockOutput:
    """What a node passes to its children.

    Attributes:
        logits: `[B, M, D, V]` float32, those of every level; the same for all nodes.
        before: `[B, M, r]`, the row of the node's token in the Markov head; `None`
            without one.
    """

    logits: jax.Array
    before: jax.Array | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockHead(Head):
    """A head that drafts a block in one pass.

    All nodes of a level have the same children, unless a Markov head knows their
    tokens: a tree is grown from tables, and nothing is run again for it.
    """

    config: BlockHeadConfig
    join = staticmethod(functools.partial(join, borrows_output_head=True))

    @property
    def max_levels(self) -> int:
        """See `DraftModel.max_levels`."""
        return self.config.num_levels

    def init_state(self, batch: int, capacity: int, depth: int) -> BlockState:
        """See `DraftModel.init_state`."""
        layer, width = self.config.layer, self.config.feature_size
        return BlockState(
            cache=kv.init_cache(
                num_layers=self.config.num_layers,
                batch=batch,
                num_kv_heads=layer.num_kv_heads,
                capacity=capacity,
                head_dim=layer.head_dim,
                dtype=jnp.dtype(self.dtype),
            ),
            features=jnp.zeros((batch, depth + 1, width), self.dtype),
            count=jnp.zeros(batch, jnp.int32),
        )

    def prefill_chunk(
        self, params: HeadParams, state: BlockState, chunk: PromptChunk
    ) -> BlockState:
        """See `Drafter.prefill_chunk`; keys and values of the text, and no more."""
        rows = jnp.broadcast_to(jnp.arange(chunk.tokens.shape[1]), chunk.tokens.shape)
        read = read_features(params.head, self.config, chunk.features)
        entries = text_entries(params.head, self.config, read, chunk.begin + rows)
        return BlockState(
            cache=kv.commit(state.cache, entries, rows, chunk.count),
            features=state.features,
            count=jnp.zeros_like(state.count),
        )

    def truncate(self, state: BlockState, length: jax.Array) -> BlockState:
        """See `Truncating`."""
        cache = dataclasses.replace(state.cache, length=length)
        return dataclasses.replace(state, cache=cache, count=jnp.zeros_like(length))

    def advance(
        self,
        state: BlockState,
        tokens: jax.Array,
        features: jax.Array,
        count: jax.Array,
    ) -> BlockState:
        """See `Drafter.advance`."""
        del tokens
        features = features.astype(state.features.dtype)
        return dataclasses.replace(state, features=features, count=count)

    def read(
        self, params: HeadParams, state: BlockState, root: jax.Array
    ) -> tuple[BlockOutput, BlockState]:
        """See `DraftModel.read`: the one pass of a round."""
        config, (batch, waiting) = self.config, state.features.shape[:2]
        rows = jnp.broadcast_to(jnp.arange(waiting), (batch, waiting))
        start = state.cache.length[:, None]
        place = start + state.count[:, None] + jnp.arange(config.block_size)
        positions = jnp.concatenate([start + rows, place], axis=1)
        masks = jnp.full((batch, config.block_size - 1), config.mask_token, jnp.int32)
        tokens = jnp.concatenate([root[:, None], masks], axis=1)
        states, entries = block_states(
            params.head,
            config,
            params.embedding[tokens],
            read_features(params.head, config, state.features),
            positions,
            self._contexts(state, rows, place),
        )
        # A tree of `D` levels waits for `D + 1` tokens, and reads as many rows less 1.
        first = config.first_row
        used = states[:, first : first + waiting - 1]
        logits = unembed(output_head(params), used)
        markov = params.head.markov
        output = BlockOutput(
            logits=logits, before=None if markov is None else markov.before[root]
        )
        count = after(state.count, logits[:, 0, 0])
        nothing = jnp.zeros_like(count)
        cache = kv.commit(state.cache, entries, rows, count)
        return output, dataclasses.replace(state, cache=cache, count=nothing)

    def step(
        self,
        params: HeadParams,
        state: BlockState,
        tokens: jax.Array,
        above: BlockOutput,
        visible: jax.Array,
        earlier: Any,
        *,
        level: int,
    ) -> tuple[BlockOutput, Any]:
        """See `DraftModel.step`; nothing is run, at most a row is looked up."""
        del state, visible, level
        markov = params.head.markov
        before = None if markov is None else markov.before[tokens]
        return BlockOutput(logits=above.logits[:, :1], before=before), earlier

    def logits(
        self, params: HeadParams, outputs: BlockOutput, *, level: int
    ) -> jax.Array:
        """See `DraftModel.logits`."""
        logits, markov = outputs.logits[..., level - 1, :], params.head.markov
        if markov is None or outputs.before is None:
            return logits
        return logits + markov_logits(markov.after, outputs.before)

    def tokens(self, params: HeadParams, choices: jax.Array) -> jax.Array:
        """See `DraftModel.tokens`; the vocabulary is the target's, so `W = V`."""
        del params
        return choices

    def _contexts(
        self, state: BlockState, rows: jax.Array, place: jax.Array
    ) -> list[AttentionContext]:
        """Returns what a block sees in each layer."""
        config, (batch, size) = self.config, place.shape
        waits = rows < state.count[:, None]
        window, first = config.sliding_window, None
        sees = jnp.broadcast_to(waits[:, None], (batch, size, waits.shape[1]))
        if window is not None:
            first = place - window + 1
            positions = state.cache.length[:, None] + rows
            sees &= positions[:, None] >= first[..., None]
        own = jnp.broadcast_to(own_mask(config), (batch, size, size))
        mask = jnp.concatenate([sees, own], axis=-1)
        return [
            AttentionContext(
                cached=cached, length=state.cache.length, mask=mask, first=first
            )
            for cached in state.cache.layers
        ]
