"""What heads of several kinds have in common as draft models."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from eagle_jax.drafting.model import read_waiting
from eagle_jax.heads.head import Head, HeadParams
from eagle_jax.interface import PromptChunk
from eagle_jax.interface.ordering import after
from eagle_jax.models import cache as kv
from eagle_jax.models.layers import AttentionContext, decoder_layer
from eagle_jax.models.rope import rotary_tables
from eagle_jax.models.transformer import causal_mask, nearest


@struct.dataclass(kw_only=True)
class EagleState:
    """The confirmed text of each row as a head has read it.

    The cache holds pairs made of true features only. The tokens that the last round
    accepted wait here: a feature is paired with the *next* token.

    Attributes:
        cache: The cache of the head's layers; its length counts pairs.
        tokens: `[B, P]` int32, confirmed tokens not yet paired, oldest first.
        features: `[B, P, F]`, the target's features at those tokens.
        count: `[B]` int32, how many of them are real.
    """

    cache: kv.KVCache
    tokens: jax.Array
    features: jax.Array
    count: jax.Array


class FeatureHead(Head):
    """A head of decoder layers, mostly one, that continues the target's features.

    Its outputs are features that it reads again for the next level, `X = E`.
    """

    @property
    def feature_size(self) -> int:
        """The width of the target's features, `F`."""
        return self.config.layer.hidden_size

    @property
    def sliding_window(self) -> int | None:
        """The number of pairs that a pair sees, itself included; `None` for all."""
        return getattr(self.config, "sliding_window", None)

    @property
    def num_layers(self) -> int:
        """The number of decoder layers; none where the sizes have no `layer`."""
        return 0 if getattr(self.config, "layer", None) is None else 1

    def fuse(self, params: Any, features: jax.Array) -> jax.Array:
        """Returns features `[..., F]` of the target at the head's width, `[..., E]`."""
        return features

    def layer_inputs(
        self, params: Any, embeddings: jax.Array, features: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the residual stream before the first layer, and what q, k and v read.

        Args:
            params: The head's weights.
            embeddings: `[B, T, E]`, the embeddings of the pairs' tokens.
            features: `[B, T, E]`, the target's features, from `fuse`, or the head's own
                output for the parent, from `recycle`.
        """
        raise NotImplementedError

    def recycle(self, params: Any, outputs: jax.Array) -> jax.Array:
        """Returns the features `[..., E]` that continue a draft.

        Args:
            params: The head's weights.
            outputs: `[..., E]`, the outputs of the layers for the parents.
        """
        return outputs

    def run(
        self,
        params: HeadParams,
        tokens: jax.Array,
        features: jax.Array,
        positions: jax.Array,
        contexts: Sequence[AttentionContext],
        last: jax.Array | None = None,
    ) -> tuple[jax.Array, tuple[kv.KeyValues, ...]]:
        """Runs the head over pairs of tokens and features.

        Args:
            params: The drafter's weights.
            tokens: `[B, T]` int32, the pairs' tokens.
            features: `[B, T, E]`, the target's, from `fuse`, or drafted ones.
            positions: `[B, T]` int32, the absolute positions of the features.
            contexts: What the pairs see in each layer: confirmed pairs, and each other.
            last: `[B]` int32, the only pair of each row whose output is wanted, `[B, 1,
                E]` then; `None` for all.

        Returns:
            The outputs `[B, T, E]`, the features of the next step, and each layer's
            keys and values of all unconfirmed pairs.
        """
        head, layer, window = params.head, self.config.layer, self.sliding_window
        embedded, entries = params.embedding[tokens], []
        x, inputs = self.layer_inputs(head, embedded, features)
        rotary = rotary_tables(positions, layer.rope, layer.head_dim)
        for number, context in enumerate(contexts, 1):
            if window is not None:
                mask, first = nearest(context.mask, window), positions - window + 1
                context = dataclasses.replace(context, mask=mask, first=first)
            weights = head.layer if number == 1 else head.later_layers[number - 2]
            # The layers before the last make keys and values of every pair for it.
            wanted = last if number == len(contexts) else None
            x, new = decoder_layer(weights, layer, x, rotary, context, inputs, wanted)
            inputs = None
            entries.append(new)
        return x, tuple(entries)

    def init_state(self, batch: int, capacity: int, depth: int) -> EagleState:
        layer = getattr(self.config, "layer", None)
        return EagleState(
            cache=kv.init_cache(
                num_layers=self.num_layers,
                batch=batch,
                num_kv_heads=layer.num_kv_heads if layer else 0,
                capacity=capacity,
                head_dim=layer.head_dim if layer else 0,
                dtype=jnp.dtype(self.dtype),
            ),
            tokens=jnp.zeros((batch, depth + 1), jnp.int32),
            features=jnp.zeros((batch, depth + 1, self.feature_size), self.dtype),
            count=jnp.zeros(batch, jnp.int32),
        )

    def prefill_chunk(
        self, params: HeadParams, state: EagleState, chunk: PromptChunk
    ) -> EagleState:
        """See `Drafter.prefill_chunk`; the last feature waits for the root's token."""
        batch, size = chunk.tokens.shape
        rows = jnp.broadcast_to(jnp.arange(size), (batch, size))
        outputs, entries = self.run(
            params,
            jax.lax.dynamic_slice_in_dim(
                jnp.roll(chunk.prompts, -1, axis=1), chunk.begin, size, axis=1
            ),
            self.fuse(params.head, chunk.features),
            chunk.begin + rows,
            contexts_of(state.cache, causal_mask(batch, size)),
            # One output, though it is not wanted: it says when the cache was read.
            last=jnp.zeros(batch, jnp.int32),
        )
        num_pairs = jnp.clip(chunk.lengths - 1 - chunk.begin, 0, size)
        count = after(num_pairs, outputs[:, 0, 0])
        token = chunk.newest(chunk.tokens, state.tokens[:, 0])
        feature = chunk.newest(chunk.features, state.features[:, 0])
        return EagleState(
            cache=kv.commit(state.cache, entries, rows, count),
            tokens=state.tokens.at[:, 0].set(token),
            features=state.features.at[:, 0].set(feature),
            count=jnp.ones(batch, jnp.int32),
        )

    def read(
        self, params: HeadParams, state: EagleState, root: jax.Array
    ) -> tuple[jax.Array, EagleState]:
        """See `DraftModel.read`; the waiting pairs go into the cache."""

        def run(
            following: jax.Array, rows: jax.Array, last: jax.Array
        ) -> tuple[jax.Array, tuple[kv.KeyValues, ...]]:
            positions = state.cache.length[:, None] + rows
            features = self.fuse(params.head, state.features)
            contexts = contexts_of(state.cache, causal_mask(*following.shape))
            return self.run(params, following, features, positions, contexts, last)

        return read_waiting(state, root, run, kv.commit)

    def step(
        self,
        params: HeadParams,
        state: EagleState,
        tokens: jax.Array,
        above: jax.Array,
        visible: jax.Array,
        earlier: Any,
        *,
        level: int,
    ) -> tuple[jax.Array, Any]:
        """See `DraftModel.step`; a node's feature is its parent's output."""
        above = self.recycle(params.head, above)
        positions = state.cache.length[:, None] + jnp.full_like(tokens, level - 1)
        contexts = contexts_of(state.cache, visible, earlier)
        return self.run(params, tokens, above, positions, contexts)


def contexts_of(
    cache: kv.KVCache, mask: jax.Array, earlier: Sequence[kv.KeyValues] | None = None
) -> list[AttentionContext]:
    """Returns what pairs see in each layer."""
    before = earlier or (None,) * len(cache.layers)
    return [
        AttentionContext(cached=cached, length=cache.length, mask=mask, earlier=one)
        for cached, one in zip(cache.layers, before, strict=True)
    ]
