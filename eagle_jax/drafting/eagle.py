"""Drafting dynamic trees with an EAGLE-1/2 head (EAGLE-2, section 4)."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from eagle_jax import tree as trees
from eagle_jax.config import TreeConfig
from eagle_jax.models import cache as kv
from eagle_jax.models import eagle_head
from eagle_jax.models.eagle_head import EagleHeadConfig, EagleHeadParams
from eagle_jax.models.transformer import (
    TransformerParams,
    causal_mask,
    output_head,
    unembed,
)


@struct.dataclass(kw_only=True)
class EagleDrafterParams:
    """The head, and the two tables that it borrows from the target.

    Attributes:
        head: Weights of the head.
        embedding: `[V, E]`.
        output_head: `[E, V]`, or `None` where it is the embedding's transpose.
    """

    head: EagleHeadParams
    embedding: jax.Array
    output_head: jax.Array | None


@struct.dataclass(kw_only=True)
class EagleState:
    """What the head knows of each row.

    The cache holds pairs made of true features only. What the last round accepted
    waits here for the token after it: a feature is paired with the *next* token.

    Attributes:
        cache: One layer; its length counts pairs.
        tokens: `[B, P]` int32, confirmed tokens not yet paired, oldest first.
        features: `[B, P, E]`, the target's at those tokens.
        count: `[B]` int32, how many of them are real.
    """

    cache: kv.KVCache
    tokens: jax.Array
    features: jax.Array
    count: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleDrafter:
    """The EAGLE-2 drafter behind the `Drafter` protocol.

    Attributes:
        config: Sizes of the head.
        tree: Shape of the tree.
        dtype: Of the head's cache and features.
    """

    config: EagleHeadConfig
    tree: TreeConfig
    dtype: str = "float32"

    @property
    def depth(self) -> int:
        """See `Drafter.depth`; at 0 the head is never called."""
        return self.tree.levels

    @staticmethod
    def params(head: EagleHeadParams, target: TransformerParams) -> EagleDrafterParams:
        """Joins a head with the tables of its target.

        Nothing is copied, unless the head has a table of its own and the target's
        output head is the target's table.
        """
        shares_table = head.embedding is None
        return EagleDrafterParams(
            head=dataclasses.replace(head, embedding=None),
            embedding=target.embedding if head.embedding is None else head.embedding,
            output_head=target.output_head if shares_table else output_head(target),
        )

    def init_state(self, batch: int, capacity: int) -> EagleState | tuple[()]:
        """See `Drafter.init_state`."""
        if self.depth == 0:
            return ()
        path_length = self.depth + 1
        width = self.config.layer.hidden_size
        return EagleState(
            cache=self._cache(batch, capacity),
            tokens=jnp.zeros((batch, path_length), jnp.int32),
            features=jnp.zeros((batch, path_length, width), self.dtype),
            count=jnp.zeros(batch, jnp.int32),
        )

    def prefill(
        self,
        params: EagleDrafterParams,
        state: Any,
        tokens: jax.Array,
        features: jax.Array,
        lengths: jax.Array,
    ) -> Any:
        """See `Drafter.prefill`; the last feature waits for the root's token."""
        if self.depth == 0:
            return state
        batch, num_tokens = tokens.shape
        path = jnp.broadcast_to(jnp.arange(num_tokens), tokens.shape)
        _, entries = eagle_head.forward(
            params.head,
            self.config,
            params.embedding[jnp.roll(tokens, -1, axis=1)],
            features,
            path,
            causal_mask(batch, num_tokens),
            # Nothing is cached yet: an empty cache costs no attention.
            self._cache(batch, 0),
        )
        cache = kv.commit(state.cache, (entries,), path, lengths - 1)
        last = (lengths - 1)[:, None]
        waiting = jnp.take_along_axis(features, last[..., None], axis=1)
        return self.advance(
            params,
            dataclasses.replace(state, cache=cache),
            _pad_rows(jnp.take_along_axis(tokens, last, axis=1), self.depth + 1),
            _pad_rows(waiting, self.depth + 1),
            jnp.ones(batch, jnp.int32),
        )

    def propose(
        self, params: EagleDrafterParams, state: Any, root: jax.Array, keys: jax.Array
    ) -> tuple[trees.DraftTree, Any]:
        """See `Drafter.propose`: expand level by level, then rerank."""
        del keys  # Drafts are the likeliest children: nothing is sampled.
        config = self.tree
        if self.depth == 0:
            grow = functools.partial(trees.root_only, num_nodes=config.num_nodes)
            return jax.vmap(grow)(root), state

        root_output, state = self._read_confirmed(params, state, root)
        logits = unembed(_output_head(params), root_output)
        tokens, log_probs = trees.top_children(logits, config.width)
        first_level = functools.partial(trees.first_level, depth=self.depth)
        candidates, frontier = jax.vmap(first_level)(tokens, log_probs)

        outputs, earlier = root_output[:, None], None
        for level in range(2, self.depth + 1):
            # A node's feature is its parent's output: true features end at the root.
            features = jnp.take_along_axis(outputs, frontier.parents[..., None], axis=1)
            depth_offset = jnp.full_like(frontier.tokens, level - 2)
            outputs, earlier = eagle_head.forward(
                params.head,
                self.config,
                params.embedding[frontier.tokens],
                features,
                state.cache.length[:, None] + depth_offset,
                frontier.visible,
                state.cache,
                earlier,
            )
            logits = unembed(_output_head(params), outputs)
            tokens, log_probs = trees.top_children(logits, config.width)
            expand = functools.partial(
                trees.expand, level=level, rank_by=config.rank_by
            )
            candidates, frontier = jax.vmap(expand)(
                candidates, frontier, tokens, log_probs
            )
        rerank = functools.partial(
            trees.rerank,
            num_nodes=config.num_nodes,
            rank_by=config.rank_by,
            use_rerank=config.rerank,
        )
        return jax.vmap(rerank)(candidates, root), state

    def advance(
        self,
        params: EagleDrafterParams,
        state: Any,
        tokens: jax.Array,
        features: jax.Array,
        count: jax.Array,
    ) -> Any:
        """See `Drafter.advance`; the head runs in the next `propose`."""
        del params
        if self.depth == 0:
            return state
        features = features.astype(state.features.dtype)
        return dataclasses.replace(state, tokens=tokens, features=features, count=count)

    def _read_confirmed(
        self, params: EagleDrafterParams, state: EagleState, root: jax.Array
    ) -> tuple[jax.Array, EagleState]:
        """Caches the waiting pairs; returns the output `[B, E]` of the last one."""
        batch, path_length = state.tokens.shape
        rows = jnp.broadcast_to(jnp.arange(path_length), state.tokens.shape)
        # Row `count - 1` is the last real one; a finished row has none.
        last = jnp.maximum(state.count - 1, 0)[:, None]
        paired = jnp.where(rows == last, root[:, None], jnp.roll(state.tokens, -1, 1))
        outputs, entries = eagle_head.forward(
            params.head,
            self.config,
            params.embedding[paired],
            state.features,
            state.cache.length[:, None] + rows,
            causal_mask(batch, path_length),
            state.cache,
        )
        root_output = jnp.take_along_axis(outputs, last[..., None], axis=1)[:, 0]
        # The call must have read the cache before it is written; see `kv.commit`.
        count = jnp.where(jnp.isnan(root_output[:, 0]), 0, state.count)
        cache = kv.commit(state.cache, (entries,), rows, count)
        nothing = jnp.zeros_like(state.count)
        return root_output, dataclasses.replace(state, cache=cache, count=nothing)

    def _cache(self, batch: int, capacity: int) -> kv.KVCache:
        return kv.init_cache(
            num_layers=1,
            batch=batch,
            num_kv_heads=self.config.layer.num_kv_heads,
            capacity=capacity,
            head_dim=self.config.layer.head_dim,
            dtype=jnp.dtype(self.dtype),
        )


def _pad_rows(x: jax.Array, num_rows: int) -> jax.Array:
    """Pads `[B, 1, ...]` to `[B, num_rows, ...]` with zeros."""
    return jnp.pad(x, [(0, 0), (0, num_rows - 1)] + [(0, 0)] * (x.ndim - 2))


def _output_head(params: EagleDrafterParams) -> jax.Array:
    return params.embedding.T if params.output_head is None else params.output_head
