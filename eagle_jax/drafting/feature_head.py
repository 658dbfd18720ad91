"""What all EAGLE heads have in common: they continue the target's own features."""

import abc
import dataclasses
from typing import Any, Generic, Protocol, TypeVar

import jax
import jax.numpy as jnp
from flax import struct

from eagle_jax.drafting.model import Waiting
from eagle_jax.models import cache as kv
from eagle_jax.models.layers import LayerConfig
from eagle_jax.models.transformer import causal_mask


class WithTable(Protocol):
    """Parameters that hold an embedding table."""

    @property
    def embedding(self) -> jax.Array:
        """`[V, E]`."""
        ...


Weights = TypeVar("Weights", bound=WithTable)


@struct.dataclass(kw_only=True)
class EagleState:
    """What a head knows of each row.

    The cache holds pairs made of true features only. What the last round accepted
    waits here for the token after it: a feature is paired with the *next* token.

    Attributes:
        cache: One layer; its length counts pairs.
        tokens: `[B, P]` int32, confirmed tokens not yet paired, oldest first.
        features: `[B, P, F]`, the target's at those tokens.
        count: `[B]` int32, how many of them are real.
    """

    cache: kv.KVCache
    tokens: jax.Array
    features: jax.Array
    count: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeatureHead(abc.ABC, Generic[Weights]):
    """A head of one layer behind the `DraftModel` protocol, but for its own formula.

    Its outputs are features that it reads again for the next level, `X = E`.

    Attributes:
        dtype: Of its cache and features.
    """

    dtype: str = "float32"

    @property
    @abc.abstractmethod
    def layer(self) -> LayerConfig:
        """Sizes of its one layer."""
        ...

    @property
    @abc.abstractmethod
    def feature_size(self) -> int:
        """`F`, the width of the target's features."""
        ...

    @abc.abstractmethod
    def fuse(self, params: Weights, features: jax.Array) -> jax.Array:
        """Brings features `[..., F]` of the target to the head's width, `[..., E]`."""
        ...

    @abc.abstractmethod
    def run(
        self,
        params: Weights,
        tokens: jax.Array,
        features: jax.Array,
        positions: jax.Array,
        mask: jax.Array,
        cache: kv.KVCache,
        earlier: Any = None,
    ) -> tuple[jax.Array, kv.KeyValues]:
        """Runs the head over pairs of tokens `[B, T]` and features `[B, T, E]`.

        What else it takes and what it returns: see `models.eagle_head.forward`.
        """
        ...

    def init_state(self, batch: int, capacity: int, depth: int) -> EagleState:
        """See `DraftModel.init_state`."""
        return EagleState(
            cache=self._cache(batch, capacity),
            tokens=jnp.zeros((batch, depth + 1), jnp.int32),
            features=jnp.zeros((batch, depth + 1, self.feature_size), self.dtype),
            count=jnp.zeros(batch, jnp.int32),
        )

    def prefill(
        self,
        params: Weights,
        state: EagleState,
        tokens: jax.Array,
        features: jax.Array,
        lengths: jax.Array,
    ) -> EagleState:
        """See `Drafter.prefill`; the last feature waits for the root's token."""
        batch, num_tokens = tokens.shape
        path_length = state.tokens.shape[1]
        path = jnp.broadcast_to(jnp.arange(num_tokens), tokens.shape)
        _, entries = self.run(
            params,
            jnp.roll(tokens, -1, axis=1),
            self.fuse(params, features),
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
        self, params: Weights, state: EagleState, root: jax.Array
    ) -> tuple[jax.Array, EagleState]:
        """See `DraftModel.read`: caches the waiting pairs."""
        waiting = Waiting.before(root, state.tokens, state.count)
        outputs, entries = self.run(
            params,
            waiting.following,
            self.fuse(params, state.features),
            state.cache.length[:, None] + waiting.rows,
            causal_mask(*state.tokens.shape),
            state.cache,
        )
        root_output, cache = waiting.commit(state.cache, (entries,), outputs)
        nothing = jnp.zeros_like(state.count)
        return root_output, dataclasses.replace(state, cache=cache, count=nothing)

    def step(
        self,
        params: Weights,
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
        return self.run(
            params,
            tokens,
            above,
            state.cache.length[:, None] + offsets,
            visible,
            state.cache,
            earlier,
        )

    def _cache(self, batch: int, capacity: int) -> kv.KVCache:
        return kv.init_cache(
            num_layers=1,
            batch=batch,
            num_kv_heads=self.layer.num_kv_heads,
            capacity=capacity,
            head_dim=self.layer.head_dim,
            dtype=jnp.dtype(self.dtype),
        )


def _pad_rows(x: jax.Array, num_rows: int) -> jax.Array:
    """Pads `[B, 1, ...]` to `[B, num_rows, ...]` with zeros."""
    return jnp.pad(x, [(0, 0), (0, num_rows - 1)] + [(0, 0)] * (x.ndim - 2))
