"""The exact distribution of one rejection step, read off the function itself."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax import tree as trees
from tests import reference

REFUSE = 1.0  # No coin is that high, so it accepts nothing, not even certainty.

# Node 6 is padding; nodes 0, 1 and 2 have 3, 2 and 1 children, the others none.
FOREST = [-1, 0, 0, 0, 1, 1, -1, 2]
VOCAB_SIZE = 6


def forest(tokens: list[int]) -> trees.DraftTree:
    parents = jnp.array(FOREST, jnp.int32)
    is_node = (jnp.arange(8) == 0) | (parents >= 0)
    return trees.DraftTree(
        tokens=jnp.where(is_node, jnp.array(tokens, jnp.int32), 0),
        parents=parents,
        log_values=jnp.where(is_node, 0.0, -jnp.inf),
        is_node=is_node,
    )


def observed_step(
    many_steps: Callable[..., trees.Step],
    tree: trees.DraftTree,
    node: int,
    probs: jax.Array,
) -> reference.Step:
    """Reads the exact distribution of a step off the points where its decisions flip.

    `many_steps` maps a rule over rows of coins and noise. Coins are uniform, so a
    sibling's flip point is its acceptance probability. With Gumbel noise the gap
    between two flip points is a ratio of weights.
    """
    siblings = np.flatnonzero(np.array(FOREST) == node)
    where = jnp.array(node, jnp.int32)
    num_nodes = len(FOREST)

    def steps(coins: np.ndarray, noise: np.ndarray) -> trees.Step:
        return many_steps(
            tree,
            where,
            probs,
            jnp.array(coins, jnp.float32),
            jnp.array(noise, jnp.float32),
        )

    def accepts(coin: np.ndarray) -> np.ndarray:
        coins = np.full((num_nodes, num_nodes), REFUSE)
        np.fill_diagonal(coins, coin)
        return np.asarray(steps(coins, np.zeros((num_nodes, VOCAB_SIZE))).is_accepted)

    refused = np.full((VOCAB_SIZE, num_nodes), REFUSE)
    argmax = int(steps(refused, np.zeros((VOCAB_SIZE, VOCAB_SIZE))).token[0])

    def loses(handicap: np.ndarray) -> np.ndarray:
        noise = np.full((VOCAB_SIZE, VOCAB_SIZE), -np.inf)
        np.fill_diagonal(noise, handicap)
        noise[:, argmax] = 0.0
        drawn = np.asarray(steps(refused, noise).token)
        return drawn != np.arange(VOCAB_SIZE)

    chances = flip(accepts, np.zeros(num_nodes), np.full(num_nodes, REFUSE))
    gaps = flip(loses, np.zeros(VOCAB_SIZE), np.full(VOCAB_SIZE, 60.0))
    weights = np.where(loses(np.full(VOCAB_SIZE, 60.0)), 0.0, np.exp(-gaps))
    weights[argmax] = 1.0

    arrives = 1.0
    accepted = []
    for sibling in siblings:
        accepted.append(arrives * chances[sibling])
        arrives *= 1.0 - chances[sibling]
    return reference.Step(accepted, list(arrives * weights / weights.sum()))


def flip(holds, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Where `holds` stops holding, by bisection; `low` where it never does."""
    for _ in range(32):
        middle = (low + high) / 2
        is_low = holds(middle)
        low, high = np.where(is_low, middle, low), np.where(is_low, high, middle)
    return low
