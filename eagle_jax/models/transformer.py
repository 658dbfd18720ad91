"""The decoder of Llama, Mistral, Mixtral, Qwen and Gemma, as a `Target`."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import struct

from eagle_jax.interface import TargetOutput
from eagle_jax.models import cache as kv
from eagle_jax.models.attention import capped
from eagle_jax.models.layers import (
    AttentionContext,
    LayerConfig,
    LayerParams,
    decoder_layer,
    init_layer,
    normalise,
)
from eagle_jax.models.linear import init_matrix, narrow_product, precision_of
from eagle_jax.models.quantized import Matrix, QuantizedMatrix
from eagle_jax.models.rope import RopeConfig, rotary_tables
from eagle_jax.prng import own_keys

_SLOW_ROWS = range(2, 8)
"""The rows that Eigen multiplies with a transpose in five times the time of eight."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """The sizes of a decoder.

    Attributes:
        layer: The sizes of each layer.
        num_layers: The number of layers, `L`.
        vocab_size: The number of tokens the model knows, `V`.
        tie_embeddings: Whether the output head is the embedding table.
        max_positions: The number of positions that the model was made for.
        sliding_window: The number of positions that a token sees, its own included, in
            layers with a window; `None` for no window.
        windowed_layers: The indices of the layers with a window, ascending.
        window_rope: The rotary embedding of these layers; `None` for that of all.
        embedding_scale: The factor of embeddings on their way in (Gemma); heads borrow
            the table without it.
        logit_cap: The bound that logits bend towards (Gemma 2); `None` for none.
        feature_layers: The indices of the layers whose inputs are the features that
            drafters read, side by side (EAGLE-3); `()` for the last hidden state
            (EAGLE-1/2).
    """

    layer: LayerConfig
    num_layers: int
    vocab_size: int
    max_positions: int
    tie_embeddings: bool = False
    sliding_window: int | None = None
    windowed_layers: tuple[int, ...] = ()
    window_rope: RopeConfig | None = None
    embedding_scale: float = 1.0
    logit_cap: float | None = None
    feature_layers: tuple[int, ...] = ()

    @property
    def feature_size(self) -> int:
        """The width of the features that drafters read, `F`."""
        return self.layer.hidden_size * max(len(self.feature_layers), 1)


class Tables(Protocol):
    """The two arrays that a head borrows from its target, in any pytree."""

    @property
    def embedding(self) -> jax.Array:
        """The embedding table, `[V, E]`."""
        ...

    @property
    def output_head(self) -> jax.Array | None:
        """The output head `[E, V]`; `None` where it is the embedding's transpose."""
        ...


@struct.dataclass(kw_only=True)
class TransformerParams:
    """The weights of a decoder.

    Attributes:
        embedding: `[V, E]`, the embedding table.
        layers: The weights of the `L` layers.
        norm: `[E]`, the final norm.
        output_head: `[E, V]`, the output head; `None` where it is the embedding's
            transpose.
    """

    embedding: jax.Array
    layers: tuple[LayerParams, ...]
    norm: jax.Array
    output_head: jax.Array | None = None


def nearest(mask: jax.Array, window: int) -> jax.Array:
    """Returns the part of a mask that a sliding window leaves.

    Among new tokens, a token sees its path from the confirmed text to itself, in order
    and one position apart, wherever in the tree the nodes lie. So a window counts from
    the end of that path.

    Args:
        mask: `[B, T, U]` bool, true where a token sees a new one.
        window: The number of positions that a token sees, its own included. Static.
    """
    distance = jnp.cumsum(mask[..., ::-1], axis=-1, dtype=jnp.int32)[..., ::-1]
    return mask & (distance <= window)


def causal_mask(batch: int, num_tokens: int) -> jax.Array:
    """Returns a mask `[B, T, T]` bool: each token sees itself and those before it."""
    mask = jnp.tri(num_tokens, dtype=bool)
    return jnp.broadcast_to(mask, (batch, num_tokens, num_tokens))


def unembed(
    output_head: Matrix, hidden: jax.Array, cap: float | None = None
) -> jax.Array:
    """Returns float32 logits `[..., V]` of hidden states `[..., E]`.

    Args:
        output_head: `[E, V]`, the output head.
        hidden: `[..., E]`, hidden states after the final norm.
        cap: The bound that logits bend towards; `None` for none. Static.
    """
    if isinstance(output_head, QuantizedMatrix):
        return capped(narrow_product(hidden, output_head), cap)
    logits = jnp.matmul(
        hidden,
        output_head,
        precision=precision_of(hidden),
        preferred_element_type=jnp.float32,
    )
    return capped(logits, cap)


