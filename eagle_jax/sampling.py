"""From logits to a token: settings of a row, filters, noise, draws, distributions.

Noise is a function of the request's key and the absolute position alone, so a text
depends on neither drafts, nor rounds, nor the rest of the batch. And it is known before
the target runs: drafters use the very noise that the target's tokens are drawn with, a
coupling without communication (Daliri, Musco and Suresh 2024, arXiv 2408.07978).
"""

import functools
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import struct

from eagle_jax.prng import gumbel, own_keys

_THRESHOLD_BITS = 30  # From this bit on a float would be 2.0, and no probability is.
_MAX_BITS_PER_PASS = 5  # 6 passes; more would save few and test many thresholds.

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
        top_k: `[B]` int32; keeps this many of the most likely tokens; 0 or -1 is off.
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

    Both keep what is at least as likely as a threshold, so the order does not matter
    and the higher threshold decides. It is searched among the bits of a float, which
    for positive floats are ordered like the floats: a few sums instead of a sort. Each
    pass tests about twice as many thresholds as there are devices that share the
    vocabulary: the more they are, the fewer elements has each, and the fewer passes,
    which wait for one all-reduce each, are left. A GPU takes as few passes as it can.

    Args:
        probs: `[..., V]` float32 probabilities.
        top_p: `[...]` float32; keeps the smallest set of most likely tokens with this
            mass.
        top_k: `[...]` int32; keeps this many of the most likely tokens; 0 or -1 is
            off.

    Returns:
        `[..., V]` bool, true where a token is kept; some token always is.
    """
    enough = _bounds(top_p, top_k, probs.shape[-1])
    bits = min(num_parts().bit_length(), _MAX_BITS_PER_PASS)
    return probs >= _threshold(probs, *enough, bits=bits)[..., None]


# Jitted so that calls of equal shapes, one per level of a tree, are traced once.
@functools.partial(jax.jit, static_argnames=("bits",))
def _threshold(
    probs: jax.Array, top_p: jax.Array, wanted: jax.Array, *, bits: int
) -> jax.Array:
    """Returns the least probability `[...]` that is kept; a pass finds some bits."""

    # `low` keeps enough and is the threshold's first bits; `shift` bits are left. What
    # it keeps beside what the next such number keeps is the threshold, once it is one
    # token.
    def cond(state: tuple[jax.Array, ...]) -> jax.Array:
        shift, _, most, least = state
        return (shift > 0) & (most - least > 1).any()

    def body(state: tuple[jax.Array, ...], bits: int) -> tuple[jax.Array, ...]:
        shift, low, most, least = state
        shift = jnp.maximum(shift - bits, 0)
        numbers = jnp.arange(1, 2**bits, dtype=jnp.int32)
        numbers = numbers.reshape(-1, *[1] * (probs.ndim - 1)) << shift
        tried = jax.lax.bitcast_convert_type(low + numbers, jnp.float32)
        mass, count = _mass_and_count(probs, probs >= tried[..., None])
        is_enough = (mass >= top_p) | (count >= wanted)
        num_enough = is_enough.sum(axis=0, dtype=jnp.int32)
        counts = jnp.concatenate([most[None], count, least[None]])
        most, least = jnp.take_along_axis(
            counts, jnp.stack([num_enough, num_enough + 1]), axis=0
        )
        return shift, low + (num_enough << shift), most, least

    def every_pass(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        bits = _MAX_BITS_PER_PASS
        passes = -(-_THRESHOLD_BITS // bits)
        return jax.lax.fori_loop(0, passes, lambda _, state: body(state, bits), state)

    def until_found(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return jax.lax.while_loop(cond, functools.partial(body, bits=bits), state)

    low = jnp.zeros(probs.shape[:-1], jnp.int32)
    every = jnp.full(low.shape, probs.shape[-1], jnp.float32)
    start = (jnp.int32(_THRESHOLD_BITS), low, every, jnp.zeros_like(every))
    _, low, _, _ = jax.lax.platform_dependent(
        start, cuda=every_pass, default=until_found
    )
    return jax.lax.bitcast_convert_type(low, jnp.float32)


def _bounds(
    top_p: jax.Array, top_k: jax.Array, vocab_size: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the mass and the number of tokens `[...]` that are enough, float32."""
    count = jnp.where(top_k > 0, top_k, vocab_size).astype(jnp.float32)
    return jnp.where(top_p < 1, top_p, jnp.inf), count


