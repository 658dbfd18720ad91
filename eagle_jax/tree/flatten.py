"""Flattening: a tree as the sequence that a transformer reads in one call."""

import jax
from flax import struct

from eagle_jax.tree.structure import DraftTree, ancestor_mask


@struct.dataclass(kw_only=True)
class FlatTree:
    """One row of a verification call.

    Attributes:
        tokens: `[N]` int32, the nodes' tokens; 0 in padding.
        positions: `[N]` int32, the root's absolute position plus the depth.
        mask: `[N, N]` bool, true where the second node is the first or its ancestor.
    """

    tokens: jax.Array
    positions: jax.Array
    mask: jax.Array


def flatten(tree: DraftTree, length: jax.Array) -> FlatTree:
    """Lays the tree out as one sequence (EAGLE-2, section 4.2 and figure 7).

    Tokens of different branches must not see each other, so the causal mask gives
    way to the ancestor mask, and positions count depth, not index.

    Args:
        tree: A tree of `N` nodes.
        length: `[]` int32, tokens already in the target's cache: the position of
            the root.

    Returns:
        Tokens, positions and mask of the verification call.
    """
    mask = ancestor_mask(tree.parents)
    depths = mask.sum(axis=1, dtype=length.dtype) - 1
    return FlatTree(tokens=tree.tokens, positions=length + depths, mask=mask)
