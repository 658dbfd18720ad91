"""Medusa's heads as a draft model: every level has a head, all read one state."""

import abc
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from eagle_jax.heads.medusa import model as medusa_heads
from eagle_jax.heads.medusa.model import MedusaConfig, MedusaHeadParams
from eagle_jax.interface import PromptChunk
from eagle_jax.models.transformer import Tables, unembed


@struct.dataclass(kw_only=True)
class MedusaDrafterParams:
    """Medusa's heads, and the table that they may borrow from the target.

    Attributes:
        heads: The weights of the heads, that of the root's children first.
        embedding: `[V, E]`, the target's embedding table where heads borrow an output
            head that is its transpose; `None` elsewhere.
        output_head: `[E, V]`, the target's output head where heads borrow it; `None`
            elsewhere.
    """

    heads: tuple[MedusaHeadParams, ...]
    embedding: jax.Array | None = None
    output_head: jax.Array | None = None


@struct.dataclass(kw_only=True)
class LastFeature:
    """What a round begins with: the target's feature before the root.

    Attributes:
        feature: `[B, F]`, the target's feature at the last token before the root.
    """

    feature: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class LastFeatureModel(abc.ABC):
    """The half of a draft model that remembers one feature and nothing else.

    Attributes:
        dtype: The type of features.
    """

    dtype: str = "float32"

    @property
    @abc.abstractmethod
    def feature_size(self) -> int:
        """The width of the target's features, `F`."""
        ...

    def init_state(self, batch: int, capacity: int, depth: int) -> LastFeature:
        """See `DraftModel.init_state`."""
        del capacity, depth
        return LastFeature(feature=jnp.zeros((batch, self.feature_size), self.dtype))

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


class PositionHeads:
    """What Medusa's and Hydra's heads have in common: a head per drafted level."""

    config: Any

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
class MedusaHeads(PositionHeads, LastFeatureModel):
    """Medusa's heads, of which head `i` drafts depth `i + 1` (Medusa, section 3.1).

    No head sees a drafted token: all nodes of a level have the same children.

    Attributes:
        config: The heads' sizes.
    """

    config: MedusaConfig

    @staticmethod
    def join(
        heads: tuple[MedusaHeadParams, ...], target: Tables
    ) -> MedusaDrafterParams:
        """Joins heads with the output head of their target; nothing is copied."""
        if all(head.output_head is not None for head in heads):
            return MedusaDrafterParams(heads=heads)
        is_tied = target.output_head is None
        return MedusaDrafterParams(
            heads=heads,
            embedding=target.embedding if is_tied else None,
            output_head=target.output_head,
        )

    def step(
        self,
        params: MedusaDrafterParams,
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
        self, params: MedusaDrafterParams, outputs: jax.Array, *, level: int
    ) -> jax.Array:
        """See `DraftModel.logits`."""
        head, borrowed = params.heads[level - 1], params.output_head
        if borrowed is None and params.embedding is not None:
            borrowed = params.embedding.T
        table = borrowed if head.output_head is None else head.output_head
        assert table is not None, "join gives the target's to heads without one"
        return unembed(table, medusa_heads.forward(head, outputs))
