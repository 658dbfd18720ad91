"""An EAGLE-3 head as a draft model: it reads three features, and knows fewer tokens."""

import dataclasses
from typing import Any

import jax
from flax import struct

from eagle_jax.drafting.feature_head import FeatureHead
from eagle_jax.models import cache as kv
from eagle_jax.models import eagle3_head
from eagle_jax.models.eagle3_head import Eagle3HeadConfig, Eagle3HeadParams
from eagle_jax.models.layers import LayerConfig, rms_norm
from eagle_jax.models.transformer import Tables, unembed


@struct.dataclass(kw_only=True)
class Eagle3DrafterParams:
    """The head, and the table that it may borrow from the target.

    Attributes:
        head: Weights of the head.
        embedding: `[V, E]`.
    """

    head: Eagle3HeadParams
    embedding: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3Head(FeatureHead[Eagle3DrafterParams]):
    """The head behind the `DraftModel` protocol.

    The target must give the features of `models.eagle3_head.feature_layers`. The
    head's own outputs, `X = E`, take their place without being fused.

    Attributes:
        config: Sizes.
        dtype: Of its cache and features.
    """

    config: Eagle3HeadConfig

    @staticmethod
    def join(head: Eagle3HeadParams, target: Tables) -> Eagle3DrafterParams:
        """Joins a head with the embedding table of its target; nothing is copied."""
        return Eagle3DrafterParams(
            head=dataclasses.replace(head, embedding=None),
            embedding=target.embedding if head.embedding is None else head.embedding,
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
        """`F`, three times the target's width."""
        return self.config.feature_size

    def fuse(self, params: Eagle3DrafterParams, features: jax.Array) -> jax.Array:
        """See `FeatureHead.fuse`."""
        return eagle3_head.fuse(params.head, features)

    def run(
        self,
        params: Eagle3DrafterParams,
        tokens: jax.Array,
        features: jax.Array,
        positions: jax.Array,
        mask: jax.Array,
        cache: kv.KVCache,
        earlier: Any = None,
    ) -> tuple[jax.Array, kv.KeyValues]:
        """See `FeatureHead.run`."""
        return eagle3_head.forward(
            params.head,
            self.config,
            params.embedding[tokens],
            features,
            positions,
            mask,
            cache,
            earlier,
        )

    def logits(self, params: Eagle3DrafterParams, outputs: jax.Array) -> jax.Array:
        """See `DraftModel.logits`: `W` tokens, from an output head of its own."""
        head = params.head
        normed = rms_norm(outputs, head.norm, self.config.layer.rms_norm_eps)
        return unembed(head.output_head, normed)

    def tokens(self, params: Eagle3DrafterParams, choices: jax.Array) -> jax.Array:
        """See `DraftModel.tokens`."""
        offsets = params.head.offsets
        return choices if offsets is None else choices + offsets[choices]
