"""Heads that draft a whole block in one pass (DFlash), and DSpark's beside it.

A block is the root and masks behind it. Its rows see each other and the target's text,
which every layer reads as keys and values of the same projected features. Row `k`
predicts the token at its own place (DFlash, the root's row nothing), or the one after
it (DSpark). With a Markov head the prediction also depends on the token before, by a
table of low rank: `logits + before[token] @ after`.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import struct

from eagle_jax.models.attention import attend
from eagle_jax.models.cache import KeyValues
from eagle_jax.models.layers import (
    AttentionContext,
    LayerConfig,
    LayerParams,
    finish,
    init_layer,
    normalise,
    project,
    rms_norm,
)
from eagle_jax.models.linear import init_matrix, linear
from eagle_jax.models.rope import rotary_tables
from eagle_jax.prng import own_keys


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockHeadConfig:
    """The sizes of a block head.

    Attributes:
        layer: The sizes of each layer; its width is the target's.
        vocab_size: The number of tokens the target knows, `V`.
        max_positions: The number of positions that it was trained for.
        block_size: The rows of a block, the root's included.
        mask_token: The token whose embedding stands for a token to be predicted.
        feature_layers: The indices of the target's layers whose inputs are read.
        num_target_layers: The number of the target's layers.
        num_layers: The number of its own.
        predicts_next: Whether rows predict the token after them (DSpark), not their
            own.
        sliding_window: The number of positions of the text that a row sees, up to its
            own; `None` for all.
        is_causal: Whether a row sees those before it and itself alone of its block.
        markov_rank: The rank of the Markov head, `r`; 0 for none.
        has_confidence: Whether there is a confidence head, which reads the token before
            where there is a Markov head.
    """

    layer: LayerConfig
    vocab_size: int
    max_positions: int
    block_size: int
    mask_token: int
    feature_layers: tuple[int, ...]
    num_target_layers: int
    num_layers: int = 1
    predicts_next: bool = False
    sliding_window: int | None = None
    is_causal: bool = False
    markov_rank: int = 0
    has_confidence: bool = False

    @property
    def num_levels(self) -> int:
        """The number of tokens after the root that a block predicts."""
        return self.block_size if self.predicts_next else self.block_size - 1

    @property
    def first_row(self) -> int:
        """The row that predicts the token after the root."""
        return 0 if self.predicts_next else 1

    @property
    def feature_size(self) -> int:
        """The width of the target's features, `F`."""
        return self.layer.hidden_size * len(self.feature_layers)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DSparkHeadConfig(BlockHeadConfig):
    """The sizes of a block head of DSpark, see `BlockHeadConfig`."""

    predicts_next: bool = True


@struct.dataclass(kw_only=True)
class MarkovParams:
    """The weights of a Markov head (DSpark).

    Attributes:
        before: `[V, r]`, a row for the token before.
        after: `[r, V]`, which makes logits of that row.
    """

    before: jax.Array
    after: jax.Array


@struct.dataclass(kw_only=True)
class ConfidenceParams:
    """The weights of a confidence head: the chance that rejection accepts (DSpark).

    Drafting does not read it: trees are ranked by what is drafted.

    Attributes:
        linear: `[E + r, 1]`, of a row's state and the Markov head's row.
        linear_bias: `[1]`, its bias.
    """

    linear: jax.Array
    linear_bias: jax.Array


@struct.dataclass(kw_only=True)
class BlockHeadParams:
    """The weights of a block head.

    Attributes:
        fc: `[F, E]`, which projects the target's features.
        feature_norm: `[E]`, the norm of what it makes.
        layers: The layers, with input norms.
        norm: `[E]`, the norm before the output head, which is the target's.
        markov: The Markov head; `None` for none.
        confidence: The confidence head; `None` for none.
    """

    fc: jax.Array
    feature_norm: jax.Array
    layers: tuple[LayerParams, ...]
    norm: jax.Array
    markov: MarkovParams | None = None
    confidence: ConfidenceParams | None = None


def read_features(
    params: BlockHeadParams, config: BlockHeadConfig, features: jax.Array
) -> jax.Array:
    """Returns features `[..., F]` as all layers read them, `[..., E]`."""
    read = linear(features.astype(params.fc.dtype), params.fc)
    return rms_norm(read, params.feature_norm, config.layer.rms_norm_eps)


