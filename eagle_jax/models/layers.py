"""The decoder layer of Llama and its kin, shared by targets and EAGLE heads.

Matrices are `[in, out]`, the transpose of what checkpoints hold. On CPUs one row takes
the same time either way, but the four to sixteen rows of a small tree take about two
thirds of what they take with `[out, in]`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import struct

from eagle_jax.models.attention import attend
from eagle_jax.models.cache import KeyValues
from eagle_jax.models.linear import init_matrix, linear
from eagle_jax.models.mlp import MixtureParams, MlpParams, feed_forward, init_mlp
from eagle_jax.models.quantized import Matrix
from eagle_jax.models.rope import RopeConfig, rotate


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """The sizes of one decoder layer.

    Attributes:
        hidden_size: The width of the model, `E`.
        intermediate_size: The width of the feed-forward layer.
        num_heads: The number of query heads, `H`.
        num_kv_heads: The number of key/value heads, `G`, a divisor of `H`.
        head_dim: The width of a head, `A`; `H * A` need not be `E`.
        rms_norm_eps: The epsilon of the norms.
        rope: The rotary embedding.
        qkv_bias: Whether q, k and v have biases (Qwen2).
        output_bias: Whether the matrix after attention has one, too.
        qk_norm: Whether each head's query and key are normalised (Qwen3).
        num_experts: The number of experts of a sparse mixture, `X`; 0 for a dense
            feed-forward layer.
        experts_per_token: The number of experts that read each token.
        expert_size: The width of an expert; 0 for `intermediate_size`.
        shares_of_all: Whether the shares of a token's experts are those among all
            experts, and do not add up to 1 (Qwen3-MoE without `norm_topk_prob`).
        activation: The function of the gate, see `mlp.ACTIVATIONS`, or `mlp.CLAMPED`.
        norm_offset: Whether norms multiply by one more than their weights (Gemma).
        output_norms: Whether what attention and the feed-forward layer add to the
            residual stream is normalised, too (Gemma).
        query_scalar: The number whose inverse root scales scores; `None` for `A`.
        score_cap: The bound that scores bend towards (Gemma 2); `None` for none.
        has_sinks: Whether each head has a score without a value (gpt-oss).
        mlp_bias: Whether the matrices of the feed-forward layer have biases, and the
            router of a mixture (gpt-oss).
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    shares_of_all: bool = False
    activation: str = "silu"
    norm_offset: bool = False
    output_norms: bool = False
    query_scalar: float | None = None
    score_cap: float | None = None
    has_sinks: bool = False
    mlp_bias: bool = False

    @property
    def plain(self) -> "LayerConfig":
        """A layer of the same sizes as Llama's: one feed-forward layer, no biases.

        Whole heads are rotated, by frequencies that files of heads can express.
        """
        sizes = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.default is dataclasses.MISSING
        }
        if self.rope.kind == "longrope" or self.rope.fraction != 1:
            sizes["rope"] = RopeConfig(theta=self.rope.theta)
        return LayerConfig(**sizes)

    @property
    def inner_size(self) -> int:
        """The inner width of the feed-forward layer, or of each expert."""
        return self.expert_size or self.intermediate_size


@struct.dataclass(kw_only=True)
class LayerParams:
    """The weights of one decoder layer; every matrix is `[in, out]`.

    Attributes:
        query: `[E, H * A]`, the matrix of q; an EAGLE-3 head's q, k and v are
            `[2 * E, ...]`. Of joined layers `[E, (H + 2 * G) * A]`, q, k and v.
        key: `[E, G * A]`, the matrix of k; `None` where `query` holds it.
        value: `[E, G * A]`, the matrix of v; `None` where `query` holds it.
        output: `[H * A, E]`, the matrix after attention.
        mlp_norm: `[E]`, the norm before the feed-forward layer.
        mlp: The feed-forward layer, or the mixture of several.
        input_norm: `[E]`, the norm before attention; `None` for none (EAGLE heads).
        query_bias: `[H * A]`, the bias of q; `None` for none. Of joined layers those
            of q, k and v.
        key_bias: `[G * A]`, the bias of k; `None` for none.
        value_bias: `[G * A]`, the bias of v; `None` for none.
        out_bias: `[E]`, the bias after attention; `None` for none.
        query_norm: `[A]`, the norm of each head's q; `None` for none.
        key_norm: `[A]`, the norm of each head's k; `None` for none.
        output_norm: `[E]`, the norm of what attention adds; `None` for none.
        mlp_output_norm: `[E]`, that of the feed-forward layer; `None` for none.
        sinks: `[H]`, the score of each head without a value; `None` for none.
    """

    query: Matrix
    key: Matrix | None
    value: Matrix | None
    output: Matrix
    mlp_norm: jax.Array
    mlp: MlpParams | MixtureParams
    input_norm: jax.Array | None = None
    query_bias: jax.Array | None = None
    key_bias: jax.Array | None = None
    value_bias: jax.Array | None = None
    out_bias: jax.Array | None = None
    query_norm: jax.Array | None = None
    key_norm: jax.Array | None = None
    output_norm: jax.Array | None = None
    mlp_output_norm: jax.Array | None = None
    sinks: jax.Array | None = None


