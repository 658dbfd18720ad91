"""Checks that other projects can run on their own trees and texts."""

from collections.abc import Sequence

import jax
import numpy as np
import numpy.typing as npt

from eagle_jax.interface.checks import TREE_TYPES
from eagle_jax.tree.structure import NO_PARENT, ROOT, DraftTree

_CONTEXT = 3


def assert_valid_tree(tree: DraftTree) -> None:
    """Checks everything that the package takes for granted about a tree.

    Padding may stand anywhere after the root, between real nodes too. Siblings stand
    in the order of their values, unless they were drawn (`draft_logits` is given).

    >>> import jax.numpy as jnp
    >>> from eagle_jax.tree import root_only
    >>> assert_valid_tree(root_only(jnp.array(7), num_nodes=3))

    Args:
        tree: One tree with concrete values: `tokens` and `parents` `[N]` int32,
            `log_values` `[N]` float32, `is_node` `[N]` bool.

    Raises:
        AssertionError: If the tree breaks a rule; names the node and its values.
    """
    fields = {name: np.asarray(getattr(tree, name)) for name in TREE_TYPES}
    _check_fields(fields)
    tokens, parents, log_values, is_node = fields.values()
    check(
        bool(is_node[ROOT]) and parents[ROOT] == NO_PARENT and log_values[ROOT] == 0,
        f"node {ROOT} must be the root (is_node True, parent {NO_PARENT}, log_value "
        f"0), but has is_node {is_node[ROOT]}, parent {parents[ROOT]}, log_value "
        f"{log_values[ROOT]}",
    )
    is_drawn = tree.draft_logits is not None
    depths = np.zeros(len(tokens), int)
    deepest = ROOT
    last_child: dict[int, int] = {}
    child_of: dict[tuple[int, int], int] = {}
    for node in range(1, len(tokens)):
        token, parent = int(tokens[node]), int(parents[node])
        value = log_values[node]
        if not is_node[node]:
            check(
                token == 0 and parent == NO_PARENT and value == -np.inf,
                f"node {node} is padding and must have token 0, parent {NO_PARENT}, "
                f"log_value -inf, but has token {token}, parent {parent}, log_value "
                f"{value}",
            )
            continue
        check(
            0 <= parent < node,
            f"node {node} has parent {parent}, which must lie in 0 .. {node - 1}",
        )
        check(
            bool(is_node[parent]),
            f"node {node} has parent {parent}, which is padding",
        )
        depths[node] = depths[parent] + 1
        check(
            depths[node] >= depths[deepest],
            f"node {node} of depth {depths[node]} stands after node {deepest} of "
            f"depth {depths[deepest]}: not in level order",
        )
        deepest = node
        twin = child_of.setdefault((parent, token), node)
        check(
            twin == node,
            f"nodes {twin} and {node} are both children of node {parent} with token "
            f"{token}",
        )
        # Negated, so that NaN fails too.
        check(
            bool(value <= log_values[parent]),
            f"node {node} has log_value {value}, above the {log_values[parent]} of "
            f"its parent {parent}",
        )
        sibling = last_child.get(parent, parent)
        check(
            is_drawn or bool(value <= log_values[sibling]),
            f"node {node} has log_value {value}, above the {log_values[sibling]} of "
            f"node {sibling}, an earlier child of node {parent}",
        )
        last_child[parent] = node


def assert_same_tokens(
    actual: Sequence[npt.ArrayLike | jax.Array] | jax.Array | np.ndarray,
    expected: Sequence[npt.ArrayLike | jax.Array] | jax.Array | np.ndarray,
) -> None:
    """Checks that two batches of texts agree token for token.

    >>> assert_same_tokens([[5, 6, 7]], [[5, 6, 8]])
    Traceback (most recent call last):
        ...
    AssertionError: row 0 differs at position 2: actual [5, 6, >7<], expected \
[5, 6, >8<]

    Args:
        actual: One row per text, each `[T]` int32 with its own `T`; a `[B, T]`
            array is a batch of rows too.
        expected: The texts to compare with, in the same form.

    Raises:
        AssertionError: If they differ; names the first differing row and position
            with the tokens around it.
    """
    rows = [[np.asarray(row).tolist() for row in side] for side in (actual, expected)]
    for index, (left, right) in enumerate(zip(*rows, strict=False)):
        if left == right:
            continue
        shared = min(len(left), len(right))
        position = next((i for i in range(shared) if left[i] != right[i]), shared)
        raise AssertionError(
            f"row {index} differs at position {position}: actual "
            f"{_around(left, position)}, expected {_around(right, position)}"
        )
    check(
        len(rows[0]) == len(rows[1]),
        f"actual has {len(rows[0])} rows, expected {len(rows[1])}",
    )


def _check_fields(fields: dict[str, np.ndarray]) -> None:
    """Checks shapes and dtypes, before anything is indexed."""
    shape = (len(fields["tokens"]) if fields["tokens"].ndim else 0,)
    check(shape[0] >= 1, "tokens must have shape [N] with at least the root")
    for name, dtype in TREE_TYPES.items():
        field = fields[name]
        check(
            field.shape == shape and field.dtype == dtype,
            f"{name} must be {np.dtype(dtype)} of shape {shape}, but is "
            f"{field.dtype} of shape {field.shape}",
        )


def _around(row: list[int], position: int) -> str:
    """Returns the tokens around a position, with the position marked."""
    start = max(0, position - _CONTEXT)
    stop = position + _CONTEXT + 1
    shown = ["..."] if start else []
    for index, token in enumerate(row[start:stop], start):
        shown.append(f">{token}<" if index == position else str(token))
    if position == len(row):
        shown.append(">end<")
    if stop < len(row):
        shown.append("...")
    return "[" + ", ".join(shown) + "]"


def check(holds: bool, message: str) -> None:
    """Raises an AssertionError, even under `python -O`, where `assert` is silent."""
    if not holds:
        raise AssertionError(message)
