"""Joining: continuations of one root as a tree, their common beginnings merged."""

import jax
import jax.numpy as jnp

from eagle_jax.tree.structure import NO_PARENT, ROOT, DraftTree, make_tree


def join(
    root: jax.Array, paths: jax.Array, exists: jax.Array, *, num_nodes: int
) -> DraftTree:
    """Returns the tree of some paths, in which siblings differ.

    A path that begins as an earlier one does shares its nodes: equal paths have equal
    logits, so nothing that the target says of either is lost.

    >>> paths = jnp.array([[4, 5], [4, 6]])
    >>> tree = join(jnp.array(9), paths, paths > 0, num_nodes=5)
    >>> tree.tokens, tree.parents
    (Array([9, 4, 5, 6, 0], dtype=int32), Array([-1,  0,  1,  1, -1], dtype=int32))

    Args:
        root: `[]` int32, the last emitted token.
        paths: `[M, D]` int32, the tokens after the root along each of `M` paths.
        exists: `[M, D]` bool, which of them are there: the first ones of each path.
        num_nodes: The number of nodes, `N`, at least 1 and as many as there may be
            after merging. Static.

    Returns:
        The tree, in level order with its padding at the end; all its nodes have the
        value 1.
    """
    num_paths, depth = paths.shape
    same = (paths[:, None] == paths[None, :]) & exists[:, None] & exists[None, :]
    shares = jnp.cumprod(same, axis=-1).astype(bool)
    # `[M, D]`: the first path that begins as this one does up to here.
    owner = jnp.argmax(shares, axis=1).astype(jnp.int32)
    is_first = exists & (owner == jnp.arange(num_paths)[:, None])
    is_node = jnp.concatenate([jnp.ones(1, bool), is_first.T.reshape(-1)])
    index = jnp.cumsum(is_node, dtype=jnp.int32) - 1
    nodes = index[1 + jnp.arange(depth) * num_paths + owner]
    above = jnp.pad(nodes, ((0, 0), (1, 0)), constant_values=ROOT)[:, :-1]
    kept = jnp.argsort(~is_node, stable=True)[:num_nodes]

    def in_levels(first: jax.Array | int, others: jax.Array) -> jax.Array:
        return jnp.append(jnp.asarray(first, jnp.int32), others.T)[kept]

    tokens, parents = in_levels(root, paths), in_levels(NO_PARENT, above)
    return make_tree(tokens, parents, 0.0, is_node[kept])
