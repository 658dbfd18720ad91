"""The expansion phase: grows the candidates level by level (EAGLE-2, section 4.1)."""

from typing import Literal

import chex
import jax
import jax.numpy as jnp
from flax import struct

from eagle_jax.tree.structure import NO_PARENT, Candidates
from eagle_jax.tree.top_k import top_k

RankBy = Literal["value", "confidence"]
"""Names of the scores that rank candidates: the path's value, or the last step's."""


@struct.dataclass(kw_only=True)
class Frontier:
    """The `K` nodes of the newest level that the drafter expands next.

    Attributes:
        tokens: `[K]` int32, the nodes' tokens.
        candidates: `[K]` int32, their indices among the candidates.
        log_values: `[K]` float32, `-inf` where there is no such node.
        parents: `[K]` int32, row of the parent in the previous frontier; 0 on
            level 1. The parent's draft output is the node's feature input.
        visible: `[K, U]` bool over all `U = level * K` nodes expanded so far,
            oldest first: ancestors and self.
    """

    tokens: jax.Array
    candidates: jax.Array
    log_values: jax.Array
    parents: jax.Array
    visible: jax.Array


def top_children(logits: jax.Array, width: int) -> tuple[jax.Array, jax.Array]:
    """Returns the `K` most likely next tokens and their log probabilities.

    Ties go to the lower token, as `jax.lax.top_k` promises. A vocabulary smaller
    than `K` is padded with children of probability zero.

    Args:
        logits: `[..., V]`, the draft's logits, of any float dtype.
        width: The number of children, `K`. Static.

    Returns:
        `[..., K]` int32 tokens and `[..., K]` float32 log probabilities, in
        descending order.
    """
    rows = logits.shape[:-1]
    # As a matrix, whose parts on several devices XLA can rank where they lie.
    logits = logits.astype(jnp.float32).reshape(-1, logits.shape[-1])
    count = min(width, logits.shape[-1])
    best, tokens = top_k(logits, count)
    # The maximum is the first of the top: no second pass over the vocabulary.
    total = jnp.exp(logits - best[:, :1]).sum(axis=-1, keepdims=True)
    # XLA may compute what it subtracts from more exactly than it stored the maximum:
    # a certain child would be worth more than its parent.
    total = jnp.maximum(total, 1.0)
    log_probs = best - best[:, :1] - jnp.log(total)
    missing = [(0, 0), (0, width - count)]
    tokens = jnp.pad(tokens.astype(jnp.int32), missing)
    log_probs = jnp.pad(log_probs, missing, constant_values=-jnp.inf)
    return tokens.reshape(*rows, width), log_probs.reshape(*rows, width)


def draw_children(
    logits: jax.Array, noise: jax.Array, width: int
) -> tuple[jax.Array, jax.Array]:
    """Draws `K` different next tokens, as if one after the other.

    With standard Gumbel noise the largest sums are draws without replacement, in
    their order (Kool et al. 2019).

    Args:
        logits: `[..., V]` float32; tokens of `-inf` are never drawn.
        noise: `[..., V]` float32; zeros take the most likely tokens.
        width: The number of children, `K`. Static.

    Returns:
        `[..., K]` int32 tokens and `[..., K]` float32 log probabilities, `-inf` where
        the distribution has no further token.
    """
    tokens, _ = top_children(logits + noise, width)
    log_probs = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens, axis=-1)
    exists = jnp.arange(width) < (logits > -jnp.inf).sum(axis=-1, keepdims=True)
    return tokens, jnp.where(exists, log_probs, -jnp.inf)


def first_level(tokens: jax.Array, log_probs: jax.Array) -> tuple[Candidates, Frontier]:
    """Opens the candidates with the root's children; all of them are expanded.

    Args:
        tokens: `[K]` int32, the root's most likely children, best first.
        log_probs: `[K]` float32, their log probabilities.

    Returns:
        Level 1 as the candidates so far, and as the frontier.
    """
    (width,) = tokens.shape
    chex.assert_shape(log_probs, (width,))
    indices = jnp.arange(width, dtype=jnp.int32)
    log_probs = _without_signed_zeros(log_probs)
    frontier = Frontier(
        tokens=tokens,
        candidates=indices,
        log_values=log_probs,
        parents=jnp.zeros(width, jnp.int32),
        visible=indices[:, None] == indices[None, :],
    )
    candidates = Candidates(
        tokens=tokens,
        parents=jnp.full(width, NO_PARENT, jnp.int32),
        log_values=log_probs,
        log_confidences=log_probs,
        is_expanded=log_probs > -jnp.inf,
    )
    return candidates, frontier


def expand(
    candidates: Candidates,
    frontier: Frontier,
    tokens: jax.Array,
    log_probs: jax.Array,
    *,
    rank_by: RankBy = "value",
) -> tuple[Candidates, Frontier]:
    """Adds the children of the frontier and chooses the next frontier.

    A child's value is its parent's value times its own confidence (EAGLE-2,
    section 4.1). Only the newest level competes for expansion, never an older one.

    Args:
        candidates: The candidates of all levels so far.
        frontier: The `K` nodes of the newest level that were expanded.
        tokens: `[K, K]` int32, the most likely children of each, best first.
        log_probs: `[K, K]` float32, their log probabilities.
        rank_by: Whether the path's value or the last step's confidence ranks nodes
            (Table 3, "w/o value"). Static.

    Returns:
        The candidates with the next level, and its `K` best nodes.
    """
    width = frontier.tokens.shape[0]
    chex.assert_shape([tokens, log_probs], (width, width))
    log_probs = _without_signed_zeros(log_probs)
    log_values = (frontier.log_values[:, None] + log_probs).reshape(-1)
    # Children of nodes that do not exist do not exist either, whatever they score.
    log_confidences = jnp.where(log_values > -jnp.inf, log_probs.reshape(-1), -jnp.inf)
    scores = log_values if rank_by == "value" else log_confidences
    best_scores, best = jax.lax.top_k(scores, width)
    best = best.astype(jnp.int32)
    parents = best // width
    self_visible = jnp.eye(width, dtype=bool)
    next_frontier = Frontier(
        tokens=tokens.reshape(-1)[best],
        candidates=len(candidates.tokens) + best,
        log_values=log_values[best],
        parents=parents,
        visible=jnp.concatenate([frontier.visible[parents], self_visible], axis=1),
    )
    children = Candidates(
        tokens=tokens.reshape(-1),
        parents=jnp.repeat(frontier.candidates, width),
        log_values=log_values,
        log_confidences=log_confidences,
        is_expanded=jnp.zeros(width**2, bool).at[best].set(best_scores > -jnp.inf),
    )
    candidates = jax.tree.map(
        lambda *levels: jnp.concatenate(levels), candidates, children
    )
    return candidates, next_frontier


def _without_signed_zeros(x: jax.Array) -> jax.Array:
    """Returns `x` with +0.0 for -0.0.

    `jax.lax.top_k` ranks +0.0 higher: a certain child would beat its parent. Adding
    0.0 would do too, but compilers drop it.
    """
    return jnp.where(x == 0, 0.0, x)
