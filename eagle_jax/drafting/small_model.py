"""A small decoder as a draft model (Leviathan et al. 2022; Chen et al. 2023)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from eagle_jax.models import cache as kv
from eagle_jax.models import transformer
from eagle_jax.models.transformer import (
    TransformerConfig,
    TransformerParams,
    causal_mask,
    output_head,
    unembed,
)


@struct.dataclass(kw_only=True)
class SmallModelState:
    """What the small model has read of each row.

    Attributes:
        cache: Confirmed tokens up to the waiting ones.
        tokens: `[B, P]` int32, the last accepted path, root first; its first token is
            in the cache already, and the next root will stand behind its last.
        count: `[B]` int32, how many of them are real.
    """

    cache: kv.KVCache
    tokens: jax.Array
    count: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmallModel:
    """A decoder with the target's vocabulary behind the `DraftModel` protocol.

    Its outputs are hidden states, `X = E`; its parameters are `TransformerParams`.

    Attributes:
        config: Sizes.
        dtype: Of its cache.
    """

    config: TransformerConfig
    dtype: str = "float32"

    def init_state(self, batch: int, capacity: int, depth: int) -> SmallModelState:
        """See `DraftModel.init_state`."""
        return SmallModelState(
            cache=self._cache(batch, capacity),
            tokens=jnp.zeros((batch, depth + 1), jnp.int32),
            count=jnp.zeros(batch, jnp.int32),
        )

    def prefill(
        self,
        params: TransformerParams,
        state: SmallModelState,
        tokens: jax.Array,
        features: jax.Array,
        lengths: jax.Array,
    ) -> SmallModelState:
        """See `Drafter.prefill`; only the root is left to be read."""
        del features
        path = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        # Nothing is cached yet: an empty cache costs no attention.
        empty = self._cache(tokens.shape[0], 0)
        output = transformer.forward(params, self.config, tokens, path, None, empty)
        cache = kv.commit(state.cache, output.entries, path, lengths)
        return dataclasses.replace(state, cache=cache, count=jnp.ones_like(lengths))

    def advance(
        self,
        state: SmallModelState,
        tokens: jax.Array,
        features: jax.Array,
        count: jax.Array,
    ) -> SmallModelState:
        """See `Drafter.advance`."""
        del features
        return dataclasses.replace(state, tokens=tokens, count=count)

    def read(
        self, params: TransformerParams, state: SmallModelState, root: jax.Array
    ) -> tuple[jax.Array, SmallModelState]:
        """See `DraftModel.read`: what was accepted behind the old root, and the new."""
        batch, path_length = state.tokens.shape
        rows = jnp.broadcast_to(jnp.arange(path_length), state.tokens.shape)
        # Row `count - 1` is the last real one; a finished row has none.
        last = jnp.maximum(state.count - 1, 0)[:, None]
        tokens = jnp.where(rows == last, root[:, None], jnp.roll(state.tokens, -1, 1))
        output = transformer.forward(
            params,
            self.config,
            tokens,
            state.cache.length[:, None] + rows,
            causal_mask(batch, path_length),
            state.cache,
        )
        hidden = jnp.take_along_axis(output.hidden, last[..., None], axis=1)[:, 0]
        # The call must have read the cache before it is written; see `kv.commit`.
        count = jnp.where(jnp.isnan(hidden[:, 0]), 0, state.count)
        cache = kv.commit(state.cache, output.entries, rows, count)
        nothing = jnp.zeros_like(state.count)
        return hidden, dataclasses.replace(state, cache=cache, count=nothing)

    def step(
        self,
        params: TransformerParams,
        state: SmallModelState,
        tokens: jax.Array,
        above: jax.Array,
        visible: jax.Array,
        earlier: Any,
        *,
        level: int,
    ) -> tuple[jax.Array, Any]:
        """See `DraftModel.step`; what the parents' outputs were does not matter."""
        del above
        output = transformer.forward(
            params,
            self.config,
            tokens,
            state.cache.length[:, None] + jnp.full_like(tokens, level - 1),
            visible,
            state.cache,
            earlier,
        )
        return output.hidden, output.entries

    def logits(self, params: TransformerParams, outputs: jax.Array) -> jax.Array:
        """See `DraftModel.logits`."""
        return unembed(output_head(params), outputs)

    def _cache(self, batch: int, capacity: int) -> kv.KVCache:
        return kv.init_cache(
            num_layers=self.config.num_layers,
            batch=batch,
            num_kv_heads=self.config.layer.num_kv_heads,
            capacity=capacity,
            head_dim=self.config.layer.head_dim,
            dtype=jnp.dtype(self.dtype),
        )
