"""Hydra's heads: like Medusa's, but each reads the tokens that were drafted before it.

Head `i` reads `[p, E(root), E(x_1), ..., E(x_i)]` side by side, where `p` says what
came before the root: the target's last hidden state, after the final norm, or (Hydra++,
"prefix-mlp") the output of one decoder layer over all of those (Hydra, sections 3 and
4). It predicts the token after `x_i`.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct

from eagle_jax.heads.medusa.model import (
    ResidualBlockParams,
    init_block,
    residual_block,
)
from eagle_jax.models.cache import KeyValues
from eagle_jax.models.layers import (
    AttentionContext,
    LayerConfig,
    LayerParams,
    decoder_layer,
    init_layer,
    rms_norm,
)
from eagle_jax.models.linear import init_matrix, linear
from eagle_jax.models.rope import rotary_tables
from eagle_jax.models.transformer import unembed
from eagle_jax.prng import own_keys


@dataclasses.dataclass(frozen=True, kw_only=True)
class HydraConfig:
    """The sizes of Hydra's heads.

    Attributes:
        num_heads: The number of heads.
        num_layers: The number of blocks of each head, the first one included.
        hidden_size: The width of the target, `E`.
        vocab_size: The number of tokens the target knows, `V`.
        layer: The sizes of the prefix layer; `None` for heads that read the target's
            hidden state itself.
    """

    num_heads: int
    hidden_size: int
    vocab_size: int
    num_layers: int = 4
    layer: LayerConfig | None = None


@struct.dataclass(kw_only=True)
class FirstBlockParams:
    """The weights of a head's first block; `i + 2` states of width `E` go in.

    Attributes:
        linear: `[(i + 2) * E, E]`, the matrix inside SiLU.
        linear_bias: `[E]`, its bias.
        residual: `[(i + 2) * E, E]`, the matrix beside it.
        residual_bias: `[E]`, its bias.
    """

    linear: jax.Array
    linear_bias: jax.Array
    residual: jax.Array
    residual_bias: jax.Array


@struct.dataclass(kw_only=True)
class HydraHeadParams:
    """The weights of one head.

    Attributes:
        first: The first block.
        blocks: The residual blocks after it, in order.
        output_head: `[E, V]`, the output head.
        output_bias: `[V]`, its bias.
    """

    first: FirstBlockParams
    blocks: tuple[ResidualBlockParams, ...]
    output_head: jax.Array
    output_bias: jax.Array


@struct.dataclass(kw_only=True)
class HydraParams:
    """The weights of all heads.

    Attributes:
        heads: The heads, that of the root's children first.
        layer: The prefix layer, with input norm; `None` for none.
        norm: `[E]`, the norm after the prefix layer; `None` for none.
    """

    heads: tuple[HydraHeadParams, ...]
    layer: LayerParams | None = None
    norm: jax.Array | None = None


def prefix(
    params: HydraParams,
    config: HydraConfig,
    hidden: jax.Array,
    positions: jax.Array,
    context: AttentionContext,
    last: jax.Array | None = None,
) -> tuple[jax.Array, KeyValues]:
    """Runs the prefix layer over hidden states of confirmed tokens.

    Args:
        params: The weights, with a prefix layer.
        config: The sizes. Static.
        hidden: `[B, T, E]`, the target's hidden states after the final norm.
        positions: `[B, T]` int32, the absolute positions of their tokens.
        context: What they see.
        last: `[B]` int32, the only state of each row whose output is wanted,
            `[B, 1, E]` then; `None` for all.

    Returns:
        The outputs `[B, T, E]`, and the keys and values of these `T`.
    """
    layer, norm = params.layer, params.norm
    assert config.layer is not None and layer is not None and norm is not None
    rotary = rotary_tables(positions, config.layer.rope, config.layer.head_dim)
    x = hidden.astype(layer.mlp_norm.dtype)
    x, entries = decoder_layer(layer, config.layer, x, rotary, context, last=last)
    return rms_norm(x, norm, config.layer.rms_norm_eps), entries


def head_logits(params: HydraHeadParams, inputs: jax.Array) -> jax.Array:
    """Returns a head's float32 logits `[..., V]`.

    Args:
        params: The head's weights.
        inputs: `[..., (i + 2) * E]`, what head `i` reads, side by side.
    """
    first = params.first
    z = inputs.astype(first.linear.dtype)
    x = linear(z, first.residual, first.residual_bias)
    x = x + jax.nn.silu(linear(z, first.linear, first.linear_bias))
    for block in params.blocks:
        x = residual_block(block, x)
    return unembed(params.output_head, x) + params.output_bias.astype(jnp.float32)


def init_params(
    key: jax.Array, config: HydraConfig, dtype: str = "float32"
) -> HydraParams:
    """Returns random weights."""
    kind, width = jnp.dtype(dtype), config.hidden_size
    layer_key, *head_keys = jax.random.split(own_keys(key), 1 + config.num_heads)

    def init_head(key: jax.Array, num_states: int) -> HydraHeadParams:
        residual_key, head_key = jax.random.split(key)
        shape = (num_states * width, width)
        return HydraHeadParams(
            first=FirstBlockParams(
                linear=jnp.zeros(shape, kind),
                linear_bias=jnp.zeros(width, kind),
                residual=init_matrix(residual_key, shape, kind),
                residual_bias=jnp.zeros(width, kind),
            ),
            blocks=(init_block(width, kind),) * (config.num_layers - 1),
            output_head=init_matrix(head_key, (width, config.vocab_size), kind),
            output_bias=jnp.zeros(config.vocab_size, kind),
        )

    layer = config.layer
    return HydraParams(
        heads=tuple(init_head(k, 2 + i) for i, k in enumerate(head_keys)),
        layer=layer and init_layer(layer_key, layer, kind, input_norm=True),
        norm=None if layer is None else jnp.ones(width, kind),
    )