@functools.cache
def unembed_with(cap: float | None) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Returns `unembed` with a bound, one function each: programs know it by that."""
    return unembed if cap is None else functools.partial(unembed, cap=cap)


def init_params(
    key: jax.Array, config: TransformerConfig, dtype: str = "float32"
) -> TransformerParams:
    """Returns random weights, for tests and for timing sizes without weights."""
    kind = jnp.dtype(dtype)
    embedding_key, head_key, *layer_keys = jax.random.split(
        own_keys(key), 2 + config.num_layers
    )
    shape = (config.vocab_size, config.layer.hidden_size)
    return TransformerParams(
        embedding=init_matrix(embedding_key, shape, kind),
        layers=tuple(
            init_layer(k, config.layer, kind, input_norm=True) for k in layer_keys
        ),
        norm=jnp.full(shape[1], 1 - config.layer.norm_offset, kind),
        output_head=(
            None if config.tie_embeddings else init_matrix(head_key, shape[::-1], kind)
        ),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transformer:
    """A decoder behind the `Target` protocol.

    Attributes:
        config: The decoder's sizes.
        dtype: The type of the cache, which is that of the weights.
    """

    config: TransformerConfig
    dtype: str = "float32"

    @property
    def vocab_size(self) -> int:
        """The number of tokens the model knows, `V`."""
        return self.config.vocab_size

    def init_cache(self, batch: int, capacity: int) -> kv.KVCache:
        """See `Target.init_cache`."""
        return kv.init_cache(
            num_layers=self.config.num_layers,
            batch=batch,
            num_kv_heads=self.config.layer.num_kv_heads,
            capacity=capacity,
            head_dim=self.config.layer.head_dim,
            dtype=jnp.dtype(self.dtype),
        )

    def forward(
        self,
        params: TransformerParams,
        tokens: jax.Array,
        positions: jax.Array,
        mask: jax.Array | None,
        cache: kv.KVCache,
        earlier: tuple[kv.KeyValues, ...] | None = None,
    ) -> TargetOutput:
        """See `Target.forward`, and for `earlier` `DraftingTarget.forward_after`."""
        config = self.config
        if mask is None:
            mask = causal_mask(*tokens.shape)
        rotary = rotary_tables(positions, config.layer.rope, config.layer.head_dim)
        near, first, near_rotary = mask, None, rotary
        if config.window_rope is not None:
            near_rotary = rotary_tables(
                positions, config.window_rope, config.layer.head_dim
            )
        if config.sliding_window is not None:
            near = nearest(mask, config.sliding_window)
            first = positions - config.sliding_window + 1
        x = params.embedding[tokens]
        if config.embedding_scale != 1:
            x = x * jnp.asarray(config.embedding_scale, x.dtype)
        entries: list[kv.KeyValues] = []
        inputs: list[jax.Array] = []
        before = earlier or (None,) * config.num_layers
        for number, layer in enumerate(params.layers):
            if number in config.feature_layers:
                inputs.append(x)
            is_windowed = number in config.windowed_layers
            context = AttentionContext(
                cached=cache.layers[number],
                length=cache.length,
                mask=near if is_windowed else mask,
                earlier=before[number],
                first=first if is_windowed else None,
            )
            tables = near_rotary if is_windowed else rotary
            x, new = decoder_layer(layer, config.layer, x, tables, context)
            entries.append(new)
        hidden = normalise(config.layer, x, params.norm)
        features = jnp.concatenate(inputs, axis=-1) if inputs else hidden
        return TargetOutput(hidden=hidden, features=features, entries=tuple(entries))

    forward_after = forward

    def unembed(self, params: TransformerParams, hidden: jax.Array) -> jax.Array:
        """See `Target.unembed`."""
        return unembed_by(params, hidden, self.config.logit_cap)

    def commit(
        self, cache: kv.KVCache, entries: Any, path: jax.Array, count: jax.Array
    ) -> kv.KVCache:
        """See `Target.commit`."""
        return kv.commit(cache, entries, path, count)

    def truncate(self, state: kv.KVCache, length: jax.Array) -> kv.KVCache:
        """See `Truncating`."""
        return dataclasses.replace(state, length=length)


def output_head(tables: Tables) -> jax.Array:
    """Returns the `[E, V]` output head; inside a jitted function nothing is copied."""
    return tables.embedding.T if tables.output_head is None else tables.output_head


def unembed_by(
    tables: Tables, hidden: jax.Array, cap: float | None = None
) -> jax.Array:
    """Returns what `unembed` does, by the output head that arrays hold.

    Args:
        tables: The arrays that hold the output head.
        hidden: `[..., E]`, hidden states after the final norm.
        cap: The bound that logits bend towards; `None` for none. Static.
    """
    table, rows = output_head(tables), math.prod(hidden.shape[:-1])
    plain = functools.partial(unembed, table, cap=cap)
    if tables.output_head is not None or rows not in _SLOW_ROWS:
        return plain(hidden)

    def padded(hidden: jax.Array) -> jax.Array:
        flat = hidden.reshape(rows, -1)
        logits = plain(jnp.pad(flat, ((0, _SLOW_ROWS.stop - rows), (0, 0))))
        return logits[:rows].reshape(*hidden.shape[:-1], -1)

    return jax.lax.platform_dependent(hidden, cpu=padded, default=plain)


def output_columns(tables: Tables, tokens: jax.Array) -> jax.Array:
    """Returns the `[E, W]` columns of the output head that score some tokens.

    Args:
        tables: The arrays that hold the output head.
        tokens: `[W]` int32, the tokens.
    """
    if tables.output_head is None:
        return tables.embedding[tokens].T
    return tables.output_head[:, tokens]
