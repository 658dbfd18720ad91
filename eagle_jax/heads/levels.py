"""What Medusa's and Hydra's heads have in common: one of them drafts one level."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax
from flax import struct

from eagle_jax.checkpoints.export_files import WRITTEN_BY, Export
from eagle_jax.checkpoints.hf_fields import Fields
from eagle_jax.checkpoints.weights import Weights
from eagle_jax.heads.feature import FeatureHead
from eagle_jax.heads.head import HeadParams
from eagle_jax.heads.loss import Batch, Metrics, metrics_of, most_likely, pair_weights
from eagle_jax.heads.settings import LevelLoss, LevelSettings
from eagle_jax.models.cache import KeyValues
from eagle_jax.models.layers import AttentionContext
from eagle_jax.models.linear import linear
from eagle_jax.models.transformer import Tables, TransformerConfig, output_head


@struct.dataclass(kw_only=True)
class ResidualBlockParams:
    """The weights of one residual block, `x + SiLU(x @ linear + linear_bias)`.

    Attributes:
        linear: `[E, E]`, the matrix.
        linear_bias: `[E]`, its bias.
    """

    linear: jax.Array
    linear_bias: jax.Array


def residual_block(params: ResidualBlockParams, x: jax.Array) -> jax.Array:
    """Returns `x + SiLU(x @ linear + linear_bias)`, `[..., E]` like `x`."""
    return x + jax.nn.silu(linear(x, params.linear, params.linear_bias))


def init_block(width: int, dtype: jnp.dtype) -> ResidualBlockParams:
    """Returns a block that changes nothing yet, as published training begins with."""
    return ResidualBlockParams(
        linear=jnp.zeros((width, width), dtype), linear_bias=jnp.zeros(width, dtype)
    )


def tie_weights(params: Any) -> Any:
    """Returns weights of any head; residual blocks after one another are all the first.

    The official code of Medusa and Hydra repeats one module, so its files hold one
    block under several names; the first one's gradient is then the sum over all places.
    """

    def tie(one: Any) -> Any:
        return dataclasses.replace(one, blocks=one.blocks[:1] * len(one.blocks))

    if not hasattr(params, "heads"):
        return params
    return dataclasses.replace(params, heads=tuple(map(tie, params.heads)))


class PositionHeads(FeatureHead):
    """Heads of which each drafts one level; `F = E`.

    They mostly have no decoder layer: the root's output is the target's feature.

    Attributes:
        published: The published numbers of heads, and of blocks of each.
        labels: What they learn as published, see `LevelLoss.labels`.
    """

    Loss = LevelLoss
    published: ClassVar[tuple[int, int]]
    labels: ClassVar[str]

    @classmethod
    def matches(cls, fields: Fields) -> bool:
        # They have a file, and fields, of their own.
        files = fields.path.parent.glob(f"{cls.name}_lm_head.*")
        return f"{cls.name}_num_heads" in fields.values or any(files)

    @classmethod
    def default_config(
        cls, target: TransformerConfig, settings: LevelSettings, length: int
    ) -> Any:
        num_heads, num_layers = cls.published
        return cls.Config(
            num_heads=settings.draft_heads or num_heads,
            num_layers=settings.head_layers or num_layers,
            hidden_size=target.layer.hidden_size,
            vocab_size=target.vocab_size,
        )

    @classmethod
    def count(cls, fields: Fields, files: Weights, block: str) -> tuple[int, int]:
        """Returns the numbers of heads, and of blocks of the first, by the tensors.

        Published fields name too few heads. The pattern `block` is that of the names of
        blocks' matrices; its first group is the number of the head.
        """
        found = [re.fullmatch(block, name) for name in files.names()]
        heads = [match[1] for match in found if match]
        num_layers, name = heads.count("0"), f"{cls.name}_num_layers"
        if fields.size(name, default=num_layers) != num_layers:
            raise fields.refusal(
                f"{name} = {fields.get(name)}, but the file has {num_layers} for each "
                "head"
            )
        return len(set(heads)), num_layers

    def to_hf_config(self, how: Export) -> dict[str, Any]:
        return {
            f"{self.name}_num_heads": self.config.num_heads,
            f"{self.name}_num_layers": self.config.num_layers,
            "base_model_name_or_path": how.base_model,
            "torch_dtype": how.dtype,
            "written_by": WRITTEN_BY,
        }

    def init_from_target(
        self, params: Any, tables: Tables, tokens: jax.Array | None
    ) -> Any:
        table = output_head(tables)

        def begin(one: Any) -> Any:
            if one.output_head is None:
                return one
            own = jnp.asarray(table, one.output_head.dtype)
            return dataclasses.replace(one, output_head=own)

        return dataclasses.replace(params, heads=tuple(map(begin, params.heads)))

    def position_logits(self, params: Any, batch: Batch) -> list[jax.Array]:
        """Returns the logits `[B, T, V]` of each head; for the arguments see `loss`."""
        raise NotImplementedError

    def loss(
        self, params: Any, batch: Batch, settings: LevelLoss
    ) -> tuple[jax.Array, Metrics]:
        """Returns the weighted cross-entropies of all heads; see also `Head.loss`.

        Head `i` learns token `t + 2 + i`, or the target's distribution of it, where it
        has read feature `t`; its cross-entropy weighs `decay ** i`.
        """
        table = jax.lax.stop_gradient(output_head(batch.tables))
        losses, agreements = [], []
        for level, found in enumerate(self.position_logits(params, batch)):
            weights = pair_weights(batch.rows, "drafted", level)
            count = jnp.maximum(jnp.sum(weights), 1.0)
            features = jnp.roll(batch.features, -1 - level, axis=1).astype(table.dtype)
            theirs = batch.unembed(table, features)
            if (settings.labels or self.labels) == "target":
                entropy = optax.softmax_cross_entropy(found, jax.nn.softmax(theirs))
            else:
                tokens = jnp.roll(batch.rows.tokens, -2 - level, axis=1)
                entropy = optax.softmax_cross_entropy_with_integer_labels(found, tokens)
            losses.append(jnp.sum(weights * entropy) / count)
            agrees = weights * (most_likely(found) == most_likely(theirs))
            agreements.append(jnp.sum(agrees) / count)
        weights = settings.decay ** jnp.arange(len(losses), dtype=jnp.float32)
        loss = jnp.sum(weights * jnp.stack(losses)) / jnp.sum(weights)
        counted = pair_weights(batch.rows, "drafted")
        return loss, metrics_of(loss, losses[0], agreements[:1], counted)

    @property
    def max_levels(self) -> int:
        return self.config.num_heads

    @property
    def feature_size(self) -> int:
        return self.config.hidden_size

    def run(
        self,
        params: HeadParams,
        tokens: jax.Array,
        features: jax.Array,
        positions: jax.Array,
        contexts: Sequence[AttentionContext],
        last: jax.Array | None = None,
    ) -> tuple[jax.Array, tuple[KeyValues, ...]]:
        if last is not None:
            features = jnp.take_along_axis(features, last[:, None, None], axis=1)
        return features, ()

    def extend(
        self, params: HeadParams, above: jax.Array, tokens: jax.Array
    ) -> jax.Array:
        """Returns the outputs of nodes, of those of their parents and their tokens."""
        raise NotImplementedError

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
        # Nothing is run for a node.
        return self.extend(params, above, tokens), earlier


def num_rows(files: Weights, name: str) -> int:
    """Returns the first size of a tensor as files hold it; 0 where it has no axis."""
    return sum(files.shape(name)[:1])
