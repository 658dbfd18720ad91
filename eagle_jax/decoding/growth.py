"""Caches that grow with the text, so that a round costs what the text so far costs.

Attention over a padded cache takes as long as the capacity, not the length. So a loop
over a long text begins with a small cache, stops when a row needs more, and goes on
with a larger one: each size is a program of its own, each text meets a few.
"""

import dataclasses
import functools

import jax
import jax.core
import jax.numpy as jnp
from flax import struct
from jax.typing import ArrayLike

from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.logprobs import no_logprobs
from eagle_jax.decoding.requests import Requests, cache_slots, round_up_slots
from eagle_jax.decoding.state import DecodeState
from eagle_jax.errors import InputError

LEAST_LENGTH = 256
"""The tokens that the least cache of `bucket_sizes` has room for."""

FIRST_LENGTH = 1024
"""The tokens that a text's first cache has room for, if the text may become longer."""

_FACTOR = 4


@struct.dataclass
class Limits:
    """Where a loop over rounds returns although texts go on.

    Both are traced, so that one program serves any.

    Attributes:
        most_rounds: `[]` int32, the most rounds of the call.
        most_ended: `[]` int32, the most texts that end before it returns: with 0 it
            does so as soon as one has, and with the number of rows never.
    """

    most_rounds: ArrayLike
    most_ended: ArrayLike


def cache_sizes(requests: Requests, num_slots: int | None, *, depth: int) -> list[int]:
    """Returns the sizes that the cache of these requests takes.

    Args:
        requests: The requests, concrete arrays unless `num_slots` is given.
        num_slots: The number of slots, `S`, if it is to stay the same.
        depth: The drafter's depth, `D`; 0 without a drafter.

    Raises:
        InputError: If `num_slots` is too small for the requests.
    """
    if num_slots is None:
        longest = cache_slots(requests, depth)
        return ladder(longest, prompt=requests.prompts.shape[1], depth=depth)
    # Traced requests, inside somebody's `jax.jit`, cannot be checked.
    if not isinstance(requests.max_length, jax.core.Tracer):
        longest = max(int(requests.max_length.max()), requests.prompts.shape[1])
        if num_slots < longest + depth + 1:
            raise InputError(
                f"num_slots = {num_slots} must be at least {longest + depth + 1}: the "
                f"longest text of {longest} tokens and the {depth + 1} of one round"
            )
    return [num_slots]


def ladder(longest: int, *, prompt: int, depth: int) -> list[int]:
    """Returns the sizes that a cache takes, one after the other.

    >>> ladder(16640, prompt=512, depth=6)
    [1088, 4160, 16640]

    Args:
        longest: The slots for the longest text, as `cache_slots` returns them.
        prompt: The tokens of the padded prompts, `T`.
        depth: The drafter's depth, `D`; 0 without a drafter.
    """
    length, sizes = FIRST_LENGTH, []
    # Below half of what may be needed: for less, another program does not pay.
    while 2 * (slots := round_up_slots(length, depth)) <= longest:
        if prompt < length:
            sizes.append(slots)
        length *= _FACTOR
    return [*sizes, longest]


def bucket_sizes(longest: int, *, prompt: int, depth: int) -> list[int]:
    """Returns the sizes that a cache takes where texts of any length share programs.

    Powers of two, though prompts are padded to powers of four: attention over the slots
    that stay empty is paid in every round, and a prompt's padding once.

    >>> bucket_sizes(100, prompt=64, depth=6), bucket_sizes(3000, prompt=64, depth=6)
    ([320], [1088, 4160])

    Args:
        longest: The tokens of the longest text.
        prompt: The tokens of the padded prompts, `T`.
        depth: The drafter's depth, `D`; 0 without a drafter.
    """
    length = 1 << (max(longest, prompt, LEAST_LENGTH) - 1).bit_length()
    return ladder(round_up_slots(length, depth), prompt=prompt, depth=depth)


def capacity_ends(prompt: int, most: int) -> list[int]:
    """Returns numbers of new tokens, one for each capacity up to that of the most.

    Programs are compiled by a cache's capacity: these numbers meet all that texts of up
    to `most` new tokens need.

    >>> capacity_ends(prompt=255, most=800)
    [1, 257, 769, 800]

    Args:
        prompt: The prompt's tokens.
        most: The largest number of new tokens.
    """
    first = max(prompt, LEAST_LENGTH - 1).bit_length()
    powers = range(first, (prompt + most).bit_length())
    return [*(2**power - prompt for power in powers), most]


@functools.partial(jax.jit, static_argnames=("depth",))
def has_room(state: DecodeState, depth: int) -> jax.Array:
    """Returns whether no running row would outgrow its cache in a round, `[]` bool."""
    needed = jnp.where(state.is_running, state.lengths + depth + 1, 0)
    return needed.max() <= state.tokens.shape[1]


@functools.partial(jax.jit, static_argnames=("decoder", "num_slots"))
def grow(decoder: Decoder, state: DecodeState, *, num_slots: int) -> DecodeState:
    """Returns the same state with more room.

    This works for any target and drafter: the empty arrays that they return for the
    larger capacity are filled, from the beginning of each axis, with the given ones.

    Args:
        decoder: The decoder. Static.
        state: A state of at most `num_slots` slots.
        num_slots: The number of slots of the new state, `S`. Static.
    """
    batch, old_slots = state.tokens.shape
    more = (0, num_slots - old_slots)
    cache = decoder.target.init_cache(batch, num_slots)
    drafter_state = decoder.drafting.init_state(batch, num_slots)
    logprobs = no_logprobs(decoder.logprobs, batch, num_slots)
    return dataclasses.replace(
        state,
        tokens=jnp.pad(state.tokens, ((0, 0), more)),
        accept_lengths=jnp.pad(state.accept_lengths, ((0, 0), more)),
        target_cache=jax.tree.map(fill, cache, state.target_cache),
        drafter_state=jax.tree.map(fill, drafter_state, state.drafter_state),
        logprobs=jax.tree.map(fill, logprobs, state.logprobs),
    )


def fill(empty: jax.Array, values: jax.Array) -> jax.Array:
    """Returns an empty array with another at the beginning of each of its axes."""
    if empty.shape == values.shape:
        return values
    return jax.lax.dynamic_update_slice(empty, values, (0,) * values.ndim)
