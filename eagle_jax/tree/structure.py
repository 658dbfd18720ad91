"""The two states of drafting, a pool of candidates and the tree cut from it.

A transformer reads that tree as one sequence: see `flatten`.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import ArrayLike

ROOT = 0
"""Index of the root in a `DraftTree`: the last emitted token."""

NO_PARENT = -1
"""The parent of the root, of padding nodes, and of the first level's candidates."""


@struct.dataclass(kw_only=True)
class Candidates:
    """Every node that the expansion phase drafted, level by level.

    Level 1 fills the slots `0 .. K-1`; each later level fills `K**2` slots: the
    children of the first expanded node in descending probability, then those of
    the second, and so on. A candidate with value `-inf` does not exist.

    Attributes:
        tokens: `[C]` int32, the candidates' tokens.
        parents: `[C]` int32, index of the parent candidate, always smaller than
            the candidate's own; `NO_PARENT` for children of the root.
        log_values: `[C]` float32, log of the paper's value: the product of the
            draft's confidences from the root's child to this node.
        log_confidences: `[C]` float32, log probability given the parent alone.
        is_expanded: `[C]` bool, true for the `K` best of each level.
    """

    tokens: jax.Array
    parents: jax.Array
    log_values: jax.Array
    log_confidences: jax.Array
    is_expanded: jax.Array


@struct.dataclass(kw_only=True)
class DraftTree:
    """The tree that one verification checks; node 0 is the root, parents come first.

    Depths, positions and masks are derived: see `ancestor_mask` and `flatten`.

    Attributes:
        tokens: `[N]` int32, the nodes' tokens; 0 in padding.
        parents: `[N]` int32, smaller than the node's own index; `NO_PARENT` for
            the root and for padding.
        log_values: `[N]` float32, log of the path's probability under the draft;
            0 for the root, `-inf` in padding.
        is_node: `[N]` bool, false in padding.
        draft_logits: `[N, V]` float32, the logits of the distribution that each node's
            children were drawn from, one after the other and never twice; `None` where
            children are chosen.
    """

    tokens: jax.Array
    parents: jax.Array
    log_values: jax.Array
    is_node: jax.Array
    draft_logits: jax.Array | None = None


def make_tree(
    tokens: jax.Array, parents: ArrayLike, log_values: ArrayLike, is_node: jax.Array
) -> DraftTree:
    """Returns the tree of some nodes, of which those that are none become padding.

    Args:
        tokens: `[..., N]` int32, the nodes' tokens.
        parents: `[..., N]` int32, the nodes' parents, or one for all.
        log_values: `[..., N]` float32, the logs of their values, or one for all.
        is_node: `[..., N]` bool, which of them there are.
    """
    return DraftTree(
        tokens=jnp.where(is_node, tokens, 0),
        parents=jnp.where(is_node, parents, jnp.int32(NO_PARENT)),
        log_values=jnp.where(is_node, log_values, jnp.float32(-jnp.inf)),
        is_node=is_node,
    )


def root_only(root_token: jax.Array, num_nodes: int) -> DraftTree:
    """Returns a tree without drafts: verifying it is plain decoding.

    Args:
        root_token: `[...]` int32, the last emitted token, of any number of rows.
        num_nodes: The number of nodes, `N`. Static.

    Returns:
        A tree, `[..., N]` fields, whose nodes after the root are padding.
    """
    is_root = jnp.arange(num_nodes) == ROOT
    is_node = jnp.broadcast_to(is_root, (*root_token.shape, num_nodes))
    return make_tree(root_token[..., None].astype(jnp.int32), NO_PARENT, 0.0, is_node)


def ancestor_mask(parents: jax.Array) -> jax.Array:
    """Returns which nodes each node sees: its ancestors and itself.

    This is the reflexive transitive closure of `parents`, by pointer doubling: after
    step `i` a row holds its nearest `2**i - 1` ancestors. A node without a parent
    sees itself only, so no row is empty, padding included.

    >>> ancestor_mask(jnp.array([-1, 0, 0, 1])).astype(int)
    Array([[1, 0, 0, 0],
           [1, 1, 0, 0],
           [1, 0, 1, 0],
           [1, 1, 0, 1]], dtype=int32)

    Args:
        parents: `[N]` int32, each smaller than its node's index, or `NO_PARENT`.

    Returns:
        `[N, N]` bool, true at `[i, j]` where node `j` is `i` or an ancestor of it.
    """
    (num_nodes,) = parents.shape
    nodes = jnp.arange(num_nodes, dtype=jnp.int32)
    # Pointing a parentless node at itself keeps -1 from reading the last row.
    pointer = jnp.where(parents == NO_PARENT, nodes, parents)
    mask = nodes[:, None] == nodes[None, :]
    for _ in range((num_nodes - 1).bit_length()):
        mask = mask | mask[pointer]
        pointer = pointer[pointer]
    return mask


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