@struct.dataclass(kw_only=True)
class AttentionContext:
    """What `T` new tokens see in one layer: the cache, and some of each other.

    Attributes:
        cached: `[B, G, S, A]`, the keys and values of the cache, read only.
        length: `[B]` int32, the number of slots in use.
        mask: `[B, T, U]` bool, true where a token sees one of `earlier` and then the
            `T` tokens themselves.
        earlier: `[B, G, U - T, A]`, the keys and values of unconfirmed tokens of
            earlier calls; `None` for none.
        first: `[B, T]` int32, the first visible slot of the cache; `None` for 0.
    """

    cached: KeyValues
    length: jax.Array
    mask: jax.Array
    earlier: KeyValues | None = None
    first: jax.Array | None = None


def take_token(values: jax.Array, places: jax.Array) -> jax.Array:
    """Returns what one token of each row has, `[B, 1, ...]` of `[B, T, ...]`.

    Args:
        values: `[B, T, ...]`.
        places: `[B]` int32, the tokens' places in their rows.
    """
    indices = jnp.expand_dims(places, tuple(range(1, values.ndim)))
    return jnp.take_along_axis(values, indices, axis=1)


def rms_norm(
    x: jax.Array, weight: jax.Array, epsilon: float, *, has_offset: bool = False
) -> jax.Array:
    """Normalises by the root mean square, in float32, then scales in `x`'s dtype.

    With an offset the factor is one more than the weight, and scales in float32: in
    bfloat16 the sum would lose what the weight says.
    """
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    if has_offset:
        return (wide * scale * (1 + weight.astype(jnp.float32))).astype(x.dtype)
    return (wide * scale).astype(x.dtype) * weight


def normalise(config: LayerConfig, x: jax.Array, weight: jax.Array) -> jax.Array:
    """Normalises by the root mean square, as layers of this kind do."""
    return rms_norm(x, weight, config.rms_norm_eps, has_offset=config.norm_offset)


@functools.partial(jax.jit, static_argnames=("config",))
def decoder_layer(
    params: LayerParams,
    config: LayerConfig,
    x: jax.Array,
    rotary: tuple[jax.Array, jax.Array],
    context: AttentionContext,
    inputs: jax.Array | None = None,
    last: jax.Array | None = None,
) -> tuple[jax.Array, KeyValues]:
    """Runs one layer over new tokens beside the cache.

    It is jitted so that layers of equal shapes are traced and lowered once, not one by
    one; the compiler puts them back into the program that calls it.

    Args:
        params: The layer's weights.
        config: The layer's sizes. Static.
        x: `[B, T, E]`, the residual stream.
        rotary: The tables of the `T` positions, from `rotary_tables`.
        context: What the new tokens see.
        inputs: `[B, T, 2 * E]`, the input of q, k and v in an EAGLE-3 head; `None` for
            `x`, normalised.
        last: `[B]` int32, the only token of each row that goes on after attention,
            `T` is 1 from there on; `None` for all. Keys and values are all tokens'.

    Returns:
        The residual stream `[B, T, E]` after the layer, and the keys and values of all
        `U` unconfirmed tokens.
    """
    query, new = project(params, config, x if inputs is None else inputs, rotary)
    mask, first = context.mask, context.first
    if context.earlier is not None:
        new = jax.tree.map(
            lambda *kv: jnp.concatenate(kv, axis=2), context.earlier, new
        )
    if last is not None:
        x, query, mask, first = jax.tree.map(
            functools.partial(take_token, places=last), (x, query, mask, first)
        )
    mixed = attend(
        query,
        context.cached,
        context.length,
        new,
        mask,
        first,
        scale=(config.query_scalar or config.head_dim) ** -0.5,
        cap=config.score_cap,
        sinks=params.sinks,
    )
    return finish(params, config, x, mixed), new


