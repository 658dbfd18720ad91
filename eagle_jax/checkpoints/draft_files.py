"""Files beside or instead of a draft's settings: static trees and calibrations.

A calibration says what confidences are worth, greedy and sampled. Either part may be
missing; other keys say where the numbers come from:

    {"vocab_size": 2048,
     "greedy": {"kappa": 1.0, "exponents": [[0.4, 1.1], [0.5, 1.2]]},
     "sampled": {"kappa": 2.0, "sharpness": 1.2, "exponents": [[0.9, 1.0], [0.8, 1.1]]}}
"""

import dataclasses
import warnings
from pathlib import Path
from typing import Any, Literal

from eagle_jax.checkpoints.hub import CALIBRATION_FILE
from eagle_jax.config import TreeConfig
from eagle_jax.drafting.calibration import UNCALIBRATED, Calibration, Confidence
from eagle_jax.errors import InputError
from eagle_jax.parsing import parse_json, read_bytes, read_json
from eagle_jax.tree import STATIC_TREES, Topology, from_paths

Kind = Literal["greedy", "sampled"]
"""The kind of a text: greedy, or drawn above temperature 0 with noise drafts share."""

_DIGITS = 4
_KINDS: tuple[Kind, ...] = ("greedy", "sampled")


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
    if tree.calibration == "none":
        return UNCALIBRATED
    sizes: Any = {"vocab_size": vocab_size, "depth": tree.levels, "kind": kind}
    if tree.calibration is not None:
        return load_calibration(Path(tree.calibration), **sizes)
    own = folder and folder / CALIBRATION_FILE
    if own is None or not own.is_file():
        return UNCALIBRATED
    try:
        return load_calibration(own, **sizes)
    except InputError as error:
        warnings.warn(f"confidences are not calibrated: {error}", stacklevel=2)
        return UNCALIBRATED


def load_calibration(
    path: Path, *, vocab_size: int, depth: int, kind: Kind
) -> Calibration:
    """Reads the calibration that `eagle-jax calibrate` wrote.

    Args:
        path: The calibration's file.
        vocab_size: The number of tokens the target knows, `V`.
        depth: The number of levels that will be drafted, `D`.
        kind: The kind of text whose part must be there.

    Returns:
        The calibration; a missing part leaves confidences of its kind as they are.

    Raises:
        InputError: If the file cannot be read, holds no calibration, or one for another
            vocabulary, fewer levels or the other kind of text.
    """
    content = read_json(path)
    try:
        found = content["vocab_size"]
        parts = {name: _read_part(content[name]) for name in _KINDS if name in content}
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f'{path} must hold "vocab_size" and, under "greedy" or "sampled", "kappa", '
            '"sharpness" and "exponents", a list of lists of numbers, as '
            f"eagle-jax calibrate writes it ({error!r})"
        ) from error
    if found != vocab_size:
        raise InputError(
            f"{path} was fitted to a vocabulary of {found} tokens, and the target has "
            f"{vocab_size}; fit one with eagle-jax calibrate"
        )
    if kind not in parts:
        known = " and ".join(parts) or "nothing"
        raise InputError(
            f"{path} calibrates {known}, not {kind} text; fit both kinds with "
            "eagle-jax calibrate, or leave the calibration out"
        )
    levels = len(parts[kind].exponents)
    if levels < depth:
        raise InputError(
            f"{path} was fitted to {levels} levels, but depth = {depth}; draft fewer, "
            "or fit deeper trees with eagle-jax calibrate --depth"
        )
    return dataclasses.replace(UNCALIBRATED, **parts)


def calibration_part(confidence: Confidence) -> dict[str, Any]:
    """Returns one part of a calibration, greedy or sampled, as its file holds it."""
    rows = [[round(entry, _DIGITS) for entry in row] for row in confidence.exponents]
    factors = {"kappa": confidence.kappa, "sharpness": confidence.sharpness}
    return factors | {"exponents": rows}


def _read_part(part: Any) -> Confidence:
    rows = tuple(tuple(float(entry) for entry in row) for row in part["exponents"])
    factors = {name: float(part[name]) for name in ("kappa", "sharpness")}
    return Confidence(**factors, exponents=rows)
