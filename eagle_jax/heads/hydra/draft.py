"""Hydra's heads as draft models: every level has a head, which reads the path above."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from eagle_jax.heads.feature import EagleState, FeatureHead
from eagle_jax.heads.hydra.model import HydraConfig, HydraParams, head_logits, prefix
from eagle_jax.heads.medusa.draft import LastFeature, LastFeatureModel, PositionHeads
from eagle_jax.models.cache import KeyValues
from eagle_jax.models.layers import AttentionContext
from eagle_jax.models.transformer import Tables


@struct.dataclass(kw_only=True)
class HydraDrafterParams:
    """Hydra's heads, and the table that they borrow from the target.

    Attributes:
        heads: The weights of the heads and of the prefix layer.
        embedding: `[V, E]`, the target's embedding table.
    """

    heads: HydraParams
    embedding: jax.Array


class _PathReader(PositionHeads):
    """What heads have in common that read a path's embeddings.

    The output of a node is `[p, E(root), E(x_1), ..., E(x_d)]` side by side: `X` is
    `(d + 2) * E` at depth `d`.
    """

    config: HydraConfig

    @staticmethod
    def join(heads: HydraParams, target: Tables) -> HydraDrafterParams:
        """Joins heads with the embedding table of their target; nothing is copied."""
        return HydraDrafterParams(heads=heads, embedding=target.embedding)

    def step(
        self,
        params: HydraDrafterParams,
        state: Any,
        tokens: jax.Array,
        above: jax.Array,
        visible: jax.Array,
        earlier: Any,
        *,
        level: int,
    ) -> tuple[jax.Array, Any]:
        """See `DraftModel.step`; a node adds its embedding to its parent's output."""
        del state, visible, level
        return _append(params, above, tokens), earlier

    def logits(
        self, params: HydraDrafterParams, outputs: jax.Array, *, level: int
    ) -> jax.Array:
        """See `DraftModel.logits`."""
        return head_logits(params.heads.heads[level - 1], outputs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HydraHeads(_PathReader, LastFeatureModel):
    """Hydra's heads on the target's last hidden state ("mlp").

    Attributes:
        config: The heads' sizes, without a prefix layer.
    """

    config: HydraConfig

    def read(
        self, params: HydraDrafterParams, state: LastFeature, root: jax.Array
    ) -> tuple[jax.Array, LastFeature]:
        """See `DraftModel.read`."""
        return _append(params, state.feature, root), state


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefixHydraHeads(_PathReader, FeatureHead):
    """Hydra's heads behind a layer over all confirmed features ("prefix-mlp").

    Attributes:
        config: The heads' sizes, with those of the prefix layer.
    """

    config: HydraConfig

    def fuse(self, params: HydraDrafterParams, features: jax.Array) -> jax.Array:
        """Returns the features as they are."""
        del params
        return features

    def run(
        self,
        params: HydraDrafterParams,
        tokens: jax.Array,
        features: jax.Array,
        positions: jax.Array,
        context: AttentionContext,
        last: jax.Array | None = None,
    ) -> tuple[jax.Array, KeyValues]:
        """Runs the prefix layer; it reads features alone."""
        del tokens
        heads = params.heads
        return prefix(heads, self.config, features, positions, context, last)

    def read(
        self, params: HydraDrafterParams, state: EagleState, root: jax.Array
    ) -> tuple[jax.Array, EagleState]:
        """See `DraftModel.read`."""
        output, state = super().read(params, state, root)
        return _append(params, output, root), state


def _append(
    params: HydraDrafterParams, above: jax.Array, tokens: jax.Array
) -> jax.Array:
    """Returns outputs `[..., X]` with the embeddings of tokens `[...]` behind them."""
    embedded = params.embedding[tokens]
    return jnp.concatenate([above.astype(embedded.dtype), embedded], axis=-1)
