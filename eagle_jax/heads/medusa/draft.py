"""Medusa's heads as a draft model: every level has a head, all read one state."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from eagle_jax.heads.feature import HeadParams, join
from eagle_jax.heads.medusa.model import MedusaConfig, forward
from eagle_jax.interface import PromptChunk
from eagle_jax.models.transformer import output_head, unembed


@struct.dataclass(kw_only=True)
class LastFeature:
    """What a round begins with: the target's feature before the root.

    Attributes:
        feature: `[B, F]`, the target's feature at the last token before the root.
    """

    feature: jax.Array


class PositionHeads:
    """What Medusa's and Hydra's heads have in common: a head per drafted level."""

    config: Any
    join = staticmethod(join)

    @property
    def vocab_size(self) -> int:
        """See `DraftModel.vocab_size`."""
        return self.config.vocab_size

    @property
    def max_levels(self) -> int:
        """See `DraftModel.max_levels`; each level has a head."""
        return self.config.num_heads

    @property
    def feature_size(self) -> int:
        """The width of the target's features, `F`, which is `E`."""
        return self.config.hidden_size

    def tokens(self, params: Any, choices: jax.Array) -> jax.Array:
        """See `DraftModel.tokens`; the vocabulary is the target's, so `W = V`."""
        del params
        return choices


@dataclasses.dataclass(frozen=True, kw_only=True)
class LastFeatureModel(PositionHeads):
    """The half of such a draft model that remembers one feature and nothing else.

    Attributes:
        dtype: The type of features.
    """

    dtype: str = "float32"

    def init_state(self, batch: int, capacity: int, depth: int) -> LastFeature:
        """See `DraftModel.init_state`."""
        del capacity, depth
        return LastFeature(feature=jnp.zeros((batch, self.feature_size), self.dtype))

    def truncate(self, state: LastFeature, length: jax.Array) -> LastFeature:
        """See `Truncating`; the next chunk brings another last feature."""
        del length
        return state

    def prefill_chunk(
        self, params: Any, state: LastFeature, chunk: PromptChunk
    ) -> LastFeature:
        """See `Drafter.prefill_chunk`."""
        del params
        return LastFeature(feature=chunk.newest(chunk.features, state.feature))

    def advance(
        self,
        state: LastFeature,
        tokens: jax.Array,
        features: jax.Array,
        count: jax.Array,
    ) -> LastFeature:
        """See `Drafter.advance`; of a row that is finished, nothing is read again."""
        del state, tokens
        last = jnp.maximum(count - 1, 0)[:, None, None]
        feature = jnp.take_along_axis(features, last, axis=1)[:, 0]
        return LastFeature(feature=feature.astype(self.dtype))

    def read(
        self, params: Any, state: LastFeature, root: jax.Array
    ) -> tuple[jax.Array, LastFeature]:
        """See `DraftModel.read`; the root's output is the feature before it."""
        del params, root
        return state.feature, state


@dataclasses.dataclass(frozen=True, kw_only=True)
class MedusaHeads(LastFeatureModel):
    """Medusa's heads, of which head `i` drafts depth `i + 1` (Medusa, section 3.1).

    No head sees a drafted token: all nodes of a level have the same children.

    Attributes:
        config: The heads' sizes.
    """

    config: MedusaConfig
    join = staticmethod(functools.partial(join, borrows_output_head=True))

    def step(
        self,
        params: HeadParams,
        state: LastFeature,
        tokens: jax.Array,
        above: jax.Array,
        visible: jax.Array,
        earlier: Any,
        *,
        level: int,
    ) -> tuple[jax.Array, Any]:
        """See `DraftModel.step`; every node passes on what the root was given."""
        del params, state, tokens, visible, level
        return above[:, :1], earlier

    def logits(
        self, params: HeadParams, outputs: jax.Array, *, level: int
    ) -> jax.Array:
        """See `DraftModel.logits`."""
        head = params.head.heads[level - 1]
        own = head.output_head
        table = output_head(params) if own is None else own
        return unembed(table, forward(head, outputs))
