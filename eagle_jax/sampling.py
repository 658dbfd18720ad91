"""From logits to a token: settings of a row, filters, noise, draws, distributions.

Noise is a function of the request's key and the absolute position alone, so a text
depends on neither drafts, nor rounds, nor the rest of the batch. And it is known before
the target runs: drafters use the very noise that the target's tokens are drawn with, a
coupling without communication (Daliri, Musco and Suresh 2024, arXiv 2408.07978).
"""

import jax
import jax.numpy as jnp
from flax import struct

_MAX_BITS = 0x3F800001  # One above the bits of 1.0: no probability reaches it.

# At this temperature float32 rounds the divided logits by as much as noise weighs, so
# the most likely token is certain; further down their sums would be NaN.
_LEAST_TEMPERATURE = 1e-6

# Folds that no position reaches, so that purposes never share noise.
_REJECTION = 2**32 - 1
_DRAFTING = 2**32 - 2


@struct.dataclass(kw_only=True)
class SamplingParams:
    """The settings by which a batch's tokens are drawn; one row's fields are `[]`.

    Temperature comes first, then top-p and top-k, in the order of the official EAGLE
    code, then min-p, as in transformers. Each filter keeps what is at least as likely
    as a threshold, ties included.

    Attributes:
        temperature: `[B]` float32; 0 takes the most likely token, whatever the filters.
            Those below 1e-6 count as 1e-6.
        top_p: `[B]` float32 in (0, 1]; keeps the smallest set of most likely tokens
            with this mass.
        top_k: `[B]` int32; keeps this many of the most likely tokens; 0 is off.
        min_p: `[B]` float32 in [0, 1]; keeps tokens at least this likely, relative to
            the most likely one; 0 is off.
    """

    temperature: jax.Array
    top_p: jax.Array
    top_k: jax.Array
    min_p: jax.Array

    @property
    def divisor(self) -> jax.Array:
        """`[B]` float32, what logits are divided by: 1 at temperature 0."""
        least = jnp.maximum(self.temperature, _LEAST_TEMPERATURE)
        return jnp.where(self.temperature > 0, least, 1.0)

    @property
    def any_filter(self) -> jax.Array:
        """`[]` bool, whether any row asks for a filter."""
        return jnp.any((self.top_p < 1) | (self.top_k > 0) | (self.min_p > 0))


