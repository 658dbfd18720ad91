"""The settings that are tried.

They reach from what pays on slow machines to what is published.
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from eagle_jax.config import DecodingConfig, TreeConfig
from eagle_jax.errors import InputError
from eagle_jax.methods import METHODS, Method


def settings(method: Method, given: Sequence[TreeConfig] | None = None) -> list[Any]:
    """Returns the settings of a method that are tried.

    Args:
        method: The method.
        given: Trees that are tried instead of the method's own, of methods that read
            `num_nodes`: each with every other setting that is tried.
    """
    trials = list(method.trials)
    if given is None:
        return trials
    sizes = ("num_nodes", "depth", "width")
    found = [
        dataclasses.replace(trial, **{name: getattr(tree, name) for name in sizes})
        for tree in given
        for trial in trials
    ]
    return list(dict.fromkeys(found))


def parse_grid(text: str) -> list[TreeConfig]:
    """Reads trees written as `num_nodes/depth/width`, separated by blanks.

    >>> [show(tree) for tree in parse_grid("8/7/1 60/6/10")]
    ['8/7/1', '60/6/10']

    Raises:
        InputError: If there is no tree, or one is written otherwise or drafts nothing.
    """
    trees: list[TreeConfig] = []
    for part in text.split():
        sizes = re.fullmatch(r"(\d{1,10})/(\d{1,10})/(\d{1,10})", part)
        if sizes is None:
            raise InputError(
                f"`grid` {part[:99]!r} must be num_nodes/depth/width, such as 8/7/1"
            )
        nodes, depth, width = map(int, sizes.groups())
        tree = TreeConfig(num_nodes=nodes, depth=depth, width=width)
        if tree.levels < 1:
            raise InputError(
                f"`grid` {part} drafts nothing: give num_nodes >= 2 and depth >= 1"
            )
        if tree not in trees:
            trees.append(tree)
    if not trees:
        raise InputError('`grid` is empty; give settings such as "8/7/1 10/9/1"')
    return trees


def sizes(method: Method) -> list[str]:
    """Returns the names of the numbers that a method reads, those of a tree first."""
    default = method.settings()
    return [name for name in method.own_settings if type(getattr(default, name)) is int]


def show(tree: Any, method: Method = METHODS[DecodingConfig.method]) -> str:
    """Returns a method's `sizes` as `parse_grid` reads them."""
    return "/".join(str(getattr(tree, name)) for name in sizes(method))
