"""The methods of generation, and the drafter of each."""

import dataclasses
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle_jax.checkpoints.heads import load_calibration
from eagle_jax.checkpoints.hub import CALIBRATION_FILE
from eagle_jax.config import Method, TreeConfig
from eagle_jax.decoding.speculative import AcceptanceRule
from eagle_jax.drafting import (
    DraftModel,
    LookaheadDrafter,
    LookupDrafter,
    RecyclingDrafter,
    SwitchDrafter,
    TreeDrafter,
)
from eagle_jax.drafting.calibration import UNCALIBRATED, Calibration
from eagle_jax.drafting.heads import most_levels
from eagle_jax.errors import InputError
from eagle_jax.interface import Drafter
from eagle_jax.parsing import parse_json, read_bytes
from eagle_jax.tree import (
    EAGLE1_TREE,
    MEDUSA_TREE,
    RECYCLING_TREE,
    STATIC_TREES,
    Topology,
    chain,
    from_paths,
)

EAGLE_METHODS: tuple[Method, ...] = ("eagle2", "eagle1", "chain", "eagle2+lookup")
"""The methods that draft with an EAGLE head."""

DRAFTS: Mapping[Method, str] = {
    **dict.fromkeys(EAGLE_METHODS, "the EAGLE head of this target"),
    "medusa": "the Medusa heads of this target",
    "hydra": "the Hydra heads of this target",
    "small-model": "a smaller model with the target's tokenizer",
}
"""The weights that methods draft with; the others have none."""

_DYNAMIC = (
    *("num_nodes", "depth", "width", "rank_by", "rerank"),
    *("calibration", "kappa", "sharpness", "shared_noise", "acceptance"),
)
_STATIC = ("choices", "shared_noise", "acceptance")
_VOCABULARY = "draft_vocabulary"

SETTINGS: Mapping[Method, tuple[str, ...]] = {
    "eagle2": (*_DYNAMIC, _VOCABULARY),
    "eagle1": (*_STATIC, _VOCABULARY),
    "chain": ("depth", "shared_noise", "acceptance", _VOCABULARY),
    "eagle2+lookup": (*_DYNAMIC, "min_match", _VOCABULARY),
    "medusa": _STATIC,
    "hydra": _STATIC,
    "small-model": (*_DYNAMIC, _VOCABULARY),
    "recycling": ("choices", "acceptance"),
    "lookahead": ("level", "window", "guesses", "acceptance"),
    "lookup": ("num_nodes", "depth", "width", "max_ngram", "acceptance"),
    "autoregressive": (),
}
"""The settings that each method reads; one that changes nothing would mislead."""

COPIED = 16
"""The most tokens that the switch copies after a match, and the longest match it seeks.

Every round pays for the longest path: its noise, and its place in the head's call. The
embedded pair (26 nodes, 128 tokens, greedy) writes 6.05 tokens per round with no copy,
5.98 with copies of 8, 7.26 of 16, 7.58 of 25; the published 40 exceed that tree.
"""

_TREES: Mapping[Method, Topology] = {
    "eagle1": EAGLE1_TREE,
    "medusa": MEDUSA_TREE,
    "hydra": MEDUSA_TREE,
}


def draft_kind(method: Method) -> Method | None:
    """Returns the method that stands for all with the same weights; `None` for none."""
    if method in EAGLE_METHODS:
        return "eagle2"
    return method if method in DRAFTS else None


