"""Processors of the path: what the text so far does to the logits of the next token.

Penalties and bans change the target's logits, and so the text that every method must
give. Each node of a tree sees its own path: the row's text and the drafts above it. The
text is a part of the decoding state anyway, so all that is kept per node are the tokens
since the root.
"""

import dataclasses
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from eagle_jax.config import Range, require, setting
from eagle_jax.errors import InputError
from eagle_jax.parsing import check_type, hints_of

NO_TOKEN = -1
"""The padding of lists of tokens, which equals no token."""

MAX_NGRAM = 64
"""The longest n-grams: the offsets of each are compared one after the other."""

_LEAST_BUCKET = 4
_FACTORS = Range(2.0**-126, wanted="above 0 and finite")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessorConfig:
    """Penalties, biases and bans of one request, in the order they are applied.

    Attributes:
        logit_bias: What is added to the logits of some tokens.
        repetition_penalty: What divides positive logits and multiplies others, of
            tokens of the prompt and of the output, as in transformers.
        presence_penalty: What is subtracted from the logits of tokens of the output.
        frequency_penalty: What is subtracted as often as the output has the token.
        no_repeat_ngram_size: The number of tokens that never come twice in the same
            order, prompt included; 0 for any.
        bad_words: Sequences of tokens that the output never completes, wherever they
            begin.
        min_new_tokens: The number of generated tokens before which no stop token comes.

    Raises:
        InputError: If a value lies outside its range.
    """

    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()
    repetition_penalty: float = setting(1.0, _FACTORS)
    presence_penalty: float = setting(0.0, Range(-2, 2))
    frequency_penalty: float = setting(0.0, Range(-2, 2))
    no_repeat_ngram_size: int = setting(0, Range(0, MAX_NGRAM))
    bad_words: Sequence[Sequence[int]] = ()
    min_new_tokens: int = setting(0, Range(0, wanted="0 or more"))

    def __post_init__(self) -> None:
        """Refuses values out of range, and makes tuples, which have a hash."""
        hints = hints_of(ProcessorConfig)
        for field in dataclasses.fields(self):
            if (within := field.metadata.get("within")) is not None:
                name = field.name
                value = check_type(hints[name], getattr(self, name), name)
                within.check(name, value)
                object.__setattr__(self, name, value)
        try:
            biases = dict(self.logit_bias)
            words = tuple(_ids("bad_words", word) for word in self.bad_words)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"logit_bias = {self.logit_bias!r} must map ids to numbers, and "
                f"bad_words = {self.bad_words!r} must be lists of ids"
            ) from error
        values = [check_type(float, value, "logit_bias") for value in biases.values()]
        for value in values:
            require(abs(value) < 2.0**128, "logit_bias", value, "finite")
        require(all(words), "bad_words", words, "lists of one id or more")
        biased = zip(_ids("logit_bias", biases), values, strict=True)
        object.__setattr__(self, "logit_bias", tuple(biased))
        object.__setattr__(self, "bad_words", words)

    @property
    def is_off(self) -> bool:
        """Whether all logits stay as they are."""
        return self == ProcessorConfig()

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises InputError if an id is none of the `V` that the target knows."""
        _ids("logit_bias", dict(self.logit_bias), vocab_size)
        for word in self.bad_words:
            _ids("bad_words", word, vocab_size)


_PENALTIES = "repetition", "presence", "frequency"


@struct.dataclass(kw_only=True)
class Processors:
    """The settings of a batch's rows; what no row asks for is `None`, in no program.

    Attributes:
        repetition: `[B]` float32, the repetition penalties; 1 is off.
        presence: `[B]` float32, the presence penalties; 0 is off.
        frequency: `[B]` float32, the frequency penalties; 0 is off.
        ngram: `[B, G]` bool, true at places below the size of n-grams; none is off.
        bias_tokens: `[B, K]` int32, tokens with a bias, padded with `NO_TOKEN`.
        bias_values: `[B, K]` float32, their biases.
        bad_words: `[B, X, L]` int32, sequences of tokens, padded with `NO_TOKEN` at the
            beginning.
        min_new_tokens: `[B]` int32; 0 is off.
    """

    repetition: jax.Array | None = None
    presence: jax.Array | None = None
    frequency: jax.Array | None = None
    ngram: jax.Array | None = None
    bias_tokens: jax.Array | None = None
    bias_values: jax.Array | None = None
    bad_words: jax.Array | None = None
    min_new_tokens: jax.Array | None = None


def make_processors(
    configs: Sequence[ProcessorConfig], room: ProcessorConfig
) -> Processors | None:
    """Returns the settings of rows as arrays, `None` if none of them does anything.

    Lists are padded to powers of two, so that nearby ones share a compilation.

    Args:
        configs: The settings of the rows, `B` of them.
        room: Settings that there shall be arrays for, in these sizes, whether or not a
            row asks for them.
    """
    every = [*configs, room]
    if all(config.is_off for config in every):
        return None
    arrays = _numbers(every) | _lists(every)
    return Processors(**jax.tree.map(lambda x: jnp.asarray(x[:-1]), arrays))


def _numbers(every: Sequence[ProcessorConfig]) -> dict[str, np.ndarray | None]:
    """Returns the fields of `Processors` that are one number per row."""

    def column(name: str, dtype: type) -> np.ndarray | None:
        if all(getattr(x, name) == getattr(ProcessorConfig, name) for x in every):
            return None
        return np.array([getattr(x, name) for x in every], dtype)

    sizes = column("no_repeat_ngram_size", np.int32)
    ngram = None if sizes is None else np.arange(_bucket(sizes.max())) < sizes[:, None]
    return {
        **{name: column(f"{name}_penalty", np.float32) for name in _PENALTIES},
        "min_new_tokens": column("min_new_tokens", np.int32),
        "ngram": ngram,
    }


def _lists(every: Sequence[ProcessorConfig]) -> dict[str, np.ndarray | None]:
    """Returns the fields of `Processors` that are lists per row."""
    found: dict[str, np.ndarray | None] = {}
    if width := max(len(config.logit_bias) for config in every):
        shape = (len(every), _bucket(width))
        tokens, values = np.full(shape, NO_TOKEN, np.int32), np.zeros(shape, np.float32)
        for row, config in enumerate(every):
            for place, pair in enumerate(dict(config.logit_bias).items()):
                tokens[row, place], values[row, place] = pair
        found = {"bias_tokens": tokens, "bias_values": values}
    if width := max(len(config.bad_words) for config in every):
        longest = max(len(word) for config in every for word in config.bad_words)
        shape = (len(every), _bucket(width), _bucket(longest))
        found["bad_words"] = words = np.full(shape, NO_TOKEN, np.int32)
        for row, config in enumerate(every):
            for place, word in enumerate(config.bad_words):
                words[row, place, -len(word) :] = word
    return found


@struct.dataclass(kw_only=True)
class Text:
    """The texts up to the roots, with all that processors know of them.

    Attributes:
        settings: The settings, `[B]` fields.
        tokens: `[B, S]` int32, prompt and output.
        length: `[B]` int32, tokens of prompt and output.
        prompt_length: `[B]` int32, tokens of the prompt.
        stop_tokens: `[B, Z]` int32, padded with `NO_TOKEN`.
    """

    settings: Processors
    tokens: jax.Array
    length: jax.Array
    prompt_length: jax.Array
    stop_tokens: jax.Array


@struct.dataclass(kw_only=True)
class PathState:
    """The drafts from the root, which is not among them, to a node.

    Attributes:
        drafts: `[B, P]` int32, their tokens; undefined after `count`.
        count: `[B]` int32, how many they are.
    """

    drafts: jax.Array
    count: jax.Array

    @classmethod
    def at_roots(cls, batch: int, depth: int) -> "PathState":
        """Returns the states of `B` roots of trees of depth `D`."""
        drafts = jnp.zeros((batch, depth + 1), jnp.int32)
        return cls(drafts=drafts, count=jnp.zeros(batch, jnp.int32))


def advance(state: PathState, token: jax.Array) -> PathState:
    """Returns the state of one row after one more token, `[]` int32."""
    drafts = state.drafts.at[state.count].set(token, mode="drop")
    return PathState(drafts=drafts, count=state.count + 1)


def apply(
    text: Text, state: PathState, logits: jax.Array, places: jax.Array | None
) -> jax.Array:
    """Returns the logits of one row after a node, processed.

    What depends on the text alone is computed once for all nodes, where this is mapped
    over them.

    Args:
        text: The row's text up to the root.
        state: The path from there to the node.
        logits: `[V]` float32, or `[W]` of some tokens.
        places: `[V]` int32, where each token stands among them, `W` if it does not;
            `None` if they are those of all.
    """
    settings, size = text.settings, logits.shape[0]

    def find(tokens: jax.Array) -> jax.Array:
        """Returns the places of tokens, beyond the last for those without one."""
        known = tokens
        if places is not None:
            known = places.at[tokens].get(mode="fill", fill_value=size)
        return jnp.where(tokens == NO_TOKEN, size, known)

    if settings.bias_tokens is not None:
        biased = find(settings.bias_tokens)
        logits = logits.at[biased].add(settings.bias_values, mode="drop")
    logits = _penalize_path(text, state, logits, find)
    banned = _banned(text, state)
    if not banned:
        return logits
    return logits.at[find(jnp.concatenate(banned))].set(-jnp.inf, mode="drop")


def _penalize_path(
    text: Text,
    state: PathState,
    logits: jax.Array,
    find: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """Returns logits `[V]` with the penalties of the text, then those of the drafts."""
    settings = text.settings
    if all(getattr(settings, name) is None for name in _PENALTIES):
        return logits
    slots = jnp.arange(text.tokens.shape[0])
    is_text = slots < text.length
    is_output = is_text & (slots >= text.prompt_length)
    nowhere = jnp.zeros(logits.shape, jnp.int32)
    seen, generated = (
        nowhere.at[find(jnp.where(chosen, text.tokens, NO_TOKEN))].add(1, mode="drop")
        for chosen in (is_text, is_output)
    )
    # Few tokens have other counts at a node than at the root: the rest is shared.
    is_draft = jnp.arange(state.drafts.shape[0]) < state.count
    drafts = find(jnp.where(is_draft, state.drafts, NO_TOKEN))
    again = (drafts[:, None] == drafts).sum(axis=1)
    own, before = (x.at[drafts].get(mode="clip") for x in (logits, generated))
    changed = _penalize(settings, own, again, before + again)
    logits = _penalize(settings, logits, seen, generated)
    return logits.at[drafts].set(changed, mode="drop")


def _penalize(
    settings: Processors, logits: jax.Array, seen: jax.Array, generated: jax.Array
) -> jax.Array:
    """Returns logits `[...]` of tokens that came so often, int32 in the same shape."""
    if (factor := settings.repetition) is not None:
        changed = jnp.where(logits > 0, logits / factor, logits * factor)
        logits = jnp.where(seen > 0, changed, logits)
    if settings.presence is not None:
        logits -= jnp.where(generated > 0, settings.presence, 0.0)
    if settings.frequency is not None:
        logits -= settings.frequency * generated.astype(jnp.float32)
    return logits


def _banned(text: Text, state: PathState) -> list[jax.Array]:
    """Returns the tokens of one row that may not follow, among `NO_TOKEN`s."""
    settings, banned = text.settings, []
    length = text.length + state.count
    if settings.ngram is not None or settings.bad_words is not None:
        places = text.length + jnp.arange(state.drafts.shape[0])
        tokens = text.tokens.at[places].set(state.drafts, mode="drop")
        if settings.ngram is not None:
            banned.append(_ends_of_ngrams(settings.ngram, tokens, length))
        if settings.bad_words is not None:
            banned.append(_ends_of_words(settings.bad_words, tokens, length))
    if settings.min_new_tokens is not None:
        is_early = length - text.prompt_length < settings.min_new_tokens
        banned.append(jnp.where(is_early, text.stop_tokens, NO_TOKEN))
    return banned


def _ends_of_ngrams(
    ngram: jax.Array, tokens: jax.Array, length: jax.Array
) -> jax.Array:
    """Returns `[S]` the tokens before which the text's end has stood already.

    Args:
        ngram: `[G]` bool, as in `Processors`.
        tokens: `[S]` int32, the text, undefined after its length.
        length: `[]` int32.
    """
    slots, size = jnp.arange(tokens.shape[0]), ngram.sum()
    is_end = (slots < length) & (slots >= size - 1) & ngram[0]
    for back in range(1, ngram.shape[0]):
        is_same = jnp.roll(tokens, back) == tokens[length - back]
        is_end &= is_same | ~ngram[back]
    return jnp.where(is_end, tokens, NO_TOKEN)


def _ends_of_words(words: jax.Array, tokens: jax.Array, length: jax.Array) -> jax.Array:
    """Returns `[X]` the last tokens of those words whose others end the text.

    Args:
        words: `[X, L]` int32, as in `Processors`.
        tokens: `[S]` int32, the text, undefined after its length.
        length: `[]` int32.
    """
    places = length - words.shape[1] + 1 + jnp.arange(words.shape[1] - 1)
    # Before the text nothing equals a token.
    end = jnp.where(places >= 0, tokens[places], NO_TOKEN)
    others = words[:, :-1]
    is_complete = ((others == end) | (others == NO_TOKEN)).all(axis=1)
    return jnp.where(is_complete, words[:, -1], NO_TOKEN)


def _bucket(size: int) -> int:
    return max(_LEAST_BUCKET, 1 << (int(size) - 1).bit_length())


def _ids(name: str, tokens: Iterable[int], end: int = 2**31 - 1) -> tuple[int, ...]:
    """Returns ids as integers; refuses what is none of those below an end."""
    ids = tuple(operator.index(token) for token in tokens)
    for id_ in ids:
        if not 0 <= id_ < end:
            raise InputError(
                f"{name} has the id {id_}; ids are whole numbers of 0 to {end - 1}"
            )
    return ids
