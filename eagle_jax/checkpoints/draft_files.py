"""Files beside or instead of a draft's settings: static trees and calibrations."""

import dataclasses
import warnings
from pathlib import Path
from typing import Any

from eagle_jax.checkpoints.heads import Kind, load_calibration
from eagle_jax.checkpoints.hub import CALIBRATION_FILE
from eagle_jax.config import TreeConfig
from eagle_jax.drafting.calibration import UNCALIBRATED, Calibration
from eagle_jax.errors import InputError
from eagle_jax.parsing import parse_json, read_bytes
from eagle_jax.tree import STATIC_TREES, Topology, from_paths


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


def find_calibration(
    tree: TreeConfig, vocab_size: int, folder: Path | None, *, kind: Kind
) -> Calibration:
    """Returns the calibration that a tree names, or else the model's own if it fits.

    Args:
        tree: The tree's settings.
        vocab_size: The number of tokens the target knows, `V`.
        folder: The draft model's folder, which may hold its own; `None` for none.
        kind: The kind of text that will be drafted.

    Raises:
        InputError: If the tree names a file that cannot be used.
    """
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
            kind=kind,
        )
    except InputError as error:
        if not is_own:
            raise
        warnings.warn(f"confidences are not calibrated: {error}", stacklevel=2)
        return UNCALIBRATED
