"""Toy models that can draft less than others."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from eagle_jax.testing.toys import ToyModel, ToyModelState


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
