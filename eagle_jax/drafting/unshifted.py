"""The EAGLE head of an ablation, whose features stand beside their own tokens."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from eagle_jax.drafting.eagle import EagleDrafterParams, EagleHead, EagleState


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnshiftedEagleHead(EagleHead):
    """An EAGLE head that pairs a feature with its own token (EAGLE-1, section 4.3.2).

    A drafted feature's own token is the parent's, so a node's output is the predicted
    feature and the embedding of its token side by side, `X = 2 * E`.
    """

    def paired(self, tokens: jax.Array, following: jax.Array) -> jax.Array:
        """See `FeatureHead.paired`; here they are the features' own."""
        del following
        return tokens

    def read(
        self, params: EagleDrafterParams, state: EagleState, root: jax.Array
    ) -> tuple[jax.Array, EagleState]:
        """See `DraftModel.read`."""
        output, state = super().read(params, state, root)
        return jnp.concatenate([output, params.embedding[root]], axis=-1), state

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
        """See `DraftModel.step`."""
        features, embedded = jnp.split(above, 2, axis=-1)
        positions = state.cache.length[:, None] + jnp.full_like(tokens, level - 1)
        inputs = features, positions, visible, state.cache, earlier
        outputs, entries = self.forward(params.head, self.config, embedded, *inputs)
        own = params.embedding[tokens]
        return jnp.concatenate([outputs, own], axis=-1), entries

    def logits(
        self, params: EagleDrafterParams, outputs: jax.Array, *, level: int
    ) -> jax.Array:
        """See `DraftModel.logits`."""
        features, _ = jnp.split(outputs, 2, axis=-1)
        return super().logits(params, features, level=level)
