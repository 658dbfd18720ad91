"""From logits to the law of a token: temperature, top-p and top-k.

The target's tokens and sampled drafts are drawn through the same functions.
"""

import jax
import jax.numpy as jnp

_MAX_BITS = 0x3F800001  # One above the bits of 1.0: no probability reaches it.


def is_filtered(top_p: jax.Array, top_k: jax.Array) -> jax.Array:
    """Returns `[]` bool, whether any row `[B]` asks for top-p or top-k."""
    return jnp.any((top_p < 1) | (top_k > 0))


def keep_likely(probs: jax.Array, top_p: jax.Array, top_k: jax.Array) -> jax.Array:
    """Returns which tokens top-p and top-k keep, ties at the threshold included.

    Both keep what is at least as likely as a threshold, so the order does not
    matter. A threshold is found by bisection on the bits of a float, which for
    positive floats are ordered like the floats: 30 sums instead of a sort.

    Args:
        probs: `[V]` float32.
        top_p: `[]` float32; the smallest set of likeliest tokens with this mass.
        top_k: `[]` int32; 0 is off.

    Returns:
        `[V]` bool; never empty.
    """
    wanted_count = jnp.where(top_k > 0, top_k, probs.shape[0])

    def halve(
        _: jax.Array, bounds: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        low, high = bounds  # `low` keeps enough, `high` too little: mass, count.
        middle = low + (high - low) // 2
        thresholds = jax.lax.bitcast_convert_type(middle, jnp.float32)
        by_mass = jnp.where(probs >= thresholds[0], probs, 0.0).sum() >= top_p
        by_count = (probs >= thresholds[1]).sum() >= wanted_count
        is_enough = jnp.stack([by_mass, by_count])
        return jnp.where(is_enough, middle, low), jnp.where(is_enough, high, middle)

    start = (jnp.zeros(2, jnp.int32), jnp.full(2, _MAX_BITS, jnp.int32))
    low, _ = jax.lax.fori_loop(0, 30, halve, start)
    thresholds = jax.lax.bitcast_convert_type(low, jnp.float32)
    by_mass = (top_p >= 1) | (probs >= thresholds[0])
    return by_mass & (probs >= thresholds[1])


def process_logits(
    logits: jax.Array,
    temperature: jax.Array,
    top_p: jax.Array,
    top_k: jax.Array,
    is_filtered: jax.Array,
) -> jax.Array:
    """Applies temperature, then top-p and top-k.

    Args:
        logits: `[V]` float32.
        temperature: `[]` float32; 0 leaves the logits as they are.
        top_p: `[]` float32.
        top_k: `[]` int32.
        is_filtered: `[]` bool, false to skip both filters; must not be mapped, or
            the filters run for everyone.

    Returns:
        `[V]` float32, `-inf` where a token is filtered out.
    """
    scaled = logits / jnp.where(temperature > 0, temperature, 1.0)

    def filtered(scaled: jax.Array) -> jax.Array:
        kept = keep_likely(jax.nn.softmax(scaled), top_p, top_k)
        return jnp.where(kept, scaled, -jnp.inf)

    return jax.lax.cond(is_filtered, filtered, lambda scaled: scaled, scaled)
