"""Heads of one kind, read and written by their own name."""

import dataclasses
from pathlib import Path
from typing import Any

from eagle_jax.checkpoints import Export
from eagle_jax.heads import HEADS, export_head, open_head


def sizes_in(folder: Path, name: str, *given: Any) -> Any:
    """The sizes of the head in a folder, without its weights."""
    return HEADS[name].read_config(folder, *given)


def read(folder: Path, dtype: str | None = None) -> tuple[Any, Any]:
    """A head as it is stored, without its target."""
    opened = open_head(folder)
    return opened.config, opened.load(None, dtype)


def write(folder: Path, config: Any, params: Any, **how: Any) -> None:
    """Exports a head; `embedding` is the target's table."""
    layout = how.pop("prefix", None)
    if (table := how.pop("embedding", None)) is not None:
        params = dataclasses.replace(params, embedding=table)
    if "with_pt" in how or "with_bin" in how:
        how["with_pickle"] = how.pop("with_pt", how.pop("with_bin", None))
    export_head(folder, config, params, Export(**how), layout)
