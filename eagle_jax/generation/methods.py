"""The methods of generation, and the drafter of each."""

import dataclasses
import warnings
from pathlib import Path

from eagle_jax.checkpoints.heads import load_calibration
from eagle_jax.checkpoints.hub import CALIBRATION_FILE
from eagle_jax.config import Method, TreeConfig
from eagle_jax.decoding.speculative import AcceptanceRule
from eagle_jax.drafting import DraftModel, LookupDrafter, TreeDrafter
from eagle_jax.drafting.calibration import UNCALIBRATED, Calibration
from eagle_jax.errors import InputError
from eagle_jax.tree import EAGLE1_TREE, Topology, chain

HEAD_METHODS = ("eagle2", "eagle1", "chain")
"""The methods that draft with an EAGLE head."""


def check_draft(method: Method, draft: str | None) -> None:
    """Refuses a method whose draft model is not given.

    Args:
        method: The method that drafts.
        draft: The draft model's folder or hub name; `None` where none is given.

    Raises:
        InputError: If the method drafts with a model and none is given.
    """
    if draft is None and method in HEAD_METHODS:
        raise InputError(
            f"method {method} needs `draft`, the EAGLE head of this target; or "
            "choose lookup or autoregressive, which need none"
        )
    if draft is None and method == "small-model":
        raise InputError(
            "method small-model needs `draft`, a smaller model with the "
            "target's tokenizer"
        )


def tree_drafter(
    method: Method,
    model: DraftModel,
    tree: TreeConfig,
    *,
    rule: AcceptanceRule = "greedy",
    folder: Path | None = None,
) -> TreeDrafter:
    """Returns the drafter of a method that drafts with a model.

    Args:
        method: The method, any but "lookup" and "autoregressive".
        model: The draft model: an EAGLE head, or the small model.
        tree: The tree's settings; EAGLE-1 ignores them, and chains take their length
            from its depth.
        rule: The acceptance rule. Under "rejection" static trees draw their children
            instead of taking the most likely: EAGLE-1 and standard speculative sampling
            as published. A dynamic tree's shape would depend on what was drawn, so it
            never samples.
        folder: The model's folder, which may hold a calibration; `None` for none.

    Raises:
        InputError: If the tree names a calibration that cannot be used.
    """
    shape: TreeConfig | Topology = tree.shape
    if method == "eagle1":
        shape = EAGLE1_TREE
    elif method == "chain" or (method == "small-model" and tree.width == 1):
        shape = chain(tree.levels if method == "small-model" else tree.depth)
    is_static = isinstance(shape, Topology)
    return TreeDrafter(
        model=model,
        tree=shape,
        calibration=(
            UNCALIBRATED
            if is_static
            else _calibration(tree, model.vocab_size, rule, folder)
        ),
        shares_noise=tree.shared_noise,
        sampled=rule == "rejection" and is_static,
    )


def _calibration(
    tree: TreeConfig, vocab_size: int, rule: AcceptanceRule, folder: Path | None
) -> Calibration:
    """Returns the calibration that a tree names, or else the model's own if it fits."""
    given = {"kappa": tree.kappa, "sharpness": tree.sharpness}
    given = {name: value for name, value in given.items() if value is not None}
    if given:
        sampled = dataclasses.replace(UNCALIBRATED.sampled, **given)
        return Calibration(sampled=sampled)
    if tree.calibration == "none":
        return UNCALIBRATED
    is_own = tree.calibration is None
    path = folder / CALIBRATION_FILE if folder and is_own else None
    if tree.calibration is not None:
        path = Path(tree.calibration)
    elif path is None or not path.is_file():
        return UNCALIBRATED
    try:
        return load_calibration(
            path,
            vocab_size=vocab_size,
            depth=tree.levels,
            kind="sampled" if rule == "coupled" and tree.shared_noise else "greedy",
        )
    except InputError as error:
        if not is_own:
            raise
        warnings.warn(f"confidences are not calibrated: {error}", stacklevel=2)
        return UNCALIBRATED


def lookup_drafter(tree: TreeConfig) -> LookupDrafter:
    """Returns prompt lookup with about as many nodes as a tree.

    Args:
        tree: The tree's settings: `depth` tokens are drafted after a match, and as many
            matches are followed as `num_nodes` allows, `width` at most.
    """
    matches = min(tree.width, (tree.num_nodes - 1) // max(tree.levels, 1))
    return LookupDrafter(depth=tree.levels, num_matches=max(matches, 1))
