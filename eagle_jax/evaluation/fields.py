"""Readers of the fields of a JSON object that anybody may have written."""

from typing import Any

from eagle_jax.errors import InputError
from eagle_jax.parsing import check_type, value_at

MOST_LEVELS = 2**16
"""More levels than a tree has, and than an array has room for."""


def get(record: Any, name: str, kind: Any) -> Any:
    """Returns a field, and refuses one that is missing or of another type."""
    return check_type(kind, value_at(record, name), f"`{name}`")


def numbers(
    record: Any, name: str, kind: type, *, least: int = 0, most: int = 2**53
) -> list[Any]:
    """Returns a field that is a list of numbers within bounds, and refuses others."""
    values = get(record, name, list)
    for value in values:
        if not least <= check_type(kind, value, f"`{name}`") <= most:
            raise InputError(f"`{name}` holds {value}, not {least} to {most}")
    return values
