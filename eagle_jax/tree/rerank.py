"""The reranking phase: keeps the best of all candidates (EAGLE-2, section 4.2)."""

import chex
import jax
import jax.numpy as jnp

from eagle_jax.tree.expand import RankBy
from eagle_jax.tree.structure import (
    NO_PARENT,
    ROOT,
    Candidates,
    DraftTree,
    ancestor_mask,
    make_tree,
)


def rerank(
    candidates: Candidates,
    root_token: jax.Array,
    *,
    num_nodes: int,
    rank_by: RankBy = "value",
    use_rerank: bool = True,
) -> DraftTree:
    """Keeps the best candidates of all levels and joins them to the root.

    A path is never worth more than its prefix, candidates are stored level by
    level, and `jax.lax.top_k` resolves ties towards the lower index; so with
    values the selection is closed under parents: what is kept is a tree. The tie
    rule matters, since a child ties its parent when its log probability is 0.

    >>> candidates = Candidates(
    ...     tokens=jnp.array([5, 7, 8, 9]),
    ...     parents=jnp.array([NO_PARENT, NO_PARENT, 0, 1]),
    ...     log_values=jnp.log(jnp.array([0.6, 0.4, 0.5, 0.1])),
    ...     log_confidences=jnp.log(jnp.array([0.6, 0.4, 0.8, 0.2])),
    ...     is_expanded=jnp.array([True, True, False, False]),
    ... )
    >>> tree = rerank(candidates, jnp.array(2), num_nodes=4)
    >>> tree.tokens
    Array([2, 5, 7, 8], dtype=int32)
    >>> tree.parents
    Array([-1,  0,  0,  1], dtype=int32)

    Args:
        candidates: All `C` candidates of the expansion.
        root_token: `[]` int32, the last emitted token.
        num_nodes: The number of nodes, root included, `N`. Static. Where fewer
            candidates exist, the rest is padding.
        rank_by: Whether the path's value (the paper) or the last step's confidence
            alone ranks nodes (Table 3, "w/o value"). By confidence a node can be kept
            without its parent; such orphans are dropped and padded. Static.
        use_rerank: Whether to rerank, or else to keep the best `K` of every level,
            level by level, until the tree is full (Table 3, "w/o reranking"). Static.

    Returns:
        A tree of exactly `N` nodes in level order, parents before children.
    """
    (num_candidates,) = candidates.tokens.shape
    chex.assert_shape(root_token, ())
    if use_rerank:
        scores = (
            candidates.log_values if rank_by == "value" else candidates.log_confidences
        )
    else:
        # Equal scores: top_k then keeps the lowest indices, that is level order.
        scores = jnp.where(candidates.is_expanded, jnp.float32(0), -jnp.inf)

    num_kept = min(num_nodes - 1, num_candidates)
    best_scores, kept = jax.lax.top_k(scores, num_kept)
    # Level order again, with what does not exist moved after the last candidate.
    kept = jnp.sort(jnp.where(best_scores > -jnp.inf, kept, num_candidates))
    kept = jnp.pad(
        kept, (0, num_nodes - 1 - num_kept), constant_values=num_candidates
    ).astype(jnp.int32)
    is_kept = kept < num_candidates

    # Renumber parents from candidates to nodes; ROOT stands for "not kept".
    nodes = jnp.arange(1, num_nodes, dtype=jnp.int32)
    node_of = jnp.full(num_candidates, ROOT, jnp.int32).at[kept].set(nodes, mode="drop")
    source = jnp.minimum(kept, num_candidates - 1)
    old_parents = candidates.parents[source]
    is_first_level = old_parents == NO_PARENT
    parents = jnp.where(is_first_level, ROOT, node_of[jnp.maximum(old_parents, 0)])
    is_orphan = ~is_first_level & (parents == ROOT)
    parents = jnp.where(is_kept & ~is_orphan, parents, NO_PARENT)
    tree = DraftTree(
        tokens=_after_root(root_token, candidates.tokens[source]),
        parents=_after_root(NO_PARENT, parents),
        log_values=_after_root(0.0, candidates.log_values[source]),
        is_node=_after_root(True, is_kept),
    )
    return drop_unconnected(tree)


def _after_root(root: jax.Array | float, rest: jax.Array) -> jax.Array:
    """Returns the other nodes' entries after the root's."""
    return jnp.concatenate([jnp.full(1, root, rest.dtype), rest])


def drop_unconnected(tree: DraftTree) -> DraftTree:
    """Turns nodes that no path joins to the root into padding."""
    is_node = tree.is_node & ancestor_mask(tree.parents)[:, ROOT]
    return make_tree(tree.tokens, tree.parents, tree.log_values, is_node)
