"""The calibration beside a head: what its confidences are worth, greedy and sampled.

```json
{"vocab_size": 2048,
 "greedy": {"kappa": 1.0, "exponents": [[0.4, 1.1], [0.5, 1.2]]},
 "sampled": {"kappa": 2.0, "sharpness": 1.2, "exponents": [[0.9, 1.0], [0.8, 1.1]]}}
```

Either part may be missing; other keys say where the numbers come from.
"""

import dataclasses
from pathlib import Path
from typing import Any, Literal

from eagle_jax.drafting.calibration import UNCALIBRATED, Calibration, Confidence
from eagle_jax.errors import InputError
from eagle_jax.parsing import read_json

CALIBRATION_FILE = "calibration.json"
"""Its name in the folder of a head."""

Kind = Literal["greedy", "sampled"]
"""Of text: at temperature 0, or drawn above it with noise that drafts share."""


def load_calibration(
    path: Path, *, vocab_size: int, depth: int, kind: Kind
) -> Calibration:
    """Reads what scripts/calibrate.py or scripts/train.py wrote.

    Args:
        path: The file.
        vocab_size: `V` of the target.
        depth: `D`, the levels that will be drafted.
        kind: The part that must be there.

    Returns:
        A part that is missing leaves confidences of that kind as they are.

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
            f"scripts/calibrate.py writes it ({error!r})"
        ) from error
    if found != vocab_size:
        raise InputError(
            f"{path} was fitted to a vocabulary of {found} tokens, and the target has "
            f"{vocab_size}; fit one with scripts/calibrate.py"
        )
    if kind not in parts:
        known = " and ".join(parts) or "nothing"
        raise InputError(
            f"{path} calibrates {known}, not {kind} text; fit records of that kind too "
            "with scripts/calibrate.py, or leave the calibration out"
        )
    levels = len(parts[kind].exponents)
    if levels < depth:
        raise InputError(
            f"{path} was fitted to {levels} levels, but depth = {depth}; draft fewer, "
            "or fit records of a deeper tree with scripts/calibrate.py"
        )
    return dataclasses.replace(UNCALIBRATED, **parts)


def calibration_part(confidence: Confidence) -> dict[str, Any]:
    """Returns a part of the file as JSON holds it."""
    rows = [[round(entry, _DIGITS) for entry in row] for row in confidence.exponents]
    factors = {"kappa": confidence.kappa, "sharpness": confidence.sharpness}
    return factors | {"exponents": rows}


_DIGITS = 4
_KINDS: tuple[Kind, ...] = ("greedy", "sampled")


def _read_part(part: Any) -> Confidence:
    rows = tuple(tuple(float(entry) for entry in row) for row in part["exponents"])
    factors = {name: float(part[name]) for name in ("kappa", "sharpness")}
    return Confidence(**factors, exponents=rows)
