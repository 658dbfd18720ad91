"""The feed-forward part of a layer: gated, or a sparse mixture of gated ones."""

import jax
import jax.numpy as jnp
from flax import struct

from eagle_jax.models.linear import init_matrix, linear
from eagle_jax.models.quantized import Matrix


@struct.dataclass(kw_only=True)
class MlpParams:
    """Weights of a gated feed-forward layer; every matrix is `[in, out]`.

    Attributes:
        gate: `[E, intermediate]`.
        up: `[E, intermediate]`.
        down: `[intermediate, E]`.
    """

    gate: Matrix
    up: Matrix
    down: Matrix


@struct.dataclass(kw_only=True)
class MixtureParams:
    """Weights of a sparse mixture of experts (Mixtral).

    Attributes:
        router: `[E, X]`, one score per expert.
        experts: `X` feed-forward layers.
    """

    router: jax.Array
    experts: tuple[MlpParams, ...]


def feed_forward(
    params: MlpParams | MixtureParams, x: jax.Array, *, experts_per_token: int = 0
) -> jax.Array:
    """Runs the layer.

    Args:
        params: Weights.
        x: `[..., E]`, normalised.
        experts_per_token: How many experts of a mixture read each token. Static.

    Returns:
        `[..., E]`.
    """
    if isinstance(params, MlpParams):
        return _gated(params, x)
    shares = _shares(params.router, x, experts_per_token)
    total = jnp.zeros_like(x)
    for number, expert in enumerate(params.experts):
        share = shares[..., number, None]

        def add(
            total: jax.Array,
            expert: MlpParams = expert,
            share: jax.Array = share,
        ) -> jax.Array:
            # Chosen, not multiplied: an expert may overflow on what is not its own.
            return total + jnp.where(share > 0, _gated(expert, x) * share, 0)

        # Few tokens read few experts: the weights of the others are not touched. Which
        # neighbours a token has changes nothing, as it adds 0 for them.
        total = jax.lax.cond((share > 0).any(), add, lambda total: total, total)
    return total


def _gated(params: MlpParams, x: jax.Array) -> jax.Array:
    inner = jax.nn.silu(linear(x, params.gate)) * linear(x, params.up)
    return linear(inner, params.down)


def _shares(router: jax.Array, x: jax.Array, experts_per_token: int) -> jax.Array:
    """Returns each expert's weight `[..., X]`: those of the chosen ones add up to 1.

    No expert is ever full: with a capacity, what a token is told would depend on its
    neighbours in the tree.
    """
    scores = linear(x, router).astype(jnp.float32)
    best, chosen = jax.lax.top_k(scores, experts_per_token)
    # The distribution over all experts, cut to the chosen ones and scaled to 1, is that
    # over the chosen ones.
    share = jax.nn.softmax(best, axis=-1)
    is_chosen = jax.nn.one_hot(chosen, router.shape[-1], dtype=jnp.float32)
    return (share[..., None] * is_chosen).sum(-2).astype(x.dtype)


def init_mlp(
    key: jax.Array,
    width: int,
    intermediate: int,
    dtype: jnp.dtype,
    *,
    num_experts: int = 0,
) -> MlpParams | MixtureParams:
    """Returns random weights of a layer of width `E`, a mixture if it has experts."""
    if num_experts:
        router_key, *keys = jax.random.split(key, 1 + num_experts)
        return MixtureParams(
            router=init_matrix(router_key, (width, num_experts), dtype),
            experts=tuple(_init_gated(k, width, intermediate, dtype) for k in keys),
        )
    return _init_gated(key, width, intermediate, dtype)


def _init_gated(
    key: jax.Array, width: int, intermediate: int, dtype: jnp.dtype
) -> MlpParams:
    gate, up, down = jax.random.split(key, 3)
    return MlpParams(
        gate=init_matrix(gate, (width, intermediate), dtype),
        up=init_matrix(up, (width, intermediate), dtype),
        down=init_matrix(down, (intermediate, width), dtype),
    )