def keep_likely(probs: jax.Array, top_p: jax.Array, top_k: jax.Array) -> jax.Array:
    """Returns which tokens top-p and top-k keep, ties at the threshold included.

    Both keep what is at least as likely as a threshold, so the order does not
    matter. A threshold is found by bisection on the bits of a float, which for
    positive floats are ordered like the floats: 30 sums instead of a sort.

    Args:
        probs: `[..., V]` float32 probabilities.
        top_p: `[...]` float32; keeps the smallest set of most likely tokens with this
            mass.
        top_k: `[...]` int32; keeps this many of the most likely tokens; 0 is off.

    Returns:
        `[..., V]` bool, true where a token is kept; some token always is.
    """
    wanted_count = jnp.where(top_k > 0, top_k, probs.shape[-1])

    def halve(
        _: jax.Array, bounds: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        low, high = bounds  # `low` keeps enough, `high` too little: mass, count.
        middle = low + (high - low) // 2
        mass, count = jax.lax.bitcast_convert_type(middle, jnp.float32)[..., None]
        by_mass = jnp.where(probs >= mass, probs, 0.0).sum(axis=-1) >= top_p
        by_count = (probs >= count).sum(axis=-1) >= wanted_count
        is_enough = jnp.stack([by_mass, by_count])
        return jnp.where(is_enough, middle, low), jnp.where(is_enough, high, middle)

    shape = (2, *probs.shape[:-1])
    start = (jnp.zeros(shape, jnp.int32), jnp.full(shape, _MAX_BITS, jnp.int32))
    low, _ = jax.lax.fori_loop(0, 30, halve, start)
    mass, count = jax.lax.bitcast_convert_type(low, jnp.float32)[..., None]
    by_mass = (top_p[..., None] >= 1) | (probs >= mass)
    return by_mass & (probs >= count)


def process_logits(
    logits: jax.Array, sampling: SamplingParams, any_filter: jax.Array | None = None
) -> jax.Array:
    """Applies temperature and filters; at temperature 0 logits stay as they are.

    Args:
        logits: `[B, ..., V]` float32, or `[..., V]` of one row.
        sampling: The settings of sampling, `[B]` fields, or `[]` of one row.
        any_filter: `[]` bool, false to skip the filters. Where this function is mapped
            over rows, give the whole batch's, or the filters run for every row. `None`
            for `sampling.any_filter`.

    Returns:
        Logits of the same shape, `-inf` where a token is filtered out.
    """
    missing = logits.ndim - 1 - sampling.temperature.ndim

    def per_node(field: jax.Array) -> jax.Array:
        return field.reshape(*field.shape, *(1,) * missing)

    rows = jax.tree.map(per_node, sampling)
    is_drawn = rows.temperature[..., None] > 0
    scaled = logits / rows.divisor[..., None]

    def filtered(scaled: jax.Array) -> jax.Array:
        probs = jax.nn.softmax(scaled)
        least = rows.min_p[..., None] * probs.max(axis=-1, keepdims=True)
        kept = keep_likely(probs, rows.top_p, rows.top_k) & (probs >= least)
        return jnp.where(kept | ~is_drawn, scaled, -jnp.inf)

    if any_filter is None:
        any_filter = sampling.any_filter
    return jax.lax.cond(any_filter, filtered, lambda scaled: scaled, scaled)


def position_noise(
    keys: jax.Array,
    positions: jax.Array,
    sampling: SamplingParams,
    vocab_size: int,
) -> jax.Array:
    """Returns the noise that the tokens at some positions are drawn with.

    Args:
        keys: `[B]` typed PRNG keys, the requests', not consumed.
        positions: `[B, P]` int32, the absolute positions of the drawn tokens.
        sampling: The settings of sampling, `[B]` fields.
        vocab_size: The number of tokens the target knows, `V`. Static.

    Returns:
        `[B, P, V]` float32, standard Gumbel; zero in rows of temperature 0.
    """

    def noise_at(key: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.gumbel(jax.random.fold_in(key, position), (vocab_size,))

    noise = jax.vmap(jax.vmap(noise_at, in_axes=(None, 0)))(keys, positions)
    return jnp.where(sampling.temperature[:, None, None] > 0, noise, 0.0)


def draw_tokens(
    logits: jax.Array,
    noise: jax.Array,
    sampling: SamplingParams,
    any_filter: jax.Array | None = None,
) -> jax.Array:
    """Draws tokens: under Gumbel noise the largest sum is a draw from the distribution.

    Args:
        logits: `[B, V]` float32, or `[V]` of one row.
        noise: The noise of `position_noise`, float32, in the shape of `logits`.
        sampling: The settings of sampling, `[B]` fields, or `[]` of one row.
        any_filter: `[]` bool, false to skip the filters, see `process_logits`.

    Returns:
        `[B]` int32, or `[]` of one row.
    """
    noisy = process_logits(logits, sampling, any_filter) + noise
    return jnp.argmax(noisy, axis=-1).astype(jnp.int32)


def choose_tokens(
    sampling: SamplingParams,
    keys: jax.Array,
    logits: jax.Array,
    positions: jax.Array,
    *,
    greedy: bool,
) -> jax.Array:
    """Chooses one token per row, as plain decoding does.

    Args:
        sampling: The settings of sampling, `[B]` fields.
        keys: `[B]` typed PRNG keys, the requests'.
        logits: `[B, V]` float32, the target's logits that the tokens are chosen by.
        positions: `[B]` int32, absolute positions of the chosen tokens.
        greedy: Whether to take the argmax and compile no sampling. Static.

    Returns:
        `[B]` int32, the tokens.
    """
    if greedy:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    noise = position_noise(keys, positions[:, None], sampling, logits.shape[-1])
    return draw_tokens(logits, noise[:, 0], sampling)


def distribution(
    logits: jax.Array, sampling: SamplingParams, any_filter: jax.Array
) -> jax.Array:
    """Returns the distribution of a row's token: `[V]` float32 probabilities.

    Args:
        logits: `[V]` float32, the target's logits that the token is chosen by.
        sampling: The settings of sampling, `[]` fields.
        any_filter: `[]` bool, false to skip the filters, see `process_logits`.
    """
    processed = process_logits(logits, sampling, any_filter)
    one_hot = jax.nn.one_hot(jnp.argmax(logits), logits.shape[0])
    return jnp.where(sampling.temperature > 0, jax.nn.softmax(processed), one_hot)


def rejection_noise(
    key: jax.Array, root_position: jax.Array, num_nodes: int, vocab_size: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the coins `[N]` and the Gumbel noise `[V]` of one verification.

    Args:
        key: The request's key, not consumed.
        root_position: `[]` int32, the root's absolute position: what a round draws
            must not depend on how many rounds came before.
        num_nodes: The number of nodes, `N`. Static.
        vocab_size: The number of tokens the target knows, `V`. Static.
    """
    key = jax.random.fold_in(jax.random.fold_in(key, _REJECTION), root_position)
    coin_key, noise_key = jax.random.split(key)
    coins = jax.random.uniform(coin_key, (num_nodes,))
    return coins, jax.random.gumbel(noise_key, (vocab_size,))


def drafting_keys(keys: jax.Array, root_positions: jax.Array) -> jax.Array:
    """Returns keys for drafts of one round, whose noise nothing else is drawn with.

    Args:
        keys: `[B]` typed PRNG keys, the requests', not consumed.
        root_positions: `[B]` int32, the roots' absolute positions.

    Returns:
        `[B]` typed PRNG keys.
    """

    def fold(key: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(key, _DRAFTING), position)

    return jax.vmap(fold)(keys, root_positions)