def text_entries(
    params: BlockHeadParams,
    config: BlockHeadConfig,
    read: jax.Array,
    positions: jax.Array,
) -> tuple[KeyValues, ...]:
    """Returns each layer's keys and values of the text, `[B, G, T, A]`.

    Args:
        params: The head's weights.
        config: The head's sizes. Static.
        read: `[B, T, E]`, from `read_features`.
        positions: `[B, T]` int32, the tokens' absolute positions.
    """
    layer = config.layer
    rotary = rotary_tables(positions, layer.rope, layer.head_dim)
    bare = [dataclasses.replace(one, input_norm=None) for one in params.layers]
    return tuple(project(one, layer, read, rotary)[1] for one in bare)


def block_states(
    params: BlockHeadParams,
    config: BlockHeadConfig,
    embedded: jax.Array,
    read: jax.Array,
    positions: jax.Array,
    contexts: Sequence[AttentionContext],
) -> tuple[jax.Array, tuple[KeyValues, ...]]:
    """Runs the layers over a block, beside confirmed tokens that wait.

    Both go through the matrices of keys and values together.

    Args:
        params: The head's weights.
        config: The head's sizes. Static.
        embedded: `[B, R, E]`, the embeddings of root and masks.
        read: `[B, P, E]`, from `read_features`, of tokens that are not in the cache.
        positions: `[B, P + R]` int32, the absolute positions of both.
        contexts: What the block sees in each layer: the cache, and of both, by a mask
            `[B, R, P + R]`.

    Returns:
        The states `[B, R, E]` that the output head reads, and each layer's keys and
        values of both, `[B, G, P + R, A]`.
    """
    layer, waiting = config.layer, read.shape[1]
    rotary = rotary_tables(positions, layer.rope, layer.head_dim)
    x, entries = embedded, []
    for weights, context in zip(params.layers, contexts, strict=True):
        assert weights.input_norm is not None
        inputs = normalise(layer, x, weights.input_norm)
        both = jnp.concatenate([read.astype(inputs.dtype), inputs], axis=1)
        bare = dataclasses.replace(weights, input_norm=None)
        query, new = project(bare, layer, both, rotary)
        mixed = attend(
            query[:, waiting:],
            context.cached,
            context.length,
            new,
            context.mask,
            context.first,
        )
        x = finish(weights, layer, x, mixed)
        entries.append(new)
    return rms_norm(x, params.norm, layer.rms_norm_eps), tuple(entries)


def own_mask(config: BlockHeadConfig) -> jax.Array:
    """Returns which rows of its block a row sees, `[R, R]` bool."""
    mask = jnp.ones((config.block_size, config.block_size), bool)
    return jnp.tril(mask) if config.is_causal else mask


def markov_logits(after: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns what a Markov head adds to logits, `[..., V]` float32.

    In float32 whatever the weights are: two small factors lose what they say in
    bfloat16.

    Args:
        after: `[r, V]`, see `MarkovParams`.
        rows: `[..., r]`, the rows of `before` of the tokens before.
    """
    return jnp.matmul(
        rows.astype(jnp.float32),
        after.astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    )


def init_params(
    key: jax.Array, config: BlockHeadConfig, dtype: str = "float32"
) -> BlockHeadParams:
    """Returns random weights, without output head and embedding, which are borrowed."""
    fc_key, before_key, after_key, *keys = jax.random.split(
        own_keys(key), 3 + config.num_layers
    )
    width, kind, rank = config.layer.hidden_size, jnp.dtype(dtype), config.markov_rank
    markov = confidence = None
    if rank:
        markov = MarkovParams(
            before=init_matrix(before_key, (config.vocab_size, rank), kind),
            after=init_matrix(after_key, (rank, config.vocab_size), kind),
        )
    if config.has_confidence:
        confidence = ConfidenceParams(
            linear=jnp.zeros((width + rank, 1), kind), linear_bias=jnp.zeros(1, kind)
        )
    return BlockHeadParams(
        fc=init_matrix(fc_key, (config.feature_size, width), kind),
        feature_norm=jnp.ones(width, kind),
        layers=tuple(
            init_layer(one, config.layer, kind, input_norm=True) for one in keys
        ),
        norm=jnp.ones(width, kind),
        markov=markov,
        confidence=confidence,
    )
