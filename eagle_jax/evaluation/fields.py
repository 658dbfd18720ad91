"""Readers of a record's fields, which check them."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from eagle_jax.errors import InputError

_MOST = 2.0**53
_WANTED = {int: "a whole number of 0 or more", float: "a number of 0 or more"}


def get(record: Any, name: str, kind: type, inside: str = "") -> Any:
    """Returns a field of a JSON object.

    Args:
        record: The value that should be the object.
        name: The field's name.
        kind: The type that its value must have.
        inside: The object's position, which a refusal names.

    Raises:
        InputError: If the field is missing or holds something else.
    """
    if not isinstance(record, dict) or name not in record:
        raise InputError(f"no field `{inside}{name}`")
    if not isinstance(record[name], kind):
        raise InputError(f"`{inside}{name}` is no {kind.__name__}")
    return record[name]


def numbers(
    values: list[Any], name: str, kind: type = float, *, most: float = math.inf
) -> list[Any]:
    """Returns a list of finite numbers of 0 and more.

    Args:
        values: The list.
        name: The list's name in a refusal.
        kind: The type of the numbers, `int` for whole ones.
        most: The largest number that is allowed.

    Raises:
        InputError: If an entry is something else.
    """
    kinds = int if kind is int else int | float
    for value in values:
        is_number = isinstance(value, kinds) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value < 0:
            raise InputError(f"`{name}` holds {value!r}, not {_WANTED[kind]}")
        if value > most:
            raise InputError(f"`{name}` holds {value}, which is more than {most}")
    return values


def columns(record: Any, table: str, names: Sequence[str]) -> list[np.ndarray]:
    """Returns lists of one length, side by side in a field, as float64 arrays.

    Args:
        record: The field `nodes` of a record.
        table: The field of `record` that holds the lists.
        names: The names of the lists.

    Raises:
        InputError: If a list is missing, holds no number or one that no tree has, or
            differs in length from the others.
    """
    lists = get(record, table, dict, "nodes.")
    found = [get(lists, name, list, f"nodes.{table}.") for name in names]
    try:
        arrays = [np.asarray(column, float) for column in found]
    except (TypeError, ValueError) as error:
        raise InputError(f"`nodes.{table}` holds what is no number") from error
    if not all((np.abs(array) < _MOST).all() for array in arrays):  # NaN is not.
        raise InputError(f"`nodes.{table}` holds what no tree has")
    if len({array.shape for array in arrays}) > 1 or arrays[0].ndim != 1:
        raise InputError(f"the lists of `nodes.{table}` differ in length")
    return arrays
