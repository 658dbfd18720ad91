"""The EAGLE-1/2 head as a draft model."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from eagle_jax.drafting.model import target_tokens
from eagle_jax.heads.eagle import model
from eagle_jax.heads.eagle.model import EagleHeadConfig
from eagle_jax.heads.feature import FeatureHead, HeadParams, join
from eagle_jax.models.transformer import output_columns, output_head, unembed


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleHead(FeatureHead):
    """An EAGLE-1/2 head, which predicts the target's last hidden state, `F = E`."""

    config: EagleHeadConfig
    layer_inputs = staticmethod(model.layer_inputs)
    join = staticmethod(functools.partial(join, borrows_output_head=True))

    @staticmethod
    def narrow(params: HeadParams, tokens: jax.Array) -> HeadParams:
        """Returns weights that draft some of the target's tokens alone (FR-Spec).

        Args:
            params: The drafter's weights, from `join`.
            tokens: `[W]` int32, the tokens in ascending order, none twice.
        """
        return dataclasses.replace(
            params,
            output_head=output_columns(params, tokens),
            offsets=(tokens - jnp.arange(tokens.size)).astype(jnp.int32),
        )

    def logits(
        self, params: HeadParams, outputs: jax.Array, *, level: int
    ) -> jax.Array:
        """See `DraftModel.logits`."""
        del level
        return unembed(output_head(params), outputs)

    def tokens(self, params: HeadParams, choices: jax.Array) -> jax.Array:
        """See `DraftModel.tokens`; `W = V` unless the output head is narrowed."""
        return target_tokens(params.offsets, choices)
