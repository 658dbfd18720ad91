"""Settings of a command: defaults, then a TOML file, then flags."""

import argparse
import dataclasses
import inspect
import re
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

from eagle_jax.config import load_config

Settings = TypeVar("Settings")


def add_settings(parser: argparse.ArgumentParser, kind: Any, *names: str) -> None:
    """Adds flags for settings, which are `None` where they are not given.

    Args:
        parser: The parser that gets the flags.
        kind: A frozen dataclass of frozen dataclasses, one per TOML table; a field's
            description in their docstrings is the flag's help.
        names: The names of fields of the inner dataclasses.
    """
    hints = typing.get_type_hints(kind).values()
    tables = [hint for hint in hints if dataclasses.is_dataclass(hint)]
    for name in names:
        table = next(t for t in tables if name in typing.get_type_hints(t))
        hint = typing.get_type_hints(table)[name]
        options: dict[str, Any] = {"type": hint}
        if hint is bool:
            options = {"action": "store_true", "default": None}
        elif typing.get_origin(hint) is typing.Literal:
            options = {"choices": typing.get_args(hint)}
        elif isinstance(hint, types.UnionType):
            options = {"type": typing.get_args(hint)[0]}
        text = inspect.getdoc(table) or ""
        words = re.search(rf"^    {name}: (.*(\n {{8}}.*)*)", text, re.MULTILINE)
        described = words[1].replace("%", "%%") if words else None
        if described:  # Nobody can type `None`: a flag is left out.
            described = re.sub(r"`None`\s+for", "by default", described)
        parser.add_argument(f"--{name.replace('_', '-')}", help=described, **options)


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
        InputError: If the file or a value is refused.
    """
    config: Any = kind() if path is None else load_config(path, kind)
    sections: dict[str, Any] = {}
    for section in dataclasses.fields(config):
        settings = getattr(config, section.name)
        if settings is None:
            continue
        flags = {
            field.name: getattr(arguments, field.name)
            for field in dataclasses.fields(settings)
            if getattr(arguments, field.name, None) is not None
        }
        sections[section.name] = dataclasses.replace(settings, **flags)
    return kind(**sections)
