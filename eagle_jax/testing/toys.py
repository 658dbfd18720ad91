"""A target and a draft model without weights, whose logits are a function of the path.

Whole decoding loops run with them in milliseconds, and since every path has logits
of its own, a stale cache slot or a mask that shows a sibling changes the text.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from eagle_jax.interface import PromptChunk, TargetOutput


def path_code(tokens: jax.Array, positions: jax.Array) -> jax.Array:
    """Returns each token's code, its share of its path's state.

    The state of a path is the sum of its tokens' codes, modulo 2**32: it depends on
    what was seen at which position, and, like attention, not on any order of reading.

    Args:
        tokens: `[...]` int32, the tokens.
        positions: `[...]` int32, their absolute positions.

    Returns:
        The codes, `[...]` uint32, whose bits are well mixed.
    """
    code = tokens.astype(jnp.uint32) * jnp.uint32(2654435761)
    code = code + (positions.astype(jnp.uint32) + jnp.uint32(1)) * jnp.uint32(40503)
    return _mix(code)


def _mix(code: jax.Array) -> jax.Array:
    """Mixes every bit into all bits; it compiles far quicker than a PRNG."""
    for shift, factor in ((16, 2246822507), (13, 3266489909)):
        code = (code ^ (code >> shift)) * jnp.uint32(factor)
    return code ^ (code >> 16)


def path_logits(
    state: jax.Array, *, vocab_size: int, sharpness: float, seed: int
) -> jax.Array:
    """Returns the logits after paths.

    Args:
        state: `[...]` uint32, the sums of the paths' `path_code`.
        vocab_size: The number of tokens, `V`. Static.
        sharpness: The standard deviation of the logits. Static.
        seed: The model's seed: another seed is another model. Static.

    Returns:
        `[..., V]` float32, uniform with this deviation.
    """
    offset = jnp.uint32(seed * 7919 + 1) * jnp.uint32(2246822519)
    words = jnp.arange(vocab_size, dtype=jnp.uint32) * jnp.uint32(3266489917) + offset
    bits = _mix(state[..., None] ^ _mix(words))
    # The upper 24 bits: float32 holds them exactly.
    uniform = (bits >> 8).astype(jnp.float32) / 2**24
    return sharpness * 12**0.5 * (uniform - 0.5)


@struct.dataclass(kw_only=True)
class ToyCache:
    """The codes of the confirmed tokens.

    Attributes:
        codes: `[B, S]` uint32, the `path_code` of each confirmed token.
        length: `[B]` int32, the number of confirmed tokens.
    """

    codes: jax.Array
    length: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToyTarget:
    """A `Target` without weights.

    Attributes:
        vocab_size: The number of tokens, `V`.
        sharpness: The standard deviation of the logits.
        seed: The model's seed: another seed is another model.
    """

    vocab_size: int = 8
    sharpness: float = 2.0
    seed: int = 0

    def init_cache(self, batch: int, capacity: int) -> ToyCache:
        """Returns an empty cache, see `Target.init_cache`."""
        return ToyCache(
            codes=jnp.zeros((batch, capacity), jnp.uint32),
            length=jnp.zeros(batch, jnp.int32),
        )

    def forward(
        self,
        params: Any,
        tokens: jax.Array,
        positions: jax.Array,
        mask: jax.Array | None,
        cache: ToyCache,
    ) -> TargetOutput:
        """Returns each path's state as hidden state and feature."""
        codes = path_code(tokens, positions)
        if mask is None:
            mask = jnp.tri(tokens.shape[1], dtype=bool)[None]
        zero = jnp.uint32(0)
        is_cached = jnp.arange(cache.codes.shape[1]) < cache.length[:, None]
        past = jnp.where(is_cached, cache.codes, zero).sum(axis=1, dtype=jnp.uint32)
        seen = jnp.where(mask, codes[:, None, :], zero).sum(axis=2, dtype=jnp.uint32)
        state = (past[:, None] + seen)[..., None]
        return TargetOutput(hidden=state, features=state, entries=codes)

    def unembed(self, params: Any, hidden: jax.Array) -> jax.Array:
        """Returns the logits after paths, see `Target.unembed`."""
        return path_logits(
            hidden[..., 0],
            vocab_size=self.vocab_size,
            sharpness=self.sharpness,
            seed=self.seed,
        )

    def commit(
        self, cache: ToyCache, entries: jax.Array, path: jax.Array, count: jax.Array
    ) -> ToyCache:
        """Appends the codes of accepted tokens, see `Target.commit`."""
        window = jnp.take_along_axis(entries, path, axis=1)
        write = jax.vmap(functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=0))
        return ToyCache(
            codes=write(cache.codes, window, cache.length), length=cache.length + count
        )


