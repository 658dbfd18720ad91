"""What others check their own stack with names what is wrong."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax import tree as trees
from eagle_jax.testing.asserts import assert_same_tokens, assert_valid_tree


def small_tree() -> trees.DraftTree:
    """A root, two children, a hole, a child of node 1 and one of node 2."""
    return trees.DraftTree(
        tokens=jnp.array([3, 5, 7, 0, 8, 8], jnp.int32),
        parents=jnp.array([-1, 0, 0, -1, 1, 2], jnp.int32),
        log_values=jnp.array([0.0, -1.0, -1.5, -jnp.inf, -1.0, -3.0], jnp.float32),
        is_node=jnp.array([True, True, True, False, True, True]),
    )


def test_a_valid_tree_may_have_holes_and_certain_children():
    assert_valid_tree(small_tree())


@pytest.mark.parametrize(
    ("field", "node", "value", "message"),
    [
        ("parents", 0, 0, "node 0 must be the root"),
        ("is_node", 0, False, "node 0 must be the root"),
        ("log_values", 0, -1.0, "node 0 must be the root"),
        ("parents", 2, -1, "node 2 has parent -1"),
        ("parents", 4, 4, "node 4 has parent 4"),
        ("parents", 4, 5, "node 4 has parent 5"),
        ("parents", 5, 3, "node 5 has parent 3, which is padding"),
        ("parents", 5, 0, "node 5 of depth 1 stands after node 4 of depth 2"),
        ("tokens", 2, 5, "nodes 1 and 2 are both children of node 0 with token 5"),
        ("log_values", 4, -0.5, "node 4 has log_value -0.5, above the -1.0"),
        ("log_values", 4, np.nan, "node 4 has log_value nan"),
        ("log_values", 2, -0.5, "node 2 has log_value -0.5, above the -1.0 of node 1"),
        ("tokens", 3, 1, "node 3 is padding"),
        ("parents", 3, 0, "node 3 is padding"),
        ("log_values", 3, 0.0, "node 3 is padding"),
        ("is_node", 3, True, "node 3 has parent -1"),
    ],
)
def test_a_broken_tree_is_named_by_node_and_value(field, node, value, message):
    tree = small_tree()
    broken = {field: getattr(tree, field).at[node].set(value)}
    with pytest.raises(AssertionError, match=message):
        assert_valid_tree(dataclasses.replace(tree, **broken))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tokens", np.zeros(6, np.int64)),
        ("parents", np.zeros(5, np.int32)),
        ("log_values", np.zeros(6, np.float64)),
        ("is_node", np.ones(6, np.int32)),
        ("tokens", np.int32(0)),
    ],
)
def test_a_tree_of_wrong_shape_or_dtype_is_refused(field, value):
    with pytest.raises(AssertionError, match="tokens|" + field):
        assert_valid_tree(dataclasses.replace(small_tree(), **{field: value}))


def test_equal_tokens_pass_whatever_holds_them():
    assert_same_tokens([], [])
    assert_same_tokens([[1, 2], []], [np.array([1, 2]), ()])
    assert_same_tokens([[1, 2], [3, 4]], list(jnp.array([[1, 2], [3, 4]])))


@pytest.mark.parametrize(
    ("actual", "expected", "message"),
    [
        ([[1], [1, 2, 3]], [[1], [1, 9, 3]], r"row 1 .* position 1: .*\[1, >2<, 3\]"),
        ([[1, 2]], [[1, 2, 3]], r"position 2: .*\[1, 2, >end<\], .*\[1, 2, >3<\]"),
        ([[]], [[4]], r"row 0 differs at position 0: .*\[>end<\], .*\[>4<\]"),
        ([[1]], [[1], [2]], "actual has 1 rows, expected 2"),
        (
            [list(range(20))],
            [[*range(10), 99, *range(11, 20)]],
            r"\[\.\.\., 7, 8, 9, >10<, 11, 12, 13, \.\.\.\]",
        ),
    ],
)
def test_the_first_difference_is_named(actual, expected, message):
    with pytest.raises(AssertionError, match=message):
        assert_same_tokens(actual, expected)
