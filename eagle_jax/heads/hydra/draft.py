"""Hydra's heads as draft models: every level has a head, which reads the path above."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from eagle_jax.heads.feature import EagleState, FeatureHead, HeadParams
from eagle_jax.heads.hydra.model import HydraConfig, head_logits, prefix
from eagle_jax.heads.medusa.draft import LastFeature, LastFeatureModel, PositionHeads
from eagle_jax.models.cache import KeyValues
from eagle_jax.models.layers import AttentionContext


class _PathReader(PositionHeads):
    """What heads have in common that read a path's embeddings.

    The output of a node is `[p, E(root), E(x_1), ..., E(x_d)]` side by side: `X` is
    `(d + 2) * E` at depth `d`.
    """

    config: HydraConfig

    def step(
        self,
        params: HeadParams,
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
        self, params: HeadParams, outputs: jax.Array, *, level: int
    ) -> jax.Array:
        """See `DraftModel.logits`."""
        return head_logits(params.head.heads[level - 1], outputs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HydraHeads(_PathReader, LastFeatureModel):
    """Hydra's heads on the target's last hidden state ("mlp").

    Attributes:
        config: The heads' sizes, without a prefix layer.
    """

    config: HydraConfig

    def read(
        self, params: HeadParams, state: LastFeature, root: jax.Array
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

    def run(
        self,
        params: HeadParams,
        tokens: jax.Array,
        features: jax.Array,
        positions: jax.Array,
        contexts: Sequence[AttentionContext],
        last: jax.Array | None = None,
    ) -> tuple[jax.Array, tuple[KeyValues]]:
        """Runs the prefix layer; it reads features alone."""
        del tokens
        (context,) = contexts
        output, entries = prefix(
            params.head, self.config, features, positions, context, last
        )
        return output, (entries,)

    def read(
        self, params: HeadParams, state: EagleState, root: jax.Array
    ) -> tuple[jax.Array, EagleState]:
        """See `DraftModel.read`."""
        output, state = super().read(params, state, root)
        return _append(params, output, root), state


def _append(params: HeadParams, above: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns outputs `[..., X]` with the embeddings of tokens `[...]` behind them."""
    embedded = params.embedding[tokens]
    return jnp.concatenate([above.astype(embedded.dtype), embedded], axis=-1)
