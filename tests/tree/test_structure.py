import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_jax import tree as trees
from eagle_jax.testing.asserts import assert_valid_tree
from tests import reference

ancestor_mask = jax.jit(trees.ancestor_mask)


@st.composite
def parent_lists(draw: st.DrawFn, num_nodes: int) -> list[int]:
    """Any parents before their children; -1 is padding, in any place."""
    return [-1, *(draw(st.integers(-1, node - 1)) for node in range(1, num_nodes))]


def check_mask(parents: list[int]) -> None:
    mask = np.asarray(ancestor_mask(jnp.array(parents, jnp.int32)))
    assert mask.dtype == bool
    seen = [set(np.flatnonzero(row).tolist()) for row in mask]
    assert seen == [reference.ancestors(parents, node) for node in range(len(parents))]


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 8, 17])
@given(data=st.data())
@settings(max_examples=30, deadline=None, derandomize=True)
def test_mask_is_the_reflexive_transitive_closure(num_nodes, data):
    check_mask(data.draw(parent_lists(num_nodes)))


@pytest.mark.parametrize("num_nodes", [1, 2, 8])
def test_root_only_is_a_root_and_padding(num_nodes):
    tree = trees.root_only(jnp.array(7, jnp.int32), num_nodes)
    assert_valid_tree(tree)
    assert tree.tokens.shape == (num_nodes,)
    assert tree.tokens[0] == 7
    assert tree.is_node.sum() == 1
