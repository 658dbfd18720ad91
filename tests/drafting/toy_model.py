"""A draft model without weights: what it predicts is a function of the path."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from eagle_jax.interface import PromptChunk
from eagle_jax.testing.toys import path_code, path_logits


@struct.dataclass(kw_only=True)
class ToyModelState:
    """The text without its root: `total` `[B]` uint32 of codes, `length` `[B]`."""

    total: jax.Array
    length: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToyModel:
    """A `DraftModel`; with a `ToyTarget`'s settings it is that target."""

    vocab_size: int
    sharpness: float
    seed: int

    def init_state(self, batch: int, capacity: int, depth: int) -> ToyModelState:
        del capacity, depth
        return ToyModelState(
            total=jnp.zeros(batch, jnp.uint32), length=jnp.zeros(batch, jnp.int32)
        )

    def prefill_chunk(
        self, params: Any, state: ToyModelState, chunk: PromptChunk
    ) -> ToyModelState:
        del params
        return self.advance(state, chunk.tokens, chunk.features, chunk.count)

    def advance(
        self,
        state: ToyModelState,
        tokens: jax.Array,
        features: jax.Array,
        count: jax.Array,
    ) -> ToyModelState:
        del features
        steps = jnp.arange(tokens.shape[1])
        codes = path_code(tokens, state.length[:, None] + steps)
        codes = jnp.where(steps < count[:, None], codes, jnp.uint32(0))
        total = state.total + codes.sum(axis=1, dtype=jnp.uint32)
        return ToyModelState(total=total, length=state.length + count)

    def read(
        self, params: Any, state: ToyModelState, root: jax.Array
    ) -> tuple[jax.Array, ToyModelState]:
        del params
        return (state.total + path_code(root, state.length))[:, None], state

    def step(
        self,
        params: Any,
        state: ToyModelState,
        tokens: jax.Array,
        above: jax.Array,
        visible: jax.Array,
        earlier: Any,
        *,
        level: int,
    ) -> tuple[jax.Array, Any]:
        del params, visible, earlier
        positions = state.length[:, None] + jnp.full_like(tokens, level)
        return above + path_code(tokens, positions)[..., None], ()

    def logits(self, params: Any, outputs: jax.Array, *, level: int) -> jax.Array:
        del params, level
        return path_logits(
            outputs[..., 0],
            vocab_size=self.vocab_size,
            sharpness=self.sharpness,
            seed=self.seed,
        )

    def tokens(self, params: Any, choices: jax.Array) -> jax.Array:
        del params
        return choices


@dataclasses.dataclass(frozen=True, kw_only=True)
class NarrowToyModel(ToyModel):
    """A toy that can draft some tokens only, ascending."""

    known: tuple[int, ...]

    def logits(self, params: Any, outputs: jax.Array, *, level: int) -> jax.Array:
        every = super().logits(params, outputs, level=level)
        return every[..., jnp.array(self.known)]

    def tokens(self, params: Any, choices: jax.Array) -> jax.Array:
        del params
        return jnp.array(self.known)[choices]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlindToyModel(ToyModel):
    """A toy that sees no drafted token, as Medusa's heads: one output per level."""

    def step(
        self,
        params: Any,
        state: ToyModelState,
        tokens: jax.Array,
        above: jax.Array,
        visible: jax.Array,
        earlier: Any,
        *,
        level: int,
    ) -> tuple[jax.Array, Any]:
        del params, state, tokens, visible, earlier
        return above[:, :1], ()

    def logits(self, params: Any, outputs: jax.Array, *, level: int) -> jax.Array:
        salted = outputs + jnp.uint32(1000 * level)
        return super().logits(params, salted, level=level)
