"""The algorithm of EAGLE-2 on one tree: expand, rerank, flatten, verify.

Everything here is pure, unbatched and knows no model; lift it with `jax.vmap`.

Axes, used by the whole package:

| axis | meaning | axis | meaning |
| --- | --- | --- | --- |
| `B` | requests in the batch | `N` | nodes of the tree, root included |
| `T` | tokens in one model call | `K` | width: nodes expanded per level |
| `S` | cache slots | `D` | drafted levels below the root |
| `V` | vocabulary | `C` | candidates: `K + (D - 1) * K**2` |
| `E` | model width | `H`, `G`, `A` | query heads, key/value heads, head width |
| `L` | layers | `P` | accepted path: `D + 1` nodes, root first |
"""

from eagle_jax.tree.expand import (
    Frontier,
    draw_children,
    expand,
    first_level,
    top_children,
)
from eagle_jax.tree.join import join
from eagle_jax.tree.rerank import drop_unconnected, rerank
from eagle_jax.tree.structure import (
    NO_PARENT,
    ROOT,
    Candidates,
    DraftTree,
    ancestor_mask,
    flatten,
    make_tree,
    root_only,
)
from eagle_jax.tree.topology import (
    EAGLE1_TREE,
    MEDUSA_TREE,
    RECYCLING_TREE,
    STATIC_TREES,
    Topology,
    chain,
    from_paths,
)
from eagle_jax.tree.verify import (
    Acceptance,
    Step,
    match_child,
    match_path,
    reject_drawn,
    reject_drawn_siblings,
    reject_siblings,
    verify,
)

__all__ = [
    "EAGLE1_TREE",
    "MEDUSA_TREE",
    "NO_PARENT",
    "RECYCLING_TREE",
    "ROOT",
    "STATIC_TREES",
    "Acceptance",
    "Candidates",
    "DraftTree",
    "Frontier",
    "Step",
    "Topology",
    "ancestor_mask",
    "chain",
    "draw_children",
    "drop_unconnected",
    "expand",
    "first_level",
    "flatten",
    "from_paths",
    "join",
    "make_tree",
    "match_child",
    "match_path",
    "reject_drawn",
    "reject_drawn_siblings",
    "reject_siblings",
    "rerank",
    "root_only",
    "top_children",
    "verify",
]
