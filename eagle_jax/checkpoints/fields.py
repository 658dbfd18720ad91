"""Numbers of a `config.json`, checked."""

import math
from pathlib import Path
from typing import Any

from eagle_jax.errors import InputError


def size_of(
    config: dict[str, Any], name: str, path: Path, *, default: int | None = None
) -> int:
    """Returns a field that must be a positive integer.

    Raises:
        InputError: If it is something else, or missing and there is no default.
    """
    value = default if config.get(name) is None else config[name]
    if not isinstance(value, int) or value < 1:
        raise InputError(f"{path}: {name} = {value!r} must be a positive integer")
    return value


def number_of(
    config: dict[str, Any], name: str, path: Path, *, default: float | None = None
) -> float:
    """Returns a field that must be a positive number.

    Raises:
        InputError: If it is something else, or missing and there is no default.
    """
    value = default if config.get(name) is None else config[name]
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise InputError(f"{path}: {name} = {value!r} must be a positive number")
    return float(value)
