"""Settings of a command: defaults, then a TOML file, then flags."""

import argparse
import dataclasses
import inspect
import re
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from eagle_jax.config import load_config
from eagle_jax.engine.config import PairConfig
from eagle_jax.methods import METHODS

Settings = TypeVar("Settings")

_OWN = {
    field.name: field
    for method in METHODS.values()
    for field in dataclasses.fields(method.settings)
}
_FLAGS = [name for name, field in _OWN.items() if type(field.default) is not bool]

_LISTS: dict[Any, dict[str, Any]] = {
    str | Sequence[str]: {"nargs": "+", "action": "extend", "metavar": "TEXT"},
    Sequence[int]: {"nargs": "+", "type": int, "metavar": "ID"},
    Mapping[int, float]: {"nargs": "+", "metavar": "ID=VALUE"},
    str | Mapping[str, Any] | None: {"metavar": "SCHEMA"},
}
"""What `argparse` is told of settings that are more than one number or name."""

_DYNAMIC = METHODS[PairConfig.method].own_settings

PAIR_GROUPS = {
    "the method": "method acceptance draft_vocabulary draft_quantization",
    "memory and arithmetic": "max_length dtype quantization",
    "the tree; that of the embedded pair is in configs/embedded.toml": " ".join(
        name for name in _FLAGS if name in _DYNAMIC
    ),
    "other methods": " ".join(name for name in _FLAGS if name not in _DYNAMIC),
}
"""The groups of flags of all commands that decode with a pair."""


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
    tables: list[Any] = [kind, *filter(dataclasses.is_dataclass, hints), *more]
    if kind is PairConfig:
        tables += [method.settings for method in METHODS.values()]
    for name in names:
        table = next(t for t in tables if name in typing.get_type_hints(t))
        (field,) = (one for one in dataclasses.fields(table) if one.name == name)
        options = _options(field, typing.get_type_hints(table)[name])
        described = _described(table, name)
        if described:
            described += _readers(name) + _default(field, usual or {})
        options |= {"default": usual[name]} if usual and name in usual else {}
        flag = field.metadata.get("flag", name).replace("_", "-")
        parser.add_argument(f"--{flag}", dest=name, help=described, **options)


def _options(field: dataclasses.Field[Any], hint: Any) -> dict[str, Any]:
    """Returns what `argparse` is told of the values of a field."""
    if hint is bool:
        is_on = field.default is True
        return {"action": "store_false" if is_on else "store_true", "default": None}
    if field.name == "method":
        return {"choices": list(METHODS)}
    if typing.get_origin(hint) is typing.Literal:
        return {"choices": typing.get_args(hint)}
    if hint in _LISTS:
        return _LISTS[hint]
    return {"type": hint if isinstance(hint, type) else typing.get_args(hint)[0]}


def _described(table: type, name: str) -> str | None:
    """Returns what a class's docstring says of a field, as help of a flag says it."""
    text = inspect.getdoc(table) or ""
    words = re.search(rf"^    {name}: (.*(\n {{8}}.*)*)", text, re.MULTILINE)
    if words is None:
        return None
    # Nobody can type `None`: a flag is left out. Axes are code's.
    described = re.sub(r"`None`\s+for", "by default", words[1].replace("%", "%%"))
    return re.sub(r",\s+`[A-Z]`", "", described)


def _readers(name: str) -> str:
    """Returns which methods a setting is of, unless it is of the usual one."""
    if name not in _FLAGS or name in _DYNAMIC:
        return ""
    readers = [one for one, row in METHODS.items() if name in row.own_settings]
    return f" Of {', '.join(readers)}."


def _default(field: dataclasses.Field[Any], usual: Mapping[str, Any]) -> str:
    """Returns what holds without a flag, unless it says so or the parser does."""
    default = field.default
    is_off = isinstance(default, bool) or default in (None, (), dataclasses.MISSING)
    return "" if is_off or field.name in usual else f" (default: {default})"


def join_settings(path: Path | None, arguments: argparse.Namespace) -> PairConfig:
    """Joins the defaults, a TOML file and the flags, the later ones winning.

    Args:
        path: The file, or `None` for none.
        arguments: The flags by the names of settings; `None` for those not given.

    Raises:
        InputError: If the file or a value is refused, or the method does not read a
            flag that is given.
    """
    method = getattr(arguments, "method", None)
    config = PairConfig()
    if path is not None:
        config = load_config(path, PairConfig, method=method)
    config = config.with_method(method or config.method)
    for name in _given(arguments, [*_OWN, "draft_vocabulary"]):
        # A dynamic tree's settings may come with every pair, whatever drafts.
        if name not in _DYNAMIC:
            config.check_reads(name)
    known = vars(config) | vars(config.own) | vars(config.request)
    return config.with_(**_given(arguments, known))


def with_flags(config: Settings, arguments: argparse.Namespace) -> Settings:
    """Returns settings of which flags have replaced some.

    Args:
        config: A frozen dataclass of frozen dataclasses, one per TOML table.
        arguments: The flags by the names of the inner fields; `None` for those not
            given.

    Raises:
        InputError: If a value is refused.
    """
    sections = {
        name: dataclasses.replace(settings, **_given(arguments, vars(settings)))
        for name, settings in vars(config).items()
    }
    return type(config)(**sections)


def _given(arguments: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Returns the flags of some settings that are given."""
    found = {name: getattr(arguments, name, None) for name in names}
    return {name: value for name, value in found.items() if value is not None}
