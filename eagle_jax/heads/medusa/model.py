"""Medusa's heads: each predicts one position further, all from one hidden state.

Head `i` reads the target's last hidden state at position `t`, after the final norm,
and predicts token `t + 2 + i`; no head sees what another drafted (Medusa, section 3.1).
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct

from eagle_jax.models.linear import init_matrix, linear
from eagle_jax.prng import own_keys


@dataclasses.dataclass(frozen=True, kw_only=True)
class MedusaConfig:
    """The sizes of Medusa's heads.

    Attributes:
        num_heads: The number of heads.
        num_layers: The number of residual blocks of each head.
        hidden_size: The width of the target, `E`.
        vocab_size: The number of tokens the target knows, `V`.
        has_output_heads: Whether each head has an output head of its own; if not, all
            borrow the target's.
    """

    num_heads: int
    hidden_size: int
    vocab_size: int
    num_layers: int = 1
    has_output_heads: bool = True


@struct.dataclass(kw_only=True)
class ResidualBlockParams:
    """The weights of one residual block, `x + SiLU(x @ linear + linear_bias)`.

    Attributes:
        linear: `[E, E]`, the matrix.
        linear_bias: `[E]`, its bias.
    """

    linear: jax.Array
    linear_bias: jax.Array


@struct.dataclass(kw_only=True)
class MedusaHeadParams:
    """The weights of one head.

    Attributes:
        blocks: The residual blocks, in order.
        output_head: `[E, V]`, the output head; `None` for the target's.
    """

    blocks: tuple[ResidualBlockParams, ...]
    output_head: jax.Array | None = None


@struct.dataclass(kw_only=True)
class MedusaParams:
    """The weights of all heads.

    Attributes:
        heads: The heads, that of the root's children first.
    """

    heads: tuple[MedusaHeadParams, ...]


def residual_block(params: ResidualBlockParams, x: jax.Array) -> jax.Array:
    """Returns `x + SiLU(x @ linear + linear_bias)`, `[..., E]` like `x`."""
    return x + jax.nn.silu(linear(x, params.linear, params.linear_bias))


def forward(params: MedusaHeadParams, hidden: jax.Array) -> jax.Array:
    """Returns the states `[..., E]` that a head's output head reads.

    Args:
        params: The head's weights.
        hidden: `[..., E]`, the target's hidden states after the final norm.
    """
    x = hidden.astype(params.blocks[0].linear.dtype)
    for block in params.blocks:
        x = residual_block(block, x)
    return x


def init_block(width: int, dtype: jnp.dtype) -> ResidualBlockParams:
    """Returns a block that changes nothing yet, as published training begins with."""
    return ResidualBlockParams(
        linear=jnp.zeros((width, width), dtype), linear_bias=jnp.zeros(width, dtype)
    )


def init_params(
    key: jax.Array, config: MedusaConfig, dtype: str = "float32"
) -> MedusaParams:
    """Returns heads whose blocks change nothing, with random output heads."""
    kind, shape = jnp.dtype(dtype), (config.hidden_size, config.vocab_size)
    has_own = config.has_output_heads
    heads = tuple(
        MedusaHeadParams(
            blocks=(init_block(config.hidden_size, kind),) * config.num_layers,
            output_head=init_matrix(head_key, shape, kind) if has_own else None,
        )
        for head_key in jax.random.split(own_keys(key), config.num_heads)
    )
    return MedusaParams(heads=heads)
