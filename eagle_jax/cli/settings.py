"""Settings of a command: defaults, then a TOML file, then flags."""

import argparse
import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from eagle_jax.config import DecodingConfig, load_config
from eagle_jax.engine.config import PairConfig, check_read
from eagle_jax.engine.request import Request
from eagle_jax.methods import METHODS

Settings = TypeVar("Settings")

_OWN = {name: method for method in METHODS.values() for name in method.own_settings}

METHOD_SETTINGS = tuple(
    field.name
    for name, method in _OWN.items()
    for field in dataclasses.fields(method.settings)
    if field.name == name and type(field.default) is not bool
)
"""The names of the settings that are one method's or another's own, as flags."""

_DYNAMIC = METHODS[DecodingConfig.method].own_settings

METHOD_GROUPS = {
    "the tree; that of the embedded pair is in configs/embedded.toml": " ".join(
        name for name in METHOD_SETTINGS if name in _DYNAMIC
    ),
    "other methods": " ".join(n for n in METHOD_SETTINGS if n not in _DYNAMIC),
}
"""The groups of these flags."""


def add_groups(
    parser: argparse.ArgumentParser,
    kind: Any,
    groups: Mapping[str, str],
    *,
    more: Sequence[type] = (),
) -> None:
    """Adds groups of flags for settings, by their titles: the names of each.

    See `add_settings`.
    """
    for title, names in groups.items():
        group = parser.add_argument_group(title)
        add_settings(group, kind, *names.split(), more=more)


def add_settings(
    parser: argparse._ActionsContainer,
    kind: Any,
    *names: str,
    more: Sequence[type] = (),
    usual: Mapping[str, Any] | None = None,
) -> None:
    """Adds flags for settings, which are `None` where they are not given.

    Args:
        parser: The parser, or a group of it, that gets the flags.
        kind: A frozen dataclass of frozen dataclasses, one per TOML table; a field's
            description in their docstrings is the flag's help.
        names: The names of fields of the inner dataclasses.
        more: Further dataclasses that may stand for inner ones.
        usual: The command's own defaults, where they are not those of the settings.
    """
    hints = typing.get_type_hints(kind).values()
    tables: list[Any] = [hint for hint in hints if dataclasses.is_dataclass(hint)]
    tables += more
    if kind is PairConfig:
        tables += [method.settings for method in METHODS.values()]
        tables.append(Request)
    for name in names:
        table = next(t for t in tables if name in typing.get_type_hints(t))
        hint = typing.get_type_hints(table)[name]
        options: dict[str, Any] = {"type": hint}
        if hint is bool:
            options = {"action": "store_true", "default": None}
        elif name == "method":
            options = {"choices": list(METHODS)}
        elif typing.get_origin(hint) is typing.Literal:
            options = {"choices": typing.get_args(hint)}
        elif isinstance(hint, types.UnionType):
            options = {"type": typing.get_args(hint)[0]}
        text = inspect.getdoc(table) or ""
        words = re.search(rf"^    {name}: (.*(\n {{8}}.*)*)", text, re.MULTILINE)
        described = words[1].replace("%", "%%") if words else None
        if described:  # Nobody can type `None`: a flag is left out. Axes are code's.
            described = re.sub(r"`None`\s+for", "by default", described)
            described = re.sub(r",\s+`[A-Z]`", "", described)
            described += _readers(name) + _default(table, name, usual or {})
        options |= {"default": usual[name]} if usual and name in usual else {}
        parser.add_argument(f"--{name.replace('_', '-')}", help=described, **options)


def _readers(name: str) -> str:
    """Returns which methods a setting is of, unless it is of the usual one."""
    if name not in METHOD_SETTINGS or name in _DYNAMIC:
        return ""
    readers = [one for one, row in METHODS.items() if name in row.own_settings]
    return f" Of {', '.join(readers)}."


def _default(table: Any, name: str, usual: Mapping[str, Any]) -> str:
    """Returns what holds without a flag, unless it says so or the parser does."""
    default = {one.name: one.default for one in dataclasses.fields(table)}[name]
    is_off = isinstance(default, bool) or default in (None, dataclasses.MISSING)
    return "" if is_off or name in usual else f" (default: {default})"


def join_settings(
    kind: type[Settings], path: Path | None, arguments: argparse.Namespace
) -> Settings:
    """Joins the defaults, a TOML file and the flags, the later ones winning.

    Args:
        kind: A frozen dataclass of frozen dataclasses, one per TOML table.
        path: The file, or `None` for none.
        arguments: The flags by the names of the inner fields; `None` for those not
            given.

    Raises:
        InputError: If the file or a value is refused, or the method does not read a
            flag that is given.
    """
    method = getattr(arguments, "method", None)
    given = {"method": method} if issubclass(kind, PairConfig) else {}
    config: Any = kind() if path is None else load_config(path, kind, **given)
    if isinstance(config, PairConfig):
        config = config.with_method(method or config.decoding.method)
        for name in (*_OWN, "draft_vocabulary"):
            # A dynamic tree's settings may come with every pair, whatever drafts.
            is_common = name in METHODS[DecodingConfig.method].own_settings
            if getattr(arguments, name, None) is not None and not is_common:
                check_read(config, name)
    return with_flags(config, arguments)


def with_flags(config: Settings, arguments: argparse.Namespace) -> Settings:
    """Returns settings of which flags have replaced some.

    Args:
        config: A frozen dataclass of frozen dataclasses, one per TOML table.
        arguments: The flags, see `join_settings`.

    Raises:
        InputError: If a value is refused.
    """
    given: Any = config
    sections: dict[str, Any] = {}
    for section in dataclasses.fields(given):
        settings = getattr(given, section.name)
        flags = {
            field.name: getattr(arguments, field.name)
            for field in dataclasses.fields(settings)
            if getattr(arguments, field.name, None) is not None
        }
        sections[section.name] = dataclasses.replace(settings, **flags)
    return type(config)(**sections)
