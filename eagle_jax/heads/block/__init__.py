"""Heads that draft a whole block in one pass (DFlash), and DSpark's beside it.

A block is the root and masks behind it. Its rows see each other and the target's text,
which every layer reads as keys and values of the same projected features. Row `k`
predicts the token at its own place (DFlash, the root's row nothing), or the one after
it (DSpark). With a Markov head the prediction also depends on the token before, by a
table of low rank: `logits + before[token] @ after`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct

from eagle_jax.heads.block.files import BlockHeadConfig, BlockSettings, StoredBlockHead
from eagle_jax.heads.block.loss import BlockLoss, DSparkLoss, block_loss
from eagle_jax.heads.head import HeadParams
from eagle_jax.interface import PromptChunk
from eagle_jax.interface.ordering import after
from eagle_jax.models import cache as kv
from eagle_jax.models.attention import attend
from eagle_jax.models.layers import (
    LayerParams,
    finish,
    init_layer,
    normalise,
    project,
    rms_norm,
)
from eagle_jax.models.linear import init_matrix, linear
from eagle_jax.models.rope import rotary_tables
from eagle_jax.models.transformer import unembed_by
from eagle_jax.prng import own_keys


@struct.dataclass(kw_only=True)
class MarkovParams:
    """The weights of a Markov head (DSpark).

    Attributes:
        before: `[V, r]`, a row for the token before.
        after: `[r, V]`, which makes logits of that row.
    """

    before: jax.Array
    after: jax.Array

    def logits(self, rows: jax.Array) -> jax.Array:
        """Returns what is added to logits, `[..., V]` float32.

        In float32 whatever the weights are: two small factors lose what they say in
        bfloat16.

        Args:
            rows: `[..., r]`, the rows of `before` of the tokens before.
        """
        rows, after = rows.astype(jnp.float32), self.after.astype(jnp.float32)
        return jnp.matmul(rows, after, precision=jax.lax.Precision.HIGHEST)


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


@struct.dataclass(kw_only=True)
class BlockState:
    """The confirmed text of each row as the layers read it.

    Attributes:
        cache: The cache of the layers, of the text alone: blocks leave nothing in it.
        features: `[B, P, F]`, the target's features of confirmed tokens that are not
            read yet, oldest first.
        count: `[B]` int32, how many of them are real.
    """

    cache: kv.KVCache
    features: jax.Array
    count: jax.Array


@struct.dataclass(kw_only=True)
class BlockOutput:
    """What a node passes to its children.

    Attributes:
        logits: `[B, M, D, V]` float32, those of every level; the same for all nodes.
        before: `[B, M, r]`, the row of the node's token in the Markov head; `None`
            without one.
    """

    logits: jax.Array
    before: jax.Array | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockHead(StoredBlockHead):
    """A head that drafts a block in one pass.

    All nodes of a level have the same children, unless a Markov head knows their
    tokens: a tree is grown from tables, and nothing is run again for it.
    """

    config: BlockHeadConfig
    loss = block_loss

    def init(self, key: jax.Array, dtype: str = "float32") -> BlockHeadParams:
        config, kind = self.config, jnp.dtype(dtype)
        fc_key, before_key, after_key, *keys = jax.random.split(
            own_keys(key), 3 + config.num_layers
        )
        width, rank = config.layer.hidden_size, config.markov_rank
        markov = confidence = None
        if rank:
            markov = MarkovParams(
                before=init_matrix(before_key, (config.vocab_size, rank), kind),
                after=init_matrix(after_key, (rank, config.vocab_size), kind),
            )
        if config.has_confidence:
            zeros = jnp.zeros((width + rank, 1), kind)
            confidence = ConfidenceParams(linear=zeros, linear_bias=jnp.zeros(1, kind))
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

    @property
    def max_levels(self) -> int:
        return self.config.num_levels

    def init_state(self, batch: int, capacity: int, depth: int) -> BlockState:
        layer, width = self.config.layer, self.config.feature_size
        return BlockState(
            cache=kv.init_cache(
                num_layers=self.config.num_layers,
                batch=batch,
                num_kv_heads=layer.num_kv_heads,
                capacity=capacity,
                head_dim=layer.head_dim,
                dtype=jnp.dtype(self.dtype),
            ),
            features=jnp.zeros((batch, depth + 1, width), self.dtype),
            count=jnp.zeros(batch, jnp.int32),
        )

    def prefill_chunk(
        self, params: HeadParams, state: BlockState, chunk: PromptChunk
    ) -> BlockState:
        # Keys and values of the text, and no more.
        rows = jnp.broadcast_to(jnp.arange(chunk.tokens.shape[1]), chunk.tokens.shape)
        read = self.read_features(params.head, chunk.features)
        entries = self.text_entries(params.head, read, chunk.begin + rows)
        return BlockState(
            cache=kv.commit(state.cache, entries, rows, chunk.count),
            features=state.features,
            count=jnp.zeros_like(state.count),
        )

    def read(
        self, params: HeadParams, state: BlockState, root: jax.Array
    ) -> tuple[BlockOutput, BlockState]:
        # The one pass of a round, in which confirmed tokens that wait go through the
        # matrices of keys and values together with the block.
        config, cache, layer = self.config, state.cache, self.config.layer
        batch, waiting = state.features.shape[:2]
        rows = jnp.broadcast_to(jnp.arange(waiting), (batch, waiting))
        start = cache.length[:, None]
        place = start + state.count[:, None] + jnp.arange(config.block_size)
        positions = jnp.concatenate([start + rows, place], axis=1)
        rotary = rotary_tables(positions, layer.rope, layer.head_dim)
        mask, first = self._mask(rows < state.count[:, None], start + rows, place)
        text = self.read_features(params.head, state.features)
        entries: list[kv.KeyValues] = []

        def mix(number: int, weights: LayerParams, inputs: jax.Array) -> jax.Array:
            both = jnp.concatenate([text.astype(inputs.dtype), inputs], axis=1)
            query, new = project(weights, layer, both, rotary)
            entries.append(new)
            cached, query = cache.layers[number], query[:, waiting:]
            return attend(query, cached, cache.length, new, mask, first)

        masks = jnp.full((batch, config.block_size - 1), config.mask_token, jnp.int32)
        tokens = jnp.concatenate([root[:, None], masks], axis=1)
        states = self.run(params.head, params.embedding[tokens], mix)
        # A tree of `D` levels waits for `D + 1` tokens, and reads as many rows less 1.
        used = states[:, config.first_row : config.first_row + waiting - 1]
        logits = unembed_by(params, used)
        markov = params.head.markov
        before = None if markov is None else markov.before[root]
        count = after(state.count, logits[:, 0, 0])
        cache = kv.commit(cache, tuple(entries), rows, count)
        state = dataclasses.replace(state, cache=cache, count=jnp.zeros_like(count))
        return BlockOutput(logits=logits, before=before), state

    def step(
        self,
        params: HeadParams,
        state: BlockState,
        tokens: jax.Array,
        above: BlockOutput,
        visible: jax.Array,
        earlier: Any,
        *,
        level: int,
    ) -> tuple[BlockOutput, Any]:
        # Nothing is run, at most a row is looked up.
        markov = params.head.markov
        before = None if markov is None else markov.before[tokens]
        return BlockOutput(logits=above.logits[:, :1], before=before), earlier

    def logits(
        self, params: HeadParams, outputs: BlockOutput, *, level: int
    ) -> jax.Array:
        logits, markov = outputs.logits[..., level - 1, :], params.head.markov
        if markov is None or outputs.before is None:
            return logits
        return logits + markov.logits(outputs.before)

    def read_features(self, params: BlockHeadParams, features: jax.Array) -> jax.Array:
        """Returns features `[..., F]` as all layers read them, `[..., E]`."""
        read = linear(features.astype(params.fc.dtype), params.fc)
        return rms_norm(read, params.feature_norm, self.config.layer.rms_norm_eps)

    def text_entries(
        self, params: BlockHeadParams, read: jax.Array, positions: jax.Array
    ) -> tuple[kv.KeyValues, ...]:
        """Returns each layer's keys and values of the text, `[B, G, T, A]`.

        Args:
            params: The head's weights.
            read: `[B, T, E]`, from `read_features`.
            positions: `[B, T]` int32, the tokens' absolute positions.
        """
        layer = self.config.layer
        rotary = rotary_tables(positions, layer.rope, layer.head_dim)
        bare = [dataclasses.replace(one, input_norm=None) for one in params.layers]
        return tuple(project(one, layer, read, rotary)[1] for one in bare)

    def run(
        self,
        params: BlockHeadParams,
        x: jax.Array,
        mix: Callable[[int, LayerParams, jax.Array], jax.Array],
    ) -> jax.Array:
        """Runs the layers over blocks; returns what the output head reads, `[B, T, E]`.

        Args:
            params: The head's weights.
            x: `[B, T, E]`, the embeddings of roots and masks.
            mix: The attention: from a layer's number, its weights without input norm
                and the normalised stream to the heads' mixed values, `[B, T, H * A]`.
        """
        layer = self.config.layer
        for number, weights in enumerate(params.layers):
            assert weights.input_norm is not None
            inputs = normalise(layer, x, weights.input_norm)
            bare = dataclasses.replace(weights, input_norm=None)
            x = finish(weights, layer, x, mix(number, bare, inputs))
        return rms_norm(x, params.norm, layer.rms_norm_eps)

    def own_mask(self) -> jax.Array:
        """Returns which rows of its block a row sees, `[R, R]` bool."""
        mask = jnp.ones((self.config.block_size, self.config.block_size), bool)
        return jnp.tril(mask) if self.config.is_causal else mask

    def _mask(
        self, waits: jax.Array, positions: jax.Array, place: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        """Returns what a block sees: of tokens that wait and itself, of the cache."""
        window, first = self.config.sliding_window, None
        sees = jnp.broadcast_to(waits[:, None], (*place.shape, waits.shape[1]))
        if window is not None:
            first = place - window + 1
            sees &= positions[:, None] >= first[..., None]
        own = self.own_mask()
        own = jnp.broadcast_to(own, (len(place), *own.shape))
        return jnp.concatenate([sees, own], axis=-1), first


@dataclasses.dataclass(frozen=True, kw_only=True)
class DFlashSettings(BlockSettings):
    """The settings of a new head of DFlash, see `BlockSettings`."""

    kind: Literal["dflash"] = "dflash"


class DFlashHead(BlockHead):
    """A head of DFlash, whose rows predict their own token."""

    name = "dflash"
    title = "a DFlash head"
    architecture = "DFlashDraftModel"
    Config, Settings, Loss = BlockHeadConfig, DFlashSettings, BlockLoss
    block_size = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class DSparkHeadConfig(BlockHeadConfig):
    """The sizes of a block head of DSpark, see `BlockHeadConfig`."""

    predicts_next: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class DSparkSettings(BlockSettings):
    """The settings of a new head of DSpark; see also `BlockSettings`.

    Attributes:
        markov_rank: The rank of its Markov head.
    """

    kind: Literal["dspark"] = "dspark"
    markov_rank: int = 256


class DSparkHead(BlockHead):
    """A head of DSpark, whose rows predict the next token."""

    name = "dspark"
    title = "a DSpark head"
    architecture = "Qwen3DSparkModel"
    Config, Settings, Loss = DSparkHeadConfig, DSparkSettings, DSparkLoss
    block_size = 7
