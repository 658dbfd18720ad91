"""From the target's logits to a token; both decoding paths call the same code.

Noise is a function of the request's key and the absolute position alone, so a text
depends on neither drafts, nor rounds, nor the rest of the batch.
"""

import jax
import jax.numpy as jnp

from eagle_jax.decoding.requests import Requests

# Folds that no position reaches, so that purposes never share noise.
_REJECTION = 2**32 - 1
_DRAFTING = 2**32 - 2
_MAX_BITS = 0x3F800001  # One above the bits of 1.0: no probability reaches it.


def is_filtered(requests: Requests) -> jax.Array:
    """Returns `[]` bool, whether any row asks for top-p or top-k."""
    return jnp.any((requests.top_p < 1) | (requests.top_k > 0))


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


def draw_token(
    logits: jax.Array,
    key: jax.Array,
    position: jax.Array,
    temperature: jax.Array,
    top_p: jax.Array,
    top_k: jax.Array,
    is_filtered: jax.Array,
) -> jax.Array:
    """Draws the token at an absolute position; the same call gives the same token.

    Args:
        logits: `[V]` float32.
        key: The request's key, not consumed.
        position: `[]` int32, absolute position of the token that is drawn.
        temperature: `[]` float32; 0 takes the argmax.
        top_p: `[]` float32.
        top_k: `[]` int32.
        is_filtered: `[]` bool, not mapped.

    Returns:
        `[]` int32.
    """
    processed = process_logits(logits, temperature, top_p, top_k, is_filtered)
    noise = jax.random.gumbel(jax.random.fold_in(key, position), logits.shape)
    noisy = processed + jnp.where(temperature > 0, noise, 0.0)
    return jnp.argmax(noisy).astype(jnp.int32)


def target_law(
    logits: jax.Array,
    temperature: jax.Array,
    top_p: jax.Array,
    top_k: jax.Array,
    is_filtered: jax.Array,
) -> jax.Array:
    """Returns the law that a token is drawn from: `[V]` float32 probabilities."""
    processed = process_logits(logits, temperature, top_p, top_k, is_filtered)
    one_hot = jax.nn.one_hot(jnp.argmax(logits), logits.shape[0])
    return jnp.where(temperature > 0, jax.nn.softmax(processed), one_hot)


def choose_tokens(
    requests: Requests, logits: jax.Array, positions: jax.Array, *, greedy: bool
) -> jax.Array:
    """Chooses one token per row, as plain decoding does.

    Args:
        requests: `B` rows.
        logits: `[B, V]` float32.
        positions: `[B]` int32, absolute positions of the chosen tokens.
        greedy: Take the argmax and compile no sampling. Static.

    Returns:
        `[B]` int32.
    """
    if greedy:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return jax.vmap(draw_token, in_axes=(0, 0, 0, 0, 0, 0, None))(
        logits,
        requests.keys,
        positions,
        requests.temperature,
        requests.top_p,
        requests.top_k,
        is_filtered(requests),
    )


def rejection_noise(
    key: jax.Array, root_position: jax.Array, num_nodes: int, vocab_size: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the coins `[N]` and the Gumbel noise `[V]` of one verification.

    Args:
        key: The request's key, not consumed.
        root_position: `[]` int32, absolute: what a round draws must not depend on
            how many rounds came before.
        num_nodes: `N`. Static.
        vocab_size: `V`. Static.
    """
    key = jax.random.fold_in(jax.random.fold_in(key, _REJECTION), root_position)
    coin_key, noise_key = jax.random.split(key)
    coins = jax.random.uniform(coin_key, (num_nodes,))
    return coins, jax.random.gumbel(noise_key, (vocab_size,))


def drafting_keys(requests: Requests, root_positions: jax.Array) -> jax.Array:
    """Returns `[B]` keys for drafters that sample, apart from all other noise."""

    def fold(key: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(key, _DRAFTING), position)

    return jax.vmap(fold)(requests.keys, root_positions)
