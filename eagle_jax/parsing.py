"""Reading JSON and TOML that anybody may have written: what is read is bounded."""

import errno
import functools
import json
import math
import tomllib
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eagle_jax.errors import InputError

MAX_BYTES = 64 * 2**20
"""The size of the largest file that is read; an index of 1,000 shards has 1% of it."""

MAX_DEPTH = 100
"""The largest number of lists and objects inside each other."""

MAX_DIGITS = 64
"""The digits of the longest integer; transformers writes 10**30 for "no limit"."""

_LARGEST = 10**MAX_DIGITS
_TOO_DEEP = f"it is nested more than {MAX_DEPTH} deep"

hints_of = functools.cache(typing.get_type_hints)
"""Returns the types of a class's fields by name."""


def read_json(path: Path) -> dict[str, Any]:
    """Reads a file that holds a JSON object, see `parse_json`."""
    value = parse_json(read_bytes(path), str(path))
    if not isinstance(value, dict):
        raise InputError(f"{path} holds no JSON object")
    return value


def value_at(record: Any, *names: str) -> Any:
    """Returns the value under names, one in the other; `None` if there is none."""
    for name in names:
        record = record.get(name) if isinstance(record, dict) else None
    return record


def check_same(before: Any, now: Any, what: str) -> None:
    """Refuses to go on with a result that was made with other settings.

    Args:
        before: The JSON value of the settings that made it.
        now: The settings as they are now, likewise.
        what: The result's name, or a setting's after it.

    Raises:
        InputError: If they differ; names the first setting that does.
    """
    if isinstance(before, dict) and isinstance(now, dict):
        for name in [*now, *(name for name in before if name not in now)]:
            check_same(before.get(name), now.get(name), f"{what}: {name}")
    elif before != now:
        raise InputError(
            f"{what} was {before!r} and is {now!r} now; use the same settings to go on "
            "with it, or give another output"
        )


def read_toml(path: Path) -> dict[str, Any]:
    """Reads a file of settings."""
    parse = functools.partial(tomllib.loads, parse_float=_finite)
    return _parse(parse, read_bytes(path), f"{path}", "TOML")


def parse_json(text: str | bytes, where: str) -> Any:
    """Returns the value that a JSON text holds.

    Args:
        text: The JSON text; bytes are UTF-8.
        where: The text's name in a refusal: a file, or a line of one.

    Raises:
        InputError: If the text is no JSON, or holds NaN, an infinite number, an integer
            of more than `MAX_DIGITS` digits, or more than `MAX_DEPTH` lists and objects
            inside each other.
    """
    parse = functools.partial(json.loads, parse_float=_finite, parse_constant=_finite)
    return _parse(parse, text, where, "JSON")


def read_bytes(path: Path) -> bytes:
    """Reads a file of settings whole; no pipe, no device, and no large file."""
    try:
        size = path.stat().st_size
        if path.is_file() and size <= MAX_BYTES:
            return path.read_bytes()
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {path}: {error}") from error
    if not path.is_file():
        raise InputError(f"cannot read {path}: it is no file; give a file")
    raise InputError(
        f"cannot read {path}: it has {size:,} bytes, and at most {MAX_BYTES:,} are "
        "read; give a file of settings"
    )


def resolved(path: Path) -> Path:
    """Returns a path without links; what it leads to need not exist."""
    try:
        path.stat()  # `resolve` refuses them too, or not, as the Python is.
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise InputError(
                f"{path} is a link that leads to itself; give another path"
            ) from error
    return path.resolve()


def check_types(settings: object) -> None:
    """Refuses values that do not fit their fields' annotations.

    Scalars of NumPy and JAX and paths become what they stand for.

    Args:
        settings: A frozen dataclass, in its `__post_init__`.
    """
    for name, hint in hints_of(type(settings)).items():
        value = getattr(settings, name)
        if hint is Any or type(value) is hint:
            continue
        if getattr(value, "shape", None) == ():
            value = value.item()
        elif isinstance(value, Path):
            value = str(value)
        object.__setattr__(settings, name, check_type(hint, value, name))


def check_type(hint: Any, value: Any, where: str) -> Any:
    """Returns the value if it fits the annotation; an integer may stand for a float."""
    if hint is Any:
        return value
    is_union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    wanted = []
    for kind in typing.get_args(hint) if is_union else (hint,):
        choices = typing.get_args(kind)
        if type(value) is kind or (type(value) is str and value in choices):
            return value
        if kind is float and type(value) is int:
            return float(value)
        if choices:
            wanted.append("one of " + ", ".join(map(repr, choices)))
        elif kind is not types.NoneType:
            wanted.append(kind.__name__)
    told = f"{where} = {value!r} must be {' or '.join(wanted)}"
    raise InputError(told, setting=where)


def _parse(
    parse: Callable[[str], Any], text: str | bytes, where: str, kind: str
) -> Any:
    try:
        value = parse(text if isinstance(text, str) else text.decode("utf-8-sig"))
        _check(value)
    except UnicodeDecodeError as error:
        raise InputError(f"{where} is not UTF-8 ({error.reason})") from error
    except RecursionError as error:
        raise InputError(f"{where} is not valid {kind}: {_TOO_DEEP}") from error
    except ValueError as error:
        raise InputError(f"{where} is not valid {kind}: {error}") from error
    return value


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is no finite number of 64 bits")
    return number


def _check(value: Any) -> None:
    """Raises ValueError for a value too deep or too long, without recursion."""
    level: list[Any] = [[value]]
    for _ in range(MAX_DEPTH + 1):
        inner = []
        for holder in level:
            for entry in holder.values() if isinstance(holder, dict) else holder:
                if isinstance(entry, dict | list):
                    inner.append(entry)
                elif isinstance(entry, int) and not -_LARGEST < entry < _LARGEST:
                    raise ValueError(f"an integer has more than {MAX_DIGITS} digits")
        level = inner
    if level:
        raise ValueError(_TOO_DEEP)
