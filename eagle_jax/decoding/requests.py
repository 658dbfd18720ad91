"""Requests as arrays: every value here is traced, never static."""

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from flax import struct

from eagle_jax.config import DRAWS, require
from eagle_jax.errors import InputError
from eagle_jax.interface.prefill import PREFILL_CHUNK
from eagle_jax.prng import make_key, own_keys
from eagle_jax.processors import (
    NO_TOKEN,
    ProcessorConfig,
    Processors,
    make_processors,
)
from eagle_jax.sampling import SamplingParams

_STOP_TOKEN_BUCKET = 8
_SLOT_BUCKET = 64
_INT32_MAX = 2**31 - 1


@struct.dataclass(kw_only=True)
class RowSettings:
    """The settings of a batch's rows, which hold from their first token to their last.

    Attributes:
        prompt_lengths: `[B]` int32, tokens of each prompt, at least 1.
        max_new_tokens: `[B]` int32, tokens to generate at most, at least 1.
        max_length: `[B]` int32, tokens of prompt and output at most, more than the
            prompt's.
        stop_tokens: `[B, Z]` int32, tokens that end a text, padded with `NO_TOKEN`.
        sampling: The settings of sampling, `[B]` fields.
        keys: `[B]` PRNG keys; a row's text depends on its own key alone. Those of
            another implementation are taken as `eagle_jax.prng.own_keys` says.
        processors: The settings of processors, `[B]` fields; `None` without any.
    """

    prompt_lengths: jax.Array
    max_new_tokens: jax.Array
    max_length: jax.Array
    stop_tokens: jax.Array
    sampling: SamplingParams
    keys: jax.Array
    processors: Processors | None = None


@struct.dataclass(kw_only=True)
class Requests(RowSettings):
    """A batch of requests: prompts and the settings of their rows.

    Attributes:
        prompts: `[B, T]` int32, the prompts' tokens, padded at the end with 0.
    """

    prompts: jax.Array

    def settings(self) -> RowSettings:
        """Returns all but the prompts, so that one program serves any `T`."""
        names = [field.name for field in dataclasses.fields(RowSettings)]
        settings = RowSettings(**{name: getattr(self, name) for name in names})
        return dataclasses.replace(settings, keys=own_keys(self.keys))


def make_requests(
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int | Sequence[int],
    max_length: int | Sequence[int] | None = None,
    stop_tokens: int | Sequence[int] | Sequence[Sequence[int]] = (),
    temperature: float | Sequence[float] = 0.0,
    top_p: float | Sequence[float] = 1.0,
    top_k: int | Sequence[int] = 0,
    min_p: float | Sequence[float] = 0.0,
    seeds: int | Sequence[int] = 0,
    processors: ProcessorConfig | Sequence[ProcessorConfig] | None = None,
    processor_room: ProcessorConfig | None = None,
    prompt_bucket: int | None = None,
    vocab_size: int | None = None,
) -> Requests:
    """Checks requests and pads them to the bucket that a compilation serves.

    Args:
        prompts: The prompts, `B` lists of token ids.
        max_new_tokens: The tokens to generate at most; this and the numbers below are
            one per request, or one for all.
        max_length: The tokens of prompt and output at most; `None` for what the
            request needs.
        stop_tokens: The token or tokens of which any ends a text, and belongs to it;
            or a list of these for each request.
        temperature: The divisor of the logits, or 0 for the most likely token.
        top_p: The mass of the most likely tokens to keep, in (0, 1]; 1 keeps all.
        top_k: The number of most likely tokens to keep; 0 or -1 keeps all.
        min_p: The least probability to keep, relative to the most likely token's, in
            [0, 1]; 0 keeps all.
        seeds: The seeds; rows with different ones draw independently, equal ones draw
            equal noise.
        processors: The penalties, biases and bans of each request, or of all.
        processor_room: Settings whose kinds and sizes the requests get arrays for,
            whether or not they ask for them, so that they share programs, and slots of
            one state; `None` for those of the requests alone.
        prompt_bucket: The padded length of the prompts, `T`; `None` for
            `bucket_prompt` of the longest.
        vocab_size: The number of tokens the target knows, `V`, which ids are below;
            `None` where it is not known.

    Returns:
        The requests, for `generate`.

    Raises:
        InputError: If a prompt is empty, leaves no room for a token or holds what is
            no id, or a value lies outside its range.
    """
    if not prompts:
        raise InputError("no prompts were given; at least one is needed")
    batch = len(prompts)
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    new_tokens = _per_row(max_new_tokens, batch, np.int32, "max_new_tokens")
    fewest = new_tokens.min()
    require(fewest >= 1, "max_new_tokens", fewest, "at least 1")
    limits = _longest_texts(lengths, new_tokens, max_length)
    for row, prompt in enumerate(prompts):
        most = int(limits[row])
        check_request(f"prompt {row}", prompt, max_length=most, vocab_size=vocab_size)

    return Requests(
        prompts=jnp.asarray(_pad(prompts, lengths, prompt_bucket)),
        prompt_lengths=jnp.asarray(lengths),
        max_new_tokens=jnp.asarray(new_tokens),
        max_length=jnp.asarray(limits),
        stop_tokens=jnp.asarray(_stop_tokens(stop_tokens, batch)),
        sampling=_sampling(
            batch, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p
        ),
        keys=jax.vmap(make_key)(_per_row(seeds, batch, np.uint32, "seeds")),
        processors=_make_processors(processors, processor_room, batch, vocab_size),
    )