@struct.dataclass(kw_only=True)
class ToyModelState:
    """The confirmed text, its root excluded, as one number.

    Attributes:
        total: `[B]` uint32, the sum of the confirmed tokens' codes.
        length: `[B]` int32, the number of confirmed tokens.
    """

    total: jax.Array
    length: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToyModel:
    """A `DraftModel` without weights; with a `ToyTarget`'s settings it is that target.

    Its parameters are `()`, or one number, the agreement, `[]` float32: 1 drafts with
    its own logits, 0 with unrelated ones, -1 with their opposite.

    Attributes:
        vocab_size: The number of tokens, `V`.
        sharpness: The standard deviation of the logits.
        seed: The model's seed: another seed is another model.
    """

    vocab_size: int = 8
    sharpness: float = 2.0
    seed: int = 0

    @property
    def max_levels(self) -> int | None:
        """See `DraftModel.max_levels`."""
        return None

    def init_state(self, batch: int, capacity: int, depth: int) -> ToyModelState:
        """Returns the state of an empty text, see `DraftModel.init_state`."""
        return ToyModelState(
            total=jnp.zeros(batch, jnp.uint32), length=jnp.zeros(batch, jnp.int32)
        )

    def prefill_chunk(
        self, params: Any, state: ToyModelState, chunk: PromptChunk
    ) -> ToyModelState:
        """Reads a chunk of the prompts, see `DraftModel.prefill_chunk`."""
        return self.advance(state, chunk.tokens, chunk.features, chunk.count)

    def advance(
        self,
        state: ToyModelState,
        tokens: jax.Array,
        features: jax.Array,
        count: jax.Array,
    ) -> ToyModelState:
        """Adds the first `count` of some tokens to the text."""
        steps = jnp.arange(tokens.shape[1])
        codes = path_code(tokens, state.length[:, None] + steps)
        codes = jnp.where(steps < count[:, None], codes, jnp.uint32(0))
        total = state.total + codes.sum(axis=1, dtype=jnp.uint32)
        return ToyModelState(total=total, length=state.length + count)

    def read(
        self, params: Any, state: ToyModelState, root: jax.Array
    ) -> tuple[jax.Array, ToyModelState]:
        """Returns the state of the path to the root, and of the text before it."""
        return (state.total + path_code(root, state.length))[:, None], state

    def step(
        self,
        params: Any,
        state: ToyModelState,
        tokens: jax.Array,
        above: jax.Array,
        visible: jax.Array,
        earlier: Any,
        *,
        level: int,
    ) -> tuple[jax.Array, Any]:
        """Returns the states of the paths to some nodes, see `DraftModel.step`."""
        positions = state.length[:, None] + jnp.full_like(tokens, level)
        return above + path_code(tokens, positions)[..., None], ()

    def logits(self, params: Any, outputs: jax.Array, *, level: int) -> jax.Array:
        """Returns the logits after paths, see `DraftModel.logits`."""
        logits = functools.partial(
            path_logits,
            outputs[..., 0],
            vocab_size=self.vocab_size,
            sharpness=self.sharpness,
        )
        own = logits(seed=self.seed)
        if isinstance(params, tuple):
            return own
        return params * own + (1 - jnp.abs(params)) * logits(seed=self.seed + 1)

    def tokens(self, params: Any, choices: jax.Array) -> jax.Array:
        """Returns the choices: the model knows every token."""
        return choices
