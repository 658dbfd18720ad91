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


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 8, 17])
def test_mask_of_a_chain_that_fills_every_slot_is_lower_triangular(num_nodes):
    mask = ancestor_mask(jnp.arange(-1, num_nodes - 1, dtype=jnp.int32))
    np.testing.assert_array_equal(mask, np.tri(num_nodes, dtype=bool))


def test_padding_sees_only_itself():
    mask = ancestor_mask(jnp.array([-1, 0, -1, 1, -1], jnp.int32))
    np.testing.assert_array_equal(mask[2], np.arange(5) == 2)
    np.testing.assert_array_equal(mask[4], np.arange(5) == 4)


def test_no_row_of_the_mask_is_empty():
    assert ancestor_mask(jnp.full(8, -1, jnp.int32)).any(axis=1).all()


def test_siblings_do_not_see_each_other():
    mask = ancestor_mask(jnp.array([-1, 0, 0, 1, 1, 2], jnp.int32))
    assert not mask[1, 2] and not mask[2, 1]
    assert not mask[3, 4] and not mask[4, 3]
    assert not mask[5, 1]


@pytest.mark.parametrize("variant", ["jit", "eager"])
def test_jit_and_eager_see_the_same(variant):
    parents = [-1, 0, 0, 1, 3, -1, 4]
    run = ancestor_mask if variant == "jit" else trees.ancestor_mask
    mask = np.asarray(run(jnp.array(parents, jnp.int32)))
    seen = [set(np.flatnonzero(row).tolist()) for row in mask]
    assert seen == [reference.ancestors(parents, node) for node in range(7)]


@pytest.mark.parametrize("num_nodes", [1, 2, 8])
def test_root_only_is_a_root_and_padding(num_nodes):
    tree = trees.root_only(jnp.array(7, jnp.int32), num_nodes)
    assert_valid_tree(tree)
    assert tree.tokens.shape == (num_nodes,)
    assert tree.tokens[0] == 7
    assert tree.is_node.sum() == 1


@pytest.mark.parametrize(
    ("depth", "width", "count"), [(1, 1, 1), (1, 3, 3), (2, 3, 12), (4, 1, 4)]
)
def test_empty_candidates_do_not_exist(depth, width, count):
    candidates = trees.empty_candidates(depth, width)
    assert all(field.shape == (count,) for field in vars(candidates).values())
    assert (candidates.log_values == -jnp.inf).all()
    assert (candidates.log_confidences == -jnp.inf).all()
    assert not candidates.is_expanded.any()
