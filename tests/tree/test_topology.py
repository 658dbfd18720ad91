"""Static shapes: rank paths, parents, who sees whom."""

import hypothesis
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from eagle_jax.tree import EAGLE1_TREE, Topology, ancestor_mask, chain, from_paths
from tests.helpers import refused


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    """A tree grown by hanging a next child on any node, listed in any order."""
    paths: list[tuple[int, ...]] = []
    for _ in range(draw(st.integers(0, 12))):
        above = draw(st.sampled_from([(), *paths]))
        rank = sum(len(path) == len(above) + 1 and path[:-1] == above for path in paths)
        paths.append((*above, rank))
    return from_paths(draw(st.permutations(paths)))


@hypothesis.given(topologies())
@hypothesis.settings(deadline=None)
def test_a_topology_is_a_tree_in_level_order(shape: Topology) -> None:
    parents, depths = shape.parents, shape.depths
    assert parents[0] == -1 and shape.num_nodes == len(parents)
    assert (parents[1:] < np.arange(1, shape.num_nodes)).all()
    assert (np.diff(depths) >= 0).all()
    assert (depths[1:] == depths[parents[1:]] + 1).all()
    for node in range(shape.num_nodes):
        ranks = shape.ranks[parents == node]
        assert ranks.tolist() == list(range(len(ranks)))


@hypothesis.given(topologies())
@hypothesis.settings(deadline=None, max_examples=20)
def test_nodes_see_their_ancestors_and_themselves(shape: Topology) -> None:
    sees, run = np.asarray(ancestor_mask(jnp.asarray(shape.parents))), []
    for level in shape.levels:
        run += level.inner.tolist()
        np.testing.assert_array_equal(level.visible, sees[np.ix_(level.inner, run)])


@hypothesis.given(topologies())
@hypothesis.settings(deadline=None)
def test_inner_nodes_are_those_with_children(shape: Topology) -> None:
    above = np.zeros(1, np.int32)
    for depth, level in enumerate(shape.levels, 1):
        assert (shape.depths[level.nodes] == depth).all()
        np.testing.assert_array_equal(above[level.rows], level.parents)
        parents = shape.parents[level.inner]
        np.testing.assert_array_equal(above[level.inner_rows], parents)
        above = level.inner
    inner = [0] * bool(shape.depth) + [n for x in shape.levels for n in x.inner]
    assert sorted(inner) == shape.inner.tolist() == sorted(set(shape.parents[1:]))


def test_eagle_1s_tree_has_25_nodes_and_root() -> None:
    assert EAGLE1_TREE.num_nodes == 26
    assert EAGLE1_TREE.depth == 5
    levels = np.bincount(EAGLE1_TREE.depths).tolist()
    assert levels == [1, 4, 8, 8, 3, 2]


@pytest.mark.parametrize("length", [0, 1, 7])
def test_a_chain_has_one_node_per_level(length: int) -> None:
    assert chain(length).depths.tolist() == list(range(length + 1))


@pytest.mark.parametrize(
    ("paths", "told"),
    [
        ([(1,), (0,), (1,)], "path = (1,) must be given once"),
        ([(0, 0)], "preceded by"),
        ([(0,), (-1,)], "ranks of 0 to 2**31 - 1"),
        ([(2**31,)], "ranks of 0 to 2**31 - 1"),
    ],
)
def test_what_is_no_tree_is_refused(paths: list[tuple[int, ...]], told: str) -> None:
    refused(lambda: from_paths(paths), told)


def test_a_tree_may_lack_ranks() -> None:
    tree = from_paths([(1,), (1, 3), (0,)])
    assert not tree.has_every_rank
    assert tree.levels[1].width == 4
    assert from_paths([(1,), (1, 0), (0,)]).has_every_rank


def test_paths_out_of_order_are_refused_by_the_class_itself() -> None:
    refused(lambda: Topology(((0, 0), (0,))), "level order")