def project(
    params: LayerParams,
    config: LayerConfig,
    inputs: jax.Array,
    rotary: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, KeyValues]:
    """Returns what attention reads: queries, keys and values, rotated.

    Args:
        params: The layer's weights.
        config: The layer's sizes. Static.
        inputs: `[B, T, E]`, the residual stream, or `[B, T, 2 * E]`, what an EAGLE-3
            head's layer reads.
        rotary: The tables of the `T` positions, from `rotary_tables`.

    Returns:
        The queries `[B, T, H, A]`, and the keys and values `[B, G, T, A]`.
    """
    batch, num_tokens, _ = inputs.shape
    heads = (batch, num_tokens, -1, config.head_dim)
    if params.input_norm is not None:
        inputs = normalise(config, inputs, params.input_norm)
    query = linear(inputs, params.query, params.query_bias)
    if params.key is None or params.value is None:
        widths = config.num_heads, config.num_heads + config.num_kv_heads
        ends = [width * config.head_dim for width in widths]
        query, key, value = jnp.split(query, ends, axis=-1)
    else:
        key = linear(inputs, params.key, params.key_bias)
        value = linear(inputs, params.value, params.value_bias)
    query, key, value = (x.reshape(heads) for x in (query, key, value))
    if params.query_norm is not None and params.key_norm is not None:
        query = normalise(config, query, params.query_norm)
        key = normalise(config, key, params.key_norm)
    new = KeyValues(
        keys=rotate(key, rotary).swapaxes(1, 2), values=value.swapaxes(1, 2)
    )
    return rotate(query, rotary), new


def finish(
    params: LayerParams, config: LayerConfig, x: jax.Array, mixed: jax.Array
) -> jax.Array:
    """Returns the residual stream after a layer, `[B, T, E]`.

    Args:
        params: The layer's weights.
        config: The layer's sizes. Static.
        x: `[B, T, E]`, the residual stream before it.
        mixed: `[B, T, H * A]`, the heads' mixed values.
    """
    added = linear(mixed, params.output, params.out_bias)
    if params.output_norm is not None:
        added = normalise(config, added, params.output_norm)
    x = x + added
    added = feed_forward(
        params.mlp,
        normalise(config, x, params.mlp_norm),
        experts_per_token=config.experts_per_token,
        shares_of_all=config.shares_of_all,
        activation=config.activation,
    )
    if params.mlp_output_norm is not None:
        added = normalise(config, added, params.mlp_output_norm)
    return x + added


def init_layer(
    key: jax.Array,
    config: LayerConfig,
    dtype: jnp.dtype,
    *,
    input_norm: bool,
    input_size: int | None = None,
) -> LayerParams:
    """Returns random weights: normal with deviation 0.02, norms of one, biases zero.

    Args:
        key: The typed PRNG key of the draws.
        config: The layer's sizes.
        dtype: The type of the weights.
        input_norm: Whether the layer has an input norm.
        input_size: The width of the input of q, k and v; `None` for `E`.
    """
    width, head = config.hidden_size, config.head_dim
    read = width if input_size is None else input_size
    query_width = config.num_heads * head
    kv_width = config.num_kv_heads * head
    shapes = {
        "query": (read, query_width),
        "key": (read, kv_width),
        "value": (read, kv_width),
        "output": (query_width, width),
    }
    mlp_key, *keys = jax.random.split(key, 1 + len(shapes))
    weights = {
        name: init_matrix(k, shape, dtype)
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    norm = functools.partial(jnp.full, fill_value=1 - config.norm_offset, dtype=dtype)
    return LayerParams(
        **weights,
        mlp_norm=norm(width),
        mlp=init_mlp(
            mlp_key,
            width,
            config.inner_size,
            dtype,
            num_experts=config.num_experts,
            has_bias=config.mlp_bias,
        ),
        input_norm=norm(width) if input_norm else None,
        query_bias=jnp.zeros(query_width, dtype) if config.qkv_bias else None,
        key_bias=jnp.zeros(kv_width, dtype) if config.qkv_bias else None,
        value_bias=jnp.zeros(kv_width, dtype) if config.qkv_bias else None,
        out_bias=jnp.zeros(width, dtype) if config.output_bias else None,
        query_norm=norm(head) if config.qk_norm else None,
        key_norm=norm(head) if config.qk_norm else None,
        output_norm=norm(width) if config.output_norms else None,
        mlp_output_norm=norm(width) if config.output_norms else None,
        sinks=jnp.zeros(config.num_heads, dtype) if config.has_sinks else None,
    )
