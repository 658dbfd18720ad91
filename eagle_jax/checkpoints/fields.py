"""Fields of a `config.json`, checked."""

from pathlib import Path
from typing import Any

from eagle_jax.errors import InputError

MOST = 2**24
"""Of anything that sizes a tensor: what is larger no checkpoint holds."""

MOST_POSITIONS = 2**31 - 1
"""Of positions, which are int32."""

# Outside of these float32 is zero or infinite.
_LEAST_NUMBER, _MOST_NUMBER = 1e-37, 1e38


def size_of(
    config: dict[str, Any],
    name: str,
    path: Path,
    *,
    default: int | None = None,
    least: int = 1,
    most: int = MOST,
) -> int:
    """Returns a field that must be an integer from `least` to `most`.

    Raises:
        InputError: If it is something else, or missing and there is no default.
    """
    value = default if config.get(name) is None else config[name]
    if type(value) is not int or not least <= value <= most:
        raise InputError(
            f"{path}: {name} = {value!r} must be an integer from {least} to {most:,}"
        )
    return value


def number_of(
    config: dict[str, Any], name: str, path: Path, *, default: float | None = None
) -> float:
    """Returns a field that must be a positive number that float32 can hold.

    Raises:
        InputError: If it is something else, or missing and there is no default.
    """
    value = default if config.get(name) is None else config[name]
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not _LEAST_NUMBER < value < _MOST_NUMBER
    ):
        raise InputError(
            f"{path}: {name} = {value!r} must be a positive number that float32 holds"
        )
    return float(value)


def flag_of(config: dict[str, Any], name: str, path: Path, *, default: bool) -> bool:
    """Returns a field that must be true or false.

    Raises:
        InputError: If it is something else.
    """
    value = default if config.get(name) is None else config[name]
    if not isinstance(value, bool):
        raise InputError(f"{path}: {name} = {value!r} must be true or false")
    return value
