"""Typical acceptance: every draft that is likely enough is taken (Medusa).

It is NOT LOSSLESS: the text is neither plain decoding's nor drawn from the target's
distribution.
"""

import jax
import jax.numpy as jnp

from eagle_jax.tree.structure import NO_PARENT, ROOT, DraftTree, ancestor_mask
from eagle_jax.tree.verify import Acceptance

EPSILON = 0.09
"""The largest threshold: what is more likely than this is accepted anywhere."""

DELTA = 0.3
"""The factor of `exp(-entropy)`: where the target is unsure, less is enough."""


def accept_typical(tree: DraftTree, probs: jax.Array, *, depth: int) -> Acceptance:
    """Accepts the longest path of drafts that are likely enough (Cai et al. 2024).

    A draft `x` is likely enough where `p(x) > min(EPSILON, DELTA * exp(-H(p)))`, `p`
    being the target's distribution after its parent and `H` the entropy. Of paths of
    equal length the more probable one wins, then that of the lower node. The token
    after it is the most likely one.

    Args:
        tree: A tree of `N` nodes.
        probs: `[N, V]` float32, the target's distribution after each node.
        depth: The depth of the deepest node, `D`. Static.

    Returns:
        The accepted path and the token after it.
    """
    parents = jnp.where(tree.parents == NO_PARENT, ROOT, tree.parents)
    # The published entropy, which stays finite where tokens are impossible.
    entropy = -(probs * jnp.log(probs + 1e-5)).sum(axis=-1)
    threshold = jnp.minimum(EPSILON, DELTA * jnp.exp(-entropy))
    own = probs[parents, tree.tokens]
    is_root = jnp.arange(parents.shape[0]) == ROOT
    is_likely = is_root | (tree.is_node & (own > threshold[parents]))

    sees = ancestor_mask(tree.parents)
    # Padding sees itself alone, and is not likely.
    is_accepted = (is_likely | ~sees).all(axis=1)
    levels = jnp.where(is_accepted, sees.sum(axis=1, dtype=jnp.int32) - 1, -1)
    num_accepted = levels.max()
    log_own = jnp.where(is_accepted & ~is_root, jnp.log(own), 0.0)
    sums = jnp.where(sees, log_own, 0.0).sum(axis=1)
    last = jnp.argmax(jnp.where(levels == num_accepted, sums, -jnp.inf))

    # Nodes stand in level order, so a path's nodes are those that its end sees.
    (path,) = jnp.nonzero(sees[last], size=depth + 1, fill_value=last)
    return Acceptance(
        path=path.astype(jnp.int32),
        num_accepted=num_accepted,
        next_token=jnp.argmax(probs[last]).astype(jnp.int32),
    )
