"""A small decoder as a draft model (Leviathan et al. 2022; Chen et al. 2023)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from eagle_jax.drafting.model import read_waiting
from eagle_jax.models import cache as kv
from eagle_jax.models import transformer
from eagle_jax.models.transformer import Transformer, TransformerParams
from eagle_jax.prefill import read_prompts


@struct.dataclass(kw_only=True)
class SmallModelState:
    """The confirmed text of each row as the small model has read it.

    Attributes:
        cache: The cache of the confirmed text up to the first of `tokens`, included.
        tokens: `[B, P]` int32, the last accepted path, root first; its first token is
            in the cache already, and the next root will stand after its last.
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
        decoder: The small model itself.
    """

    decoder: Transformer

    @property
    def vocab_size(self) -> int:
        """See `DraftModel.vocab_size`."""
        return self.decoder.config.vocab_size

    def init_state(self, batch: int, capacity: int, depth: int) -> SmallModelState:
        """See `DraftModel.init_state`."""
        return SmallModelState(
            cache=self.decoder.init_cache(batch, capacity),
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
        reading = read_prompts(self.decoder, params, tokens, lengths, state.cache)
        count = jnp.ones_like(lengths)
        return dataclasses.replace(state, cache=reading.cache, count=count)

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
        """See `DraftModel.read`; it reads the path after the old root, and the new."""

        def run(
            following: jax.Array, positions: jax.Array
        ) -> tuple[jax.Array, tuple[kv.KeyValues, ...]]:
            output = self.decoder.forward(
                params, following, positions, None, state.cache
            )
            return output.hidden, output.entries

        return read_waiting(state, root, run)

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
        """See `DraftModel.step`; the parents' outputs are not read."""
        del above
        output = transformer.forward(
            params,
            self.decoder.config,
            tokens,
            state.cache.length[:, None] + jnp.full_like(tokens, level - 1),
            visible,
            state.cache,
            earlier,
        )
        return output.hidden, output.entries

    def logits(
        self, params: TransformerParams, outputs: jax.Array, *, level: int
    ) -> jax.Array:
        """See `DraftModel.logits`."""
        del level
        return self.decoder.unembed(params, outputs)

    def tokens(self, params: TransformerParams, choices: jax.Array) -> jax.Array:
        """See `DraftModel.tokens`; the vocabulary is the target's, so `W = V`."""
        del params
        return choices
