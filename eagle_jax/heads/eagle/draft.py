"""The EAGLE-1/2 head as a draft model."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct

from eagle_jax.drafting.model import target_tokens
from eagle_jax.heads.eagle import model
from eagle_jax.heads.eagle.model import EagleHeadConfig, EagleHeadParams
from eagle_jax.heads.feature import FeatureHead
from eagle_jax.models.transformer import Tables, output_columns, output_head, unembed


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleHead(FeatureHead):
    """An EAGLE-1/2 head, which predicts the target's last hidden state, `F = E`."""

    config: EagleHeadConfig
    layer_inputs = staticmethod(model.layer_inputs)

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
