import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_jax import tree as trees
from tests import reference
from tests.helpers import as_tree

flatten = jax.jit(trees.flatten)

NUM_NODES = 8


@given(
    seed=st.integers(0, 2**32 - 1),
    vocab_size=st.sampled_from([1, 5]),
    length=st.integers(0, 10_000),
)
@settings(max_examples=30, deadline=None, derandomize=True)
def test_flat_tree_is_that_of_the_judge(seed, vocab_size, length):
    judged = reference.expand(reference.tied_draft(seed, vocab_size), depth=4, width=3)
    paths = reference.rerank(judged, num_nodes=NUM_NODES)
    count = len(paths)
    tree = as_tree(paths, NUM_NODES)
    positions, mask = flatten(tree, jnp.array(length, jnp.int32))
    np.testing.assert_array_equal(positions[:count], reference.positions(paths, length))
    np.testing.assert_array_equal(mask[:count, :count], reference.visible(paths))


def test_padding_stands_at_the_root_and_sees_only_itself():
    tree = as_tree([(), (4,), (4, 4)], 5)
    positions, mask = flatten(tree, jnp.array(6, jnp.int32))
    np.testing.assert_array_equal(positions, [6, 7, 8, 6, 6])
    np.testing.assert_array_equal(mask[3:], np.eye(5, dtype=bool)[3:])
    assert not mask[:3, 3:].any()


@pytest.mark.parametrize("num_nodes", [1, 4])
def test_a_root_alone_is_plain_decoding(num_nodes):
    tree = trees.root_only(jnp.array(7, jnp.int32), num_nodes)
    positions, mask = flatten(tree, jnp.array(0, jnp.int32))
    assert positions[0] == 0
    np.testing.assert_array_equal(mask, np.eye(num_nodes, dtype=bool))
