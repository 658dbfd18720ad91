"""The methods that a command offers, and what drafts in each."""

from typing import Any

from eagle_jax.config import Method, TreeConfig
from eagle_jax.drafting import DraftModel, LookupDrafter, TreeDrafter
from eagle_jax.errors import InputError
from eagle_jax.tree import EAGLE1_TREE, Topology, chain

HEAD_METHODS = ("eagle2", "eagle1", "chain")
"""Methods that draft with an EAGLE head."""


def check_draft(method: Method, draft: str | None) -> None:
    """Refuses a method that lacks its weights.

    Raises:
        InputError: If the method drafts with a model and none is given.
    """
    if draft is None and method in HEAD_METHODS:
        raise InputError(
            f"--method {method} needs --draft FOLDER, the EAGLE head of this target; "
            "or choose --method lookup or --method autoregressive"
        )
    if draft is None and method == "small-model":
        raise InputError(
            "--method small-model needs --draft FOLDER, a smaller model with the "
            "target's tokenizer"
        )


def tree_drafter(method: Method, model: DraftModel, tree: TreeConfig) -> TreeDrafter:
    """Returns the drafter of a method that drafts with a model.

    Args:
        method: Any but "lookup" and "autoregressive".
        model: An EAGLE head, or the small model.
        tree: EAGLE-1 ignores it, chains take their length from its depth.
    """
    shapes: dict[str, TreeConfig | Topology] = {
        "eagle1": EAGLE1_TREE,
        "chain": chain(tree.depth),
    }
    return TreeDrafter(model=model, tree=shapes.get(method, tree))


def lookup_drafter(tree: TreeConfig) -> Any:
    """Returns prompt lookup with about as many nodes as a tree.

    Args:
        tree: `depth` tokens are drafted behind a match; as many matches are followed
            as `num_nodes` allows, `width` at most.
    """
    matches = min(tree.width, (tree.num_nodes - 1) // max(tree.depth, 1))
    return LookupDrafter(depth=tree.levels, num_matches=max(matches, 1))