def check_draft(method: Method, draft: str | None) -> None:
    """Refuses a method whose draft model is not given, and warns of one not read.

    Args:
        method: The method that drafts.
        draft: The draft model's folder or hub name; `None` where none is given.

    Raises:
        InputError: If the method drafts with a model and none is given.
    """
    if draft is None and method in DRAFTS:
        raise InputError(
            f"method {method} needs `draft`, {DRAFTS[method]}; or choose lookup, "
            "recycling, lookahead or autoregressive, which need none"
        )
    if draft is not None and method not in DRAFTS:
        warnings.warn(
            f"method {method} drafts without weights: `draft` {draft} is not read",
            stacklevel=2,
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
        method: The method, one that drafts with a model.
        model: The draft model: a head or heads, or the small model.
        tree: The tree's settings; static trees are its `choices`, or else the method's
            own as far as there are heads, and chains take their length from its depth.
        rule: The acceptance rule. Under "rejection" static trees draw their children
            instead of taking the most likely: EAGLE-1 and standard speculative sampling
            as published. A dynamic tree's shape would depend on what was drawn, so it
            never samples.
        folder: The model's folder, which may hold a calibration; `None` for none.

    Raises:
        InputError: If the tree names a calibration or choices that cannot be used, or
            are deeper than there are heads.
    """
    shape: TreeConfig | Topology = tree.shape
    if method in _TREES:
        own = _TREES[method]
        own = own.cut(most_levels(model) or own.depth)
        shape = read_choices(tree.choices, own)
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
        # Each draw is tested given those before it, so none may be missing.
        sampled=rule == "rejection" and is_static and shape.has_every_rank,
    )


def switch_drafter(
    model: DraftModel,
    tree: TreeConfig,
    *,
    rule: AcceptanceRule = "greedy",
    folder: Path | None = None,
) -> SwitchDrafter:
    """Returns EAGLE-2's drafter, switched to prompt lookup where a match is long.

    Args:
        model: The draft model, an EAGLE head.
        tree: The tree's settings, with `min_match`; no more than its `num_nodes` are
            copied.
        rule: The acceptance rule.
        folder: The model's folder, see `tree_drafter`.

    Raises:
        InputError: If the tree names a calibration that cannot be used, or drafts
            nothing.
    """
    return SwitchDrafter(
        first=LookupDrafter(
            depth=min(COPIED, tree.num_nodes - 1), max_ngram=max(COPIED, tree.min_match)
        ),
        second=tree_drafter("eagle2", model, tree, rule=rule, folder=folder),
        min_match=tree.min_match,
    )


def read_choices(choices: str | None, own: Topology) -> Topology:
    """Returns a static tree.

    Args:
        choices: A name of `STATIC_TREES`, or a JSON file with a list of rank paths;
            `None` for the method's own.
        own: The method's own.

    Raises:
        InputError: If there is no such file, or what it holds is no tree.
    """
    if choices is None:
        return own
    if choices in STATIC_TREES:
        return STATIC_TREES[choices]
    path = Path(choices)
    if not path.is_file():
        raise InputError(
            f"choices = {choices} is neither a file nor one of "
            f"{', '.join(STATIC_TREES)}"
        )
    paths: Any = parse_json(read_bytes(path), str(path))
    wanted = "a list of lists of ranks, such as [[0], [1], [0, 0]]"
    if not isinstance(paths, list) or not all(
        isinstance(one, list) and one and all(type(rank) is int for rank in one)
        for one in paths
    ):
        raise InputError(f"{path} must hold {wanted}")
    try:
        return from_paths(paths)
    except InputError as error:
        raise InputError(f"{path} holds no tree: {error}; give {wanted}") from error


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


def weightless_drafter(
    method: Method, tree: TreeConfig, vocab_size: int
) -> Drafter | None:
    """Returns the drafter of a method without weights; `None` for plain decoding.

    Args:
        method: The method, one that is not in `DRAFTS`.
        tree: The tree's settings, of which the method reads its own.
        vocab_size: The number of tokens the target knows, `V`.

    Raises:
        InputError: If the tree names choices that cannot be used.
    """
    if method == "lookup":
        return lookup_drafter(tree)
    if method == "lookahead":
        return LookaheadDrafter(
            vocab_size=vocab_size,
            level=tree.level,
            window=tree.window,
            guesses=tree.guesses,
        )
    if method == "recycling":
        shape = read_choices(tree.choices, RECYCLING_TREE)
        return RecyclingDrafter(vocab_size=vocab_size, tree=shape)
    return None


def lookup_drafter(tree: TreeConfig) -> LookupDrafter:
    """Returns prompt lookup with about as many nodes as a tree.

    Args:
        tree: The tree's settings: `depth` tokens are drafted after a match, and as many
            matches are followed as `num_nodes` allows, `width` at most.
    """
    matches = min(tree.width, (tree.num_nodes - 1) // max(tree.levels, 1))
    return LookupDrafter(
        depth=tree.levels, num_matches=max(matches, 1), max_ngram=tree.max_ngram
    )
