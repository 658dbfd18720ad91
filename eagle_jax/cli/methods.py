"""The methods that a command offers, and what drafts in each."""

from pathlib import Path

from eagle_jax.config import Method, TreeConfig
from eagle_jax.drafting import DraftModel, LookupDrafter, TreeDrafter
from eagle_jax.errors import InputError
from eagle_jax.evaluation.calibrate import load_calibration
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
            f"method {method} needs --draft FOLDER, the EAGLE head of this target; or "
            "choose lookup or autoregressive, which need none"
        )
    if draft is None and method == "small-model":
        raise InputError(
            "method small-model needs --draft FOLDER, a smaller model with the "
            "target's tokenizer"
        )


def tree_drafter(
    method: Method, model: DraftModel, tree: TreeConfig, *, sampled: bool = False
) -> TreeDrafter:
    """Returns the drafter of a method that drafts with a model.

    Args:
        method: Any but "lookup" and "autoregressive".
        model: An EAGLE head, or the small model.
        tree: EAGLE-1 ignores it, chains take their length from its depth.
        sampled: Whether static trees draw their children instead of taking the
            likeliest: EAGLE-1 and standard speculative sampling as published. A
            dynamic tree's shape would depend on what was drawn, so it never samples.

    Raises:
        InputError: If the tree names a calibration that cannot be read.
    """
    shape: TreeConfig | Topology = tree
    if method == "eagle1":
        shape = EAGLE1_TREE
    elif method == "chain" or (method == "small-model" and tree.width == 1):
        shape = chain(tree.levels if method == "small-model" else tree.depth)
    calibration = None
    if tree.calibration is not None:
        calibration = load_calibration(Path(tree.calibration))
    return TreeDrafter(
        model=model,
        tree=shape,
        calibration=calibration,
        sampled=sampled and isinstance(shape, Topology),
    )


def lookup_drafter(tree: TreeConfig) -> LookupDrafter:
    """Returns prompt lookup with about as many nodes as a tree.

    Args:
        tree: `depth` tokens are drafted behind a match; as many matches are followed
            as `num_nodes` allows, `width` at most.
    """
    matches = min(tree.width, (tree.num_nodes - 1) // max(tree.levels, 1))
    return LookupDrafter(depth=tree.levels, num_matches=max(matches, 1))
