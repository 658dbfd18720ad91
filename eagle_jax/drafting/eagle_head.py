"""An EAGLE-1/2 head as a draft model: it predicts the target's last hidden state."""

import dataclasses
from typing import Any

import jax
from flax import struct

from eagle_jax.drafting.feature_head import FeatureHead
from eagle_jax.models import cache as kv
from eagle_jax.models import eagle_head
from eagle_jax.models.eagle_head import EagleHeadConfig, EagleHeadParams
from eagle_jax.models.layers import LayerConfig
from eagle_jax.models.transformer import Tables, output_head, unembed


@struct.dataclass(kw_only=True)
class EagleDrafterParams:
    """The head, and the two tables that it may borrow from the target.

    Attributes:
        head: Weights of the head.
        embedding: `[V, E]`.
        output_head: `[E, V]`, or `None` where it is the embedding's transpose.
    """

    head: EagleHeadParams
    embedding: jax.Array
    output_head: jax.Array | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleHead(FeatureHead[EagleDrafterParams]):
    """The head behind the `DraftModel` protocol; its outputs are features, `X = E`.

    Attributes:
        config: Sizes.
        dtype: Of its cache and features.
    """

    config: EagleHeadConfig

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

    @property
    def vocab_size(self) -> int:
        """See `DraftModel.vocab_size`."""
        return self.config.vocab_size

    @property
    def layer(self) -> LayerConfig:
        """See `FeatureHead.layer`."""
        return self.config.layer

    @property
    def feature_size(self) -> int:
        """`F`, which is `E`."""
        return self.config.layer.hidden_size

    def fuse(self, params: EagleDrafterParams, features: jax.Array) -> jax.Array:
        """Returns the features as they are: those that it drafts look alike."""
        del params
        return features

    def run(
        self,
        params: EagleDrafterParams,
        tokens: jax.Array,
        features: jax.Array,
        positions: jax.Array,
        mask: jax.Array,
        cache: kv.KVCache,
        earlier: Any = None,
    ) -> tuple[jax.Array, kv.KeyValues]:
        """See `FeatureHead.run`."""
        return eagle_head.forward(
            params.head,
            self.config,
            params.embedding[tokens],
            features,
            positions,
            mask,
            cache,
            earlier,
        )

    def logits(self, params: EagleDrafterParams, outputs: jax.Array) -> jax.Array:
        """See `DraftModel.logits`."""
        table = params.output_head
        return unembed(params.embedding.T if table is None else table, outputs)

    def tokens(self, params: EagleDrafterParams, choices: jax.Array) -> jax.Array:
        """See `DraftModel.tokens`: the output head is the target's."""
        del params
        return choices