def _sampling(batch: int, **given: object) -> SamplingParams:
    """Returns the settings by which the tokens of all rows are drawn."""
    columns = {}
    for name, values in given.items():
        read, kept = np.float64, jnp.float32
        if name == "top_k":
            read, kept = np.int32, jnp.int32
        column = _per_row(values, batch, read, name)
        for value in dict.fromkeys(column.tolist()):
            DRAWS[name].check(name, value)
        columns[name] = jnp.asarray(column, kept)
    return SamplingParams(**columns)


def _stop_tokens(given: object, batch: int) -> np.ndarray:
    """Returns the stop tokens of each request, `[B, Z]` int32."""
    rows: list[Any] = [given] * batch
    if isinstance(given, Sequence) and given and isinstance(given[0], list | tuple):
        rows = list(given)
    if len(rows) != batch:
        raise InputError(f"stop_tokens has {len(rows)} lists for {batch} prompts")
    most = max(np.size(row) for row in rows)  # One may be given alone.
    width = max(1, -(-most // _STOP_TOKEN_BUCKET)) * _STOP_TOKEN_BUCKET
    stops = np.full((batch, width), NO_TOKEN, np.int32)
    for place, row in enumerate(rows):
        if count := np.size(row):
            stops[place, :count] = _per_row(row, count, np.int32, "stop_tokens")
    return stops


def _make_processors(
    given: ProcessorConfig | Sequence[ProcessorConfig] | None,
    room: ProcessorConfig | None,
    batch: int,
    vocab_size: int | None,
) -> Processors | None:
    """Returns the processors of all rows, see `make_requests`."""
    configs = given or ProcessorConfig()
    configs = [configs] * batch if isinstance(configs, ProcessorConfig) else configs
    if len(configs) != batch:
        raise InputError(f"processors has {len(configs)} values for {batch} prompts")
    if vocab_size is not None:
        for config in configs:
            config.check_vocabulary(vocab_size)
    return make_processors(configs, room or ProcessorConfig())


def _longest_texts(
    lengths: np.ndarray, new_tokens: np.ndarray, max_length: int | Sequence[int] | None
) -> np.ndarray:
    """Returns each text's largest length, `[B]` int32."""
    limits = lengths.astype(np.int64) + new_tokens
    if max_length is not None:
        given = _per_row(max_length, len(lengths), np.int32, "max_length")
        limits = np.minimum(limits, given)
    if limits.max() > _INT32_MAX:
        raise InputError(
            f"a text of {limits.max()} tokens is longer than any cache; give a smaller "
            "max_new_tokens or max_length"
        )
    return limits.astype(np.int32)


def _pad(
    prompts: Sequence[Sequence[int]], lengths: np.ndarray, bucket: int | None
) -> np.ndarray:
    """Returns the prompts, `[B, T]` int32, padded at the end with 0."""
    longest = int(lengths.max())
    width = bucket_prompt(longest) if bucket is None else bucket
    if width < longest:
        raise InputError(
            f"prompt_bucket = {width} is smaller than a prompt of {longest} tokens"
        )
    padded = np.zeros((len(prompts), width), np.int32)
    for row, prompt in enumerate(prompts):
        padded[row, : len(prompt)] = prompt
    return padded


def check_request(
    name: str,
    prompt: Sequence[int],
    seed: int = 0,
    *,
    max_length: int,
    vocab_size: int | None,
) -> None:
    """Refuses a request as `make_requests` does, which may be long before it is made.

    An id that is no token is refused as a gather would read another row.

    Args:
        name: What an error calls the prompt.
        prompt: The prompt's token ids.
        seed: The seed of its draws.
        max_length: The tokens of prompt and output at most.
        vocab_size: The number of tokens the target knows, `V`; `None` if unknown.

    Raises:
        InputError: If the prompt is empty, leaves no room for a token or holds what is
            no id, or the seed is no uint32.
    """
    _per_row(seed, 1, np.uint32, "seeds")
    if len(prompt) == 0:
        raise InputError(f"{name} has no token; at least one is needed")
    if len(prompt) >= max_length:
        raise InputError(
            f"{name} has {len(prompt)} tokens, but prompt and output together "
            f"may have {max_length}; shorten the prompt or raise max_length"
        )
    end = _INT32_MAX if vocab_size is None else vocab_size
    for id_ in np.asarray(prompt) if isinstance(prompt, jax.Array) else prompt:
        try:
            is_id = 0 <= operator.index(id_) < end
        except TypeError:
            is_id = False
        if not is_id:
            raise InputError(
                f"{name} has the id {id_!r}; ids are whole numbers of 0 to "
                f"{end - 1}, as the target's own tokenizer gives them"
            )


def bucket_prompt(length: int) -> int:
    """Returns the padded length of a prompt.

    It is the next power of two, at least 16; above `PREFILL_CHUNK` a multiple of that,
    four or more of which lie in each octave, since padding takes memory there.

    >>> [bucket_prompt(length) for length in (1, 17, 512, 513, 4097, 100_000)]
    [16, 32, 512, 1024, 5120, 114688]
    """
    if length > PREFILL_CHUNK:
        chunks = -(-length // PREFILL_CHUNK)
        step = 1 << max(0, (chunks - 1).bit_length() - 3)
        return -(-chunks // step) * step * PREFILL_CHUNK
    return max(16, 1 << (length - 1).bit_length())


def bucket_length(length: int) -> int:
    """Returns 64, 256, 1024, ...: few lengths for a process that meets any.

    Each padded length of prompts and each size of the cache is a program of its own.

    >>> [bucket_length(length) for length in (1, 65, 256, 257, 5000)]
    [64, 256, 256, 1024, 16384]
    """
    bucket = 64
    while bucket < length:
        bucket *= 4
    return bucket


def bucket_ends(longest: int) -> list[int]:
    """Returns the least and the largest length of each padded length of prompts.

    >>> bucket_ends(100)
    [1, 64, 65, 100]

    Args:
        longest: The tokens of the longest prompt.
    """
    lengths, least = [], 1
    while least <= longest:
        most = min(bucket_length(least), longest)
        lengths += [least, most]
        least = most + 1
    return lengths


def bucket_rows(count: int) -> int:
    """Returns the rows of the smallest batch for `count`: 1, 2, 4, 8, ..."""
    return 1 << (count - 1).bit_length()


def cache_slots(requests: Requests, depth: int) -> int:
    """Returns `S`: slots for the longest of these requests.

    Args:
        requests: The requests, concrete arrays, not traced ones.
        depth: The drafter's depth, `D`; 0 without a drafter.
    """
    longest = max(int(requests.max_length.max()), requests.prompts.shape[1])
    return round_up_slots(longest, depth)


def round_up_slots(max_length: int, depth: int) -> int:
    """Returns `S`: slots for a text of this length, one round more, and rounding.

    A round writes a window of `P = D + 1` slots after each row, whatever it
    accepts; slots come in steps of 64, so that nearby limits share a compilation.

    Args:
        max_length: The tokens of prompt and output.
        depth: The drafter's depth, `D`; 0 without a drafter.
    """
    return -(-(max_length + depth + 1) // _SLOT_BUCKET) * _SLOT_BUCKET


def _per_row(values: object, batch: int, dtype: type, name: str) -> np.ndarray:
    """Returns a setting as `[B]`; a single value is repeated."""
    given = np.asarray(values)
    is_whole = np.issubdtype(dtype, np.floating) or given.dtype.kind in "iu"
    if is_whole and np.issubdtype(dtype, np.integer):
        limits = np.iinfo(dtype)
        is_whole = bool(((given >= limits.min) & (given <= limits.max)).all())
    if not is_whole or given.dtype.kind not in "iuf":
        raise InputError(f"{name} = {values} must be {np.dtype(dtype)}")
    array = given.astype(dtype)
    if array.ndim == 0:
        return np.full(batch, array, dtype)
    if array.shape != (batch,):
        raise InputError(f"{name} has {len(array)} values for {batch} prompts")
    return array
