"""An EAGLE-1/2 head as a draft model: it continues the target's own features."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from eagle_jax.drafting.model import Waiting
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
    """The head, and the two tables that it may borrow from the target.

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
class EagleHead:
    """The head behind the `DraftModel` protocol; its outputs are features, `X = E`.

    Attributes:
        config: Sizes.
        dtype: Of its cache and features.
    """

    config: EagleHeadConfig
    dtype: str = "float32"

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

    def init_state(self, batch: int, capacity: int, depth: int) -> EagleState:
        """See `DraftModel.init_state`."""
        width = self.config.layer.hidden_size
        return EagleState(
            cache=self._cache(batch, capacity),
            tokens=jnp.zeros((batch, depth + 1), jnp.int32),
            features=jnp.zeros((batch, depth + 1, width), self.dtype),
            count=jnp.zeros(batch, jnp.int32),
        )

    def prefill(
        self,
        params: EagleDrafterParams,
        state: EagleState,
        tokens: jax.Array,
        features: jax.Array,
        lengths: jax.Array,
    ) -> EagleState:
        """See `Drafter.prefill`; the last feature waits for the root's token."""
        batch, num_tokens = tokens.shape
        path_length = state.tokens.shape[1]
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
            dataclasses.replace(state, cache=cache),
            _pad_rows(jnp.take_along_axis(tokens, last, axis=1), path_length),
            _pad_rows(waiting, path_length),
            jnp.ones(batch, jnp.int32),
        )

    def advance(
        self,
        state: EagleState,
        tokens: jax.Array,
        features: jax.Array,
        count: jax.Array,
    ) -> EagleState:
        """See `Drafter.advance`."""
        features = features.astype(state.features.dtype)
        return dataclasses.replace(state, tokens=tokens, features=features, count=count)

    def read(
        self, params: EagleDrafterParams, state: EagleState, root: jax.Array
    ) -> tuple[jax.Array, EagleState]:
        """See `DraftModel.read`: caches the waiting pairs."""
        waiting = Waiting.before(root, state.tokens, state.count)
        outputs, entries = eagle_head.forward(
            params.head,
            self.config,
            params.embedding[waiting.following],
            state.features,
            state.cache.length[:, None] + waiting.rows,
            causal_mask(*state.tokens.shape),
            state.cache,
        )
        root_output, cache = waiting.commit(state.cache, (entries,), outputs)
        nothing = jnp.zeros_like(state.count)
        return root_output, dataclasses.replace(state, cache=cache, count=nothing)

    def step(
        self,
        params: EagleDrafterParams,
        state: EagleState,
        tokens: jax.Array,
        above: jax.Array,
        visible: jax.Array,
        earlier: Any,
        *,
        level: int,
    ) -> tuple[jax.Array, Any]:
        """See `DraftModel.step`: a node's feature is its parent's output."""
        offsets = jnp.full_like(tokens, level - 1)
        return eagle_head.forward(
            params.head,
            self.config,
            params.embedding[tokens],
            above,
            state.cache.length[:, None] + offsets,
            visible,
            state.cache,
            earlier,
        )

    def logits(self, params: EagleDrafterParams, outputs: jax.Array) -> jax.Array:
        """See `DraftModel.logits`."""
        table = params.output_head
        return unembed(params.embedding.T if table is None else table, outputs)

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
