"""EAGLE heads as draft models: one layer that continues the target's own features."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct

from eagle_jax.drafting.model import read_waiting, target_tokens
from eagle_jax.interface import PromptChunk
from eagle_jax.models import cache as kv
from eagle_jax.models import eagle3_head, eagle_head
from eagle_jax.models.eagle3_head import Eagle3HeadConfig, Eagle3HeadParams
from eagle_jax.models.eagle_head import EagleHeadConfig, EagleHeadParams
from eagle_jax.models.layers import rms_norm
from eagle_jax.models.transformer import (
    Tables,
    causal_mask,
    output_columns,
    output_head,
    unembed,
)
from eagle_jax.ordering import after


@struct.dataclass(kw_only=True)
class EagleDrafterParams:
    """An EAGLE-1/2 head, and the two tables that it may borrow from the target.

    Attributes:
        head: The weights of the head.
        embedding: `[V, E]`, the embedding table, the target's or the head's own.
        output_head: `[E, V]`, the target's output head, or `[E, W]` of its columns;
            `None` where it is the embedding's transpose.
        offsets: `[W]` int32, how much higher each token of these columns is in the
            target's vocabulary, see `Eagle3HeadParams`; `None` where all are there.
    """

    head: EagleHeadParams
    embedding: jax.Array
    output_head: jax.Array | None
    offsets: jax.Array | None = None


@struct.dataclass(kw_only=True)
class Eagle3DrafterParams:
    """An EAGLE-3 head, and the table that it may borrow from the target.

    Attributes:
        head: The weights of the head.
        embedding: `[V, E]`, the embedding table, the target's or the head's own.
    """

    head: Eagle3HeadParams
    embedding: jax.Array


@struct.dataclass(kw_only=True)
class EagleState:
    """The confirmed text of each row as a head has read it.

    The cache holds pairs made of true features only. The tokens that the last round
    accepted wait here: a feature is paired with the *next* token.

    Attributes:
        cache: The cache of the head's one layer; its length counts pairs.
        tokens: `[B, P]` int32, confirmed tokens not yet paired, oldest first.
        features: `[B, P, F]`, the target's features at those tokens.
        count: `[B]` int32, how many of them are real.
    """

    cache: kv.KVCache
    tokens: jax.Array
    features: jax.Array
    count: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeatureHead(abc.ABC):
    """An EAGLE head behind the `DraftModel` protocol, of either kind.

    Its outputs are features that it reads again for the next level, `X = E`.

    Attributes:
        config: The head's sizes.
        dtype: The type of its cache and features.
        forward: The function that runs the head, see `models.eagle_head.forward`.
            Static.
    """

    config: Any
    dtype: str = "float32"
    forward: ClassVar[Callable[..., tuple[jax.Array, kv.KeyValues]]]

    @property
    def vocab_size(self) -> int:
        """See `DraftModel.vocab_size`."""
        return self.config.vocab_size

    @property
    @abc.abstractmethod
    def feature_size(self) -> int:
        """The width of the target's features, `F`."""
        ...

    @abc.abstractmethod
    def fuse(self, params: Any, features: jax.Array) -> jax.Array:
        """Returns features `[..., F]` of the target at the head's width, `[..., E]`."""
        ...

    def run(
        self,
        params: Any,
        tokens: jax.Array,
        *inputs: Any,
        last: jax.Array | None = None,
    ) -> tuple[jax.Array, kv.KeyValues]:
        """Runs the head over pairs of tokens and features.

        Args:
            params: The drafter's weights.
            tokens: `[B, T]` int32, the pairs' tokens.
            *inputs: The features `[B, T, E]` and the arguments that
                `models.eagle_head.forward` takes after them.
            last: `[B]` int32, the only pair of each row whose output is wanted; `None`
                for all.
        """
        embedded = params.embedding[tokens]
        return self.forward(params.head, self.config, embedded, *inputs, last=last)

    def init_state(self, batch: int, capacity: int, depth: int) -> EagleState:
        """See `DraftModel.init_state`."""
        return EagleState(
            cache=self._cache(batch, capacity),
            tokens=jnp.zeros((batch, depth + 1), jnp.int32),
            features=jnp.zeros((batch, depth + 1, self.feature_size), self.dtype),
            count=jnp.zeros(batch, jnp.int32),
        )

    def prefill_chunk(
        self, params: Any, state: EagleState, chunk: PromptChunk
    ) -> EagleState:
        """See `Drafter.prefill_chunk`; the last feature waits for the root's token."""
        batch, size = chunk.tokens.shape
        rows = jnp.broadcast_to(jnp.arange(size), (batch, size))
        outputs, entries = self.run(
            params,
            jax.lax.dynamic_slice_in_dim(
                jnp.roll(chunk.prompts, -1, axis=1), chunk.begin, size, axis=1
            ),
            self.fuse(params, chunk.features),
            chunk.begin + rows,
            causal_mask(batch, size),
            state.cache,
            # One output, though it is not wanted: it says when the cache was read.
            last=jnp.zeros(batch, jnp.int32),
        )
        num_pairs = jnp.clip(chunk.lengths - 1 - chunk.begin, 0, size)
        count = after(num_pairs, outputs[:, 0, 0])
        token = chunk.newest(chunk.tokens, state.tokens[:, 0])
        feature = chunk.newest(chunk.features, state.features[:, 0])
        return EagleState(
            cache=kv.commit(state.cache, (entries,), rows, count),
            tokens=state.tokens.at[:, 0].set(token),
            features=state.features.at[:, 0].set(feature),
            count=jnp.ones(batch, jnp.int32),
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
        self, params: Any, state: EagleState, root: jax.Array
    ) -> tuple[jax.Array, EagleState]:
        """See `DraftModel.read`; the waiting pairs go into the cache."""

        def run(
            following: jax.Array, rows: jax.Array, last: jax.Array
        ) -> tuple[jax.Array, tuple[kv.KeyValues]]:
            positions = state.cache.length[:, None] + rows
            features = self.fuse(params, state.features)
            mask = causal_mask(*following.shape)
            outputs, entries = self.run(
                params, following, features, positions, mask, state.cache, last=last
            )
            return outputs, (entries,)

        return read_waiting(state, root, run, kv.commit)

    def step(
        self,
        params: Any,
        state: EagleState,
        tokens: jax.Array,
        above: jax.Array,
        visible: jax.Array,
        earlier: Any,
        *,
        level: int,
    ) -> tuple[jax.Array, Any]:
        """See `DraftModel.step`; a node's feature is its parent's output."""
        positions = state.cache.length[:, None] + jnp.full_like(tokens, level - 1)
        return self.run(params, tokens, above, positions, visible, state.cache, earlier)

    def _cache(self, batch: int, capacity: int) -> kv.KVCache:
        return kv.init_cache(
            num_layers=1,
            batch=batch,
            num_kv_heads=self.config.layer.num_kv_heads,
            capacity=capacity,
            head_dim=self.config.layer.head_dim,
            dtype=jnp.dtype(self.dtype),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleHead(FeatureHead):
    """An EAGLE-1/2 head, which predicts the target's last hidden state, `F = E`."""

    config: EagleHeadConfig
    forward = staticmethod(eagle_head.forward)

    @staticmethod
    def join(head: EagleHeadParams, target: Tables) -> EagleDrafterParams:
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

    @staticmethod
    def narrow(params: EagleDrafterParams, tokens: jax.Array) -> EagleDrafterParams:
        """Returns weights that draft some of the target's tokens alone (FR-Spec).

        Args:
            params: The drafter's weights, from `join`.
            tokens: `[W]` int32, the tokens in ascending order, none twice.
        """
        return dataclasses.replace(
            params,
            output_head=output_columns(params, tokens),
            offsets=tokens - jnp.arange(tokens.size),
        )

    @property
    def feature_size(self) -> int:
        """The width of the target's features, `F`, which is `E`."""
        return self.config.layer.hidden_size

    def fuse(self, params: EagleDrafterParams, features: jax.Array) -> jax.Array:
        """Returns the features as they are: the head drafts features of their kind."""
        del params
        return features

    def logits(
        self, params: EagleDrafterParams, outputs: jax.Array, *, level: int
    ) -> jax.Array:
        """See `DraftModel.logits`."""
        del level
        table = params.output_head
        return unembed(params.embedding.T if table is None else table, outputs)

    def tokens(self, params: EagleDrafterParams, choices: jax.Array) -> jax.Array:
        """See `DraftModel.tokens`; `W = V` unless the output head is narrowed."""
        return target_tokens(params.offsets, choices)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3Head(FeatureHead):
    """An EAGLE-3 head, which reads three features and may know fewer tokens.

    The target must give the features of `models.eagle3_head.feature_layers`. For
    drafted tokens the head's own outputs take their place, without being fused.
    """

    config: Eagle3HeadConfig
    forward = staticmethod(eagle3_head.forward)

    @staticmethod
    def join(head: Eagle3HeadParams, target: Tables) -> Eagle3DrafterParams:
        """Joins a head with the embedding table of its target; nothing is copied."""
        return Eagle3DrafterParams(
            head=dataclasses.replace(head, embedding=None),
            embedding=target.embedding if head.embedding is None else head.embedding,
        )

    @property
    def feature_size(self) -> int:
        """The width of the target's features, `F`, three times the target's width."""
        return self.config.feature_size

    def fuse(self, params: Eagle3DrafterParams, features: jax.Array) -> jax.Array:
        """See `FeatureHead.fuse`."""
        return eagle3_head.fuse(params.head, self.config, features)

    def step(
        self,
        params: Eagle3DrafterParams,
        state: EagleState,
        tokens: jax.Array,
        above: jax.Array,
        visible: jax.Array,
        earlier: Any,
        *,
        level: int,
    ) -> tuple[jax.Array, Any]:
        """See `FeatureHead.step`; some heads read the output normalised."""
        above = eagle3_head.recycle(params.head, self.config, above)
        return super().step(params, state, tokens, above, visible, earlier, level=level)

    def logits(
        self, params: Eagle3DrafterParams, outputs: jax.Array, *, level: int
    ) -> jax.Array:
        """See `DraftModel.logits`; the head's own output head gives `W` of them."""
        del level
        head = params.head
        normed = rms_norm(outputs, head.norm, self.config.layer.rms_norm_eps)
        return unembed(head.output_head, normed)

    def tokens(self, params: Eagle3DrafterParams, choices: jax.Array) -> jax.Array:
        """See `DraftModel.tokens`."""
        return target_tokens(params.head.offsets, choices)
