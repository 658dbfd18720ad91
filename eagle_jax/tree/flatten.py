"""Flattening: a tree as the sequence that a transformer reads in one call."""

import jax

from eagle_jax.tree.structure import DraftTree, ancestor_mask


def flatten(tree: DraftTree, length: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Lays the tree out as one sequence (EAGLE-2, section 4.2 and figure 7).

    Tokens of different branches must not see each other, so the causal mask gives
    way to the ancestor mask, and positions count depth, not index.

    Args:
        tree: A tree of `N` nodes.
        length: `[]` int32, tokens already in the target's cache: the position of
            the root.

    Returns:
        The positions and the mask of the verification call, whose tokens are the
        tree's: `[N]` int32, the root's absolute position plus the depth; and `[N, N]`
        bool, true where the second node is the first or its ancestor.
    """
    mask = ancestor_mask(tree.parents)
    depths = mask.sum(axis=1, dtype=length.dtype) - 1
    return length + depths, mask
