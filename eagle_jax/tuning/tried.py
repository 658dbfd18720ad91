"""Settings that are tried, all of them, for methods whose rounds nobody predicts.

What drafts from the text so far has no acceptance per level that was measured once and
holds for other sizes, and a chain has one size: a few settings are run for real. They
reach from what pays on slow machines to what is published.
"""

import dataclasses
from collections.abc import Callable, Sequence

from eagle_jax.config import Method, TreeConfig
from eagle_jax.drafting import find_tree_drafter
from eagle_jax.errors import InputError
from eagle_jax.interface import Drafter
from eagle_jax.tuning.prediction import parse_grid

METHODS: tuple[Method, ...] = ("chain", "lookup", "lookahead", "eagle2+lookup")
"""The methods whose settings are tried."""

_CHAINS = (1, 2, 3, 4, 5, 6, 8, 10)
_LOOKUP = "3/2/1 6/5/1 11/10/1 17/16/1"  # The published chain has 10 tokens.
_NGRAMS = (2, 3, 5)
# Level, window and guesses; the paper's largest, for an A100, are 5/15/15.
_LOOKAHEAD = (
    *((2, 2, 2), (3, 2, 2), (3, 3, 3), (4, 3, 3), (5, 3, 3), (4, 5, 5)),
    *((5, 5, 5), (5, 7, 7), (5, 10, 10), (5, 15, 15)),
)
_SWITCH = "8/7/1 10/4/4 26/6/4 60/6/10"
_MATCHES = (3, 5, 8)


def settings(
    method: Method, trees: Sequence[TreeConfig] | None = None
) -> list[TreeConfig]:
    """Returns the settings of a method that are tried.

    Args:
        method: The method, one of `METHODS`.
        trees: Instead of the method's own trees: those of lookup and eagle2+lookup.
    """
    if method == "chain":
        return [TreeConfig(depth=depth) for depth in _CHAINS]
    if method == "lookahead":
        return [
            TreeConfig(level=level, window=window, guesses=guesses)
            for level, window, guesses in _LOOKAHEAD
        ]
    own, name, values = {
        "lookup": (_LOOKUP, "max_ngram", _NGRAMS),
        "eagle2+lookup": (_SWITCH, "min_match", _MATCHES),
    }[method]
    return [
        dataclasses.replace(tree, **{name: value})
        for tree in trees or parse_grid(own)
        for value in values
    ]


def fitting(
    given: Sequence[TreeConfig],
    drafter_of: Callable[[TreeConfig], Drafter],
    *,
    max_nodes: int,
    max_depth: int | None,
) -> list[TreeConfig]:
    """Returns the settings whose trees are no larger than allowed.

    Args:
        given: The settings.
        drafter_of: The function from settings to their drafter.
        max_nodes: The largest number of nodes, root included.
        max_depth: The largest depth; `None` for any. Copies of eagle2+lookup may be
            longer.

    Raises:
        InputError: If there are none.
    """
    found = []
    for tree in given:
        drafter = drafter_of(tree)
        drafter = find_tree_drafter(drafter) or drafter
        num_nodes = getattr(drafter, "num_nodes", 1)
        if num_nodes <= max_nodes and drafter.depth <= (max_depth or drafter.depth):
            found.append(tree)
    if not found:
        raise InputError(
            f"no settings that are tried have --max-nodes {max_nodes} or fewer"
            + ("" if max_depth is None else f" and --max-depth {max_depth} or less")
            + "; raise it"
        )
    return found
