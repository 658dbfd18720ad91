"""A deterministic automaton over tokens as arrays: the constraint of grammars."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

DEAD = 0
"""The state after a forbidden token; every token leads from it to itself."""

START = 1
"""The state of a text that is empty."""


@struct.dataclass(kw_only=True)
class AutomatonParams:
    """The tables of an automaton.

    Tokens that lead everywhere to the same states share a class, states that allow the
    same tokens share a mask: an automaton of 1,000 states over 128,256 tokens has a few
    hundred of each.

    Attributes:
        class_of: `[V]` int32, the class of each token.
        next_state: `[states, classes]` int32, `DEAD` where a token is forbidden.
        mask_of: `[states]` int32, the row of `masks` of each state.
        masks: `[masks, ceil(V / 32)]` uint32, a bit per token, the lowest first, set
            where it is allowed; all are in the mask of `DEAD`.
    """

    class_of: jax.Array
    next_state: jax.Array
    mask_of: jax.Array
    masks: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenAutomaton:
    """A `Constraint` whose state is one number, `[B]` int32.

    Its tables are parameters, so that automata of equal sizes share their compilations;
    `eagle_jax.constraints.grammar` makes them of regular expressions.

    Attributes:
        vocab_size: The number of tokens the target knows, `V`.
    """

    vocab_size: int

    def init_state(self, params: AutomatonParams, batch: int) -> jax.Array:
        """Returns `START` for every row, see `Constraint.init_state`."""
        return jnp.full(batch, START, jnp.int32)

    def advance(
        self, params: AutomatonParams, state: jax.Array, token: jax.Array
    ) -> jax.Array:
        """Returns the next state, see `Constraint.advance`."""
        return params.next_state[state, params.class_of[token]]

    def mask(self, params: AutomatonParams, state: jax.Array) -> jax.Array:
        """Returns the allowed tokens, see `Constraint.mask`."""
        # Bits are unpacked by arithmetic: TPUs gather a vocabulary element by element.
        words = params.masks[params.mask_of[state]]
        bits = (words[:, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
        return bits.reshape(-1)[: self.vocab_size].astype(bool)


def make_tables(next_state: np.ndarray, class_of: np.ndarray) -> AutomatonParams:
    """Returns the tables of an automaton, ready for the device.

    Sizes are rounded up to powers of two, so that automata of about one size share
    their compilations.

    Args:
        next_state: `[states, classes]` int32, whose first state is `DEAD`, which every
            class leads to itself, and whose second is `START`; a text ends in states
            that lead to `DEAD` alone, see `StopReason.DEAD_END`.
        class_of: `[V]` int32, the class of each token.
    """
    num_states, num_classes = next_state.shape
    is_allowed = next_state != DEAD
    is_allowed[DEAD] = True
    rows, mask_of = np.unique(is_allowed, axis=0, return_inverse=True)
    masks = np.zeros((_bucket(len(rows)), -(-len(class_of) // 32)), np.uint32)
    for row, allowed in enumerate(rows):
        bits = np.packbits(allowed[class_of], bitorder="little")
        masks[row].view(np.uint8)[: len(bits)] = bits
    more_states = _bucket(num_states) - num_states
    more_classes = _bucket(num_classes) - num_classes
    return AutomatonParams(
        class_of=jnp.asarray(class_of, jnp.int32),
        next_state=jnp.asarray(
            np.pad(next_state, ((0, more_states), (0, more_classes))), jnp.int32
        ),
        mask_of=jnp.asarray(np.pad(mask_of.reshape(-1), (0, more_states)), jnp.int32),
        masks=jnp.asarray(masks),
    )


def _bucket(size: int) -> int:
    return max(64, 1 << (size - 1).bit_length())
