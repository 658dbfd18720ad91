"""Settings of a command: defaults, then a TOML file, then flags."""

import argparse
import dataclasses
import typing
from pathlib import Path
from typing import Any, TypeVar

from eagle_jax.config import Quantization, load_config

Settings = TypeVar("Settings")


def join_settings(
    kind: type[Settings], path: Path | None, arguments: argparse.Namespace
) -> Settings:
    """Joins the defaults, a TOML file and the flags, the later ones winning.

    Args:
        kind: A frozen dataclass of frozen dataclasses, one per TOML table.
        path: The file, or `None`.
        arguments: Flags by the names of the inner fields; `None` for those not
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


def add_quantization_flag(parser: argparse.ArgumentParser) -> None:
    """Adds `--quantization`."""
    parser.add_argument(
        "--quantization",
        choices=typing.get_args(Quantization),
        help="round the matrices of the target's layers to integers",
    )