def _mass_and_count(probs: jax.Array, chosen: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns two sums over the last axis, of one type: one all-reduce takes both."""
    mass = jnp.where(chosen, probs, 0.0).sum(axis=-1)
    return mass, chosen.sum(axis=-1, dtype=jnp.float32)


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
    missing = (1,) * (logits.ndim - 1 - sampling.temperature.ndim)
    rows = jax.tree.map(lambda x: x.reshape(*x.shape, *missing), sampling)
    scaled = logits / rows.divisor[..., None]
    if any_filter is None:
        any_filter = sampling.any_filter
    return jax.lax.cond(
        any_filter, functools.partial(_filter, rows), lambda scaled: scaled, scaled
    )


def _filter(rows: SamplingParams, scaled: jax.Array) -> jax.Array:
    """Returns logits `[..., V]`, `-inf` where a filter drops the token."""
    probs = jax.nn.softmax(scaled)
    least = rows.min_p * probs.max(axis=-1)
    kept = keep_likely(probs, rows.top_p, rows.top_k) & (probs >= least[..., None])
    is_drawn = rows.temperature[..., None] > 0
    return jnp.where(kept | ~is_drawn, scaled, -jnp.inf)


def position_noise(
    keys: jax.Array,
    positions: jax.Array,
    sampling: SamplingParams,
    vocab_size: int,
) -> jax.Array:
    """Returns the noise that the tokens at some positions are drawn with.

    Args:
        keys: `[B]` PRNG keys, the requests', not consumed; see `own_keys`.
        positions: `[B, P]` int32, the absolute positions of the drawn tokens.
        sampling: The settings of sampling, `[B]` fields.
        vocab_size: The number of tokens the target knows, `V`. Static.

    Returns:
        `[B, P, V]` float32, standard Gumbel; zero in rows of temperature 0.
    """

    def noise_at(key: jax.Array, position: jax.Array) -> jax.Array:
        return gumbel(jax.random.fold_in(key, position), vocab_size)

    noise = jax.vmap(jax.vmap(noise_at, in_axes=(None, 0)))(own_keys(keys), positions)
    return jnp.where(sampling.temperature[:, None, None] > 0, noise, 0.0)


def draw_tokens(
    logits: jax.Array,
    noise: jax.Array,
    sampling: SamplingParams,
    any_filter: jax.Array | None = None,
) -> jax.Array:
    """Draws tokens: under Gumbel noise the largest sum is a draw from the distribution.

    The filters need no threshold for it, except on GPUs, which would have to wait for
    the host to learn whether it was found. The token that is drawn without them is
    tested by what is more likely; if they drop it, they drop all that is no more
    likely, and the rest is drawn from. What they keep has most of the mass as a rule,
    so that the first test is mostly the last (as in the kernels of FlashInfer, Ye et
    al. 2025, arXiv 2501.01005). The token is that of the largest sum of
    `process_logits` and noise.

    Args:
        logits: `[B, V]` float32, or `[V]` of one row.
        noise: The noise of `position_noise`, float32, in the shape of `logits`.
        sampling: The settings of sampling, `[B]` fields, or `[]` of one row.
        any_filter: `[]` bool, false to skip the filters, see `process_logits`.

    Returns:
        `[B]` int32, or `[]` of one row.
    """
    scaled = logits / sampling.divisor[..., None]
    if any_filter is None:
        any_filter = sampling.any_filter
    return jax.lax.cond(
        any_filter,
        _draw_of_kept,
        lambda scaled, noisy, _: _most_likely(noisy),
        *(scaled, scaled + noise, sampling),
    )


def _most_likely(scores: jax.Array) -> jax.Array:
    return jnp.argmax(scores, axis=-1).astype(jnp.int32)


@jax.jit  # Traced once for every walk and platform.
def _draw_of_kept(
    scaled: jax.Array, noisy: jax.Array, sampling: SamplingParams
) -> jax.Array:
    """Returns the tokens of the largest sums `noisy` that the filters keep."""
    probs = jax.nn.softmax(scaled)
    floor = sampling.min_p * probs.max(axis=-1)
    top_p, wanted = _bounds(sampling.top_p, sampling.top_k, probs.shape[-1])

    def cond(state: tuple[jax.Array, ...]) -> jax.Array:
        return ~state[-1].all()

    def body(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        _, dropped, _ = state
        token = _most_likely(jnp.where(probs > dropped[..., None], noisy, -jnp.inf))
        prob = jnp.take_along_axis(probs, token[..., None], axis=-1)
        mass, count = _mass_and_count(probs, probs > prob)
        prob = prob[..., 0]
        is_kept = (mass < top_p) & (count < wanted) & (prob >= floor)
        # Whatever the settings, the most likely token is kept, and the loop ends.
        is_kept = is_kept | (count == 0) | ~(sampling.temperature > 0)
        return token, jnp.where(is_kept, dropped, prob), is_kept

    def tested() -> jax.Array:
        shape = sampling.temperature.shape
        token = jnp.zeros(shape, jnp.int32)
        start = token, jnp.full(shape, -1.0, scaled.dtype), jnp.zeros(shape, bool)
        return jax.lax.while_loop(cond, body, start)[0]

    def thresholded() -> jax.Array:
        is_kept = _filter(sampling, scaled) > -jnp.inf
        return _most_likely(jnp.where(is_kept, noisy, -jnp.inf))

    return jax.lax.platform_dependent(cuda=thresholded, default=tested)


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
        keys: `[B]` PRNG keys, the requests'; see `own_keys`.
        logits: `[B, V]` float32, the target's logits that the tokens are chosen by.
        positions: `[B]` int32, absolute positions of the chosen tokens.
        greedy: Whether to take the argmax and compile no sampling. Static.

    Returns:
        `[B]` int32, the tokens.
    """
    if greedy:
        return _most_likely(logits)
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
    one_hot = jax.nn.one_hot(jnp.argmax(logits), logits.shape[0], dtype=jnp.float32)
    return jnp.where(sampling.temperature > 0, jax.nn.softmax(processed), one_hot)


def rejection_noise(
    key: jax.Array, root_position: jax.Array, num_nodes: int, vocab_size: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the coins `[N]` and the Gumbel noise `[V]` of one verification.

    Args:
        key: The request's key, not consumed; see `own_keys`.
        root_position: `[]` int32, the root's absolute position: what a round draws
            must not depend on how many rounds came before.
        num_nodes: The number of nodes, `N`. Static.
        vocab_size: The number of tokens the target knows, `V`. Static.
    """
    key = jax.random.fold_in(
        jax.random.fold_in(own_keys(key), _REJECTION), root_position
    )
    coin_key, noise_key = jax.random.split(key)
    coins = jax.random.uniform(coin_key, (num_nodes,), jnp.float32)
    return coins, gumbel(noise_key, vocab_size)


def drafting_keys(keys: jax.Array, root_positions: jax.Array) -> jax.Array:
    """Returns keys for drafts of one round, whose noise nothing else is drawn with.

    Args:
        keys: `[B]` PRNG keys, the requests', not consumed; see `own_keys`.
        root_positions: `[B]` int32, the roots' absolute positions.

    Returns:
        `[B]` typed PRNG keys.
    """

    def fold(key: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(key, _DRAFTING), position)

    return jax.vmap(fold)(own_keys(keys), root_positions)


def split_axes() -> Mapping[str, int]:
    """Returns the mesh axes that a row's arrays may be split over, with their sizes.

    They are those that the compiler places arrays on. A program that is traced without
    a mesh has none, whatever its arguments lie on.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return {name: mesh.shape[name] for name in mesh.auto_axes}


def num_parts() -> int:
    """Returns how many devices share the work of a row; 1 without a mesh."""
    return math.prod(split_axes().values())
