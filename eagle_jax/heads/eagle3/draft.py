"""The EAGLE-3 head as a draft model."""

import dataclasses

import jax

from eagle_jax.drafting.model import target_tokens
from eagle_jax.heads.eagle3 import model
from eagle_jax.heads.eagle3.model import Eagle3HeadConfig, Eagle3HeadParams
from eagle_jax.heads.feature import FeatureHead, HeadParams, join
from eagle_jax.models.layers import rms_norm
from eagle_jax.models.transformer import Tables, output_head, unembed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3Draft(FeatureHead):
    """An EAGLE-3 head, which reads several features and may know fewer tokens.

    The target must give the features of `model.feature_layers`. For
    drafted tokens the head's own outputs take their place, without being fused.
    """

    config: Eagle3HeadConfig

    def layer_inputs(
        self, params: Eagle3HeadParams, embeddings: jax.Array, features: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """See `FeatureHead.layer_inputs`."""
        return model.layer_inputs(params, self.config, embeddings, features)

    def recycle(self, params: Eagle3HeadParams, outputs: jax.Array) -> jax.Array:
        """See `FeatureHead.recycle`; some heads read the output normalised."""
        return model.recycle(params, self.config, outputs)

    @property
    def feature_size(self) -> int:
        """The width of the target's features, `F`."""
        return self.config.feature_size

    @property
    def sliding_window(self) -> int | None:
        """See `FeatureHead.sliding_window`."""
        return self.config.sliding_window

    @property
    def num_layers(self) -> int:
        """See `FeatureHead.num_layers`."""
        return self.config.num_layers

    @staticmethod
    def join(head: Eagle3HeadParams, target: Tables) -> HeadParams:
        """See `HeadModel.join`."""
        return join(head, target, borrows_output_head=head.output_head is None)

    def fuse(self, params: Eagle3HeadParams, features: jax.Array) -> jax.Array:
        """See `FeatureHead.fuse`."""
        return model.fuse(params, self.config, features)

    def logits(
        self, params: HeadParams, outputs: jax.Array, *, level: int
    ) -> jax.Array:
        """See `DraftModel.logits`; the head's own output head gives `W` of them."""
        del level
        head = params.head
        normed = rms_norm(outputs, head.norm, self.config.layer.rms_norm_eps)
        table = output_head(params) if head.output_head is None else head.output_head
        return unembed(table, normed)

    def tokens(self, params: HeadParams, choices: jax.Array) -> jax.Array:
        """See `DraftModel.tokens`."""
        return target_tokens(params.head.offsets, choices)
