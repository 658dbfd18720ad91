"""The trees and the settings that are tried, of methods whose tree is not static.

They reach from what pays on slow machines to what is published.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence

from eagle_jax.config import Method, TreeConfig
from eagle_jax.errors import InputError
from eagle_jax.generation.methods import SETTINGS
from eagle_jax.tree import Topology

_TREES = (
    "3/2/1 5/4/1 8/7/1 6/3/2 10/5/2 16/7/2 10/4/4 16/5/4 26/6/4 32/6/6 48/7/6 60/6/10"
)
_CHAINS = (1, 2, 3, 4, 5, 6, 8, 10)
# Level, window and guesses; the paper's largest, for an A100, are 5/15/15.
_LOOKAHEAD = (
    (2, 2, 2),
    (3, 2, 2),
    (3, 3, 3),
    (4, 3, 3),
    (5, 3, 3),
    (4, 5, 5),
    (5, 5, 5),
    (5, 7, 7),
    (5, 10, 10),
    (5, 15, 15),
)
# Trees, and the setting that each of them is tried with several values of. The
# published chain of lookup has 10 tokens.
_VARIED: Mapping[Method, tuple[str, str, tuple[int, ...]]] = {
    "lookup": ("3/2/1 6/5/1 11/10/1 17/16/1", "max_ngram", (2, 3, 5)),
    "eagle2+lookup": ("8/7/1 10/4/4 26/6/4 60/6/10", "min_match", (3, 5, 8)),
}


def settings(
    method: Method, given: Sequence[TreeConfig] | None = None
) -> list[TreeConfig]:
    """Returns the settings of a method that are tried.

    Args:
        method: The method, one whose tree is not static.
        given: Trees that are tried instead of the method's own, of methods that read
            `num_nodes`.
    """
    if method == "chain":
        return [TreeConfig(depth=depth) for depth in _CHAINS]
    if method == "lookahead":
        return [
            TreeConfig(level=level, window=window, guesses=guesses)
            for level, window, guesses in _LOOKAHEAD
        ]
    if method not in _VARIED:
        return list(given or parse_grid(_TREES))
    own, name, values = _VARIED[method]
    return [
        dataclasses.replace(tree, **{name: value})
        for tree in given or parse_grid(own)
        for value in values
    ]


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
    default = TreeConfig()
    return [
        name for name in SETTINGS[method] if type(getattr(default, name, None)) is int
    ]


def show(tree: TreeConfig | Topology, method: Method = "eagle2") -> str:
    """Returns a method's `sizes` as `parse_grid` reads them; no width if static."""
    if isinstance(tree, Topology):
        return f"{tree.num_nodes}/{tree.depth}"
    return "/".join(str(getattr(tree, name)) for name in sizes(method))
