"""Static trees from measured rates."""

import itertools
import json
import math
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.checkpoints.draft_files import read_choices
from eagle_jax.config import DecodingConfig, load_config
from eagle_jax.decoding.speculative import Round
from eagle_jax.drafting import RecyclingDrafter
from eagle_jax.generation.config import GenerateConfig
from eagle_jax.tree import (
    EAGLE1_TREE,
    RECYCLING_TREE,
    Acceptance,
    chain,
    from_paths,
    root_only,
)
from eagle_jax.tuning import static
from eagle_jax.tuning.contest import Trial, settings_file


@pytest.mark.parametrize(("depth", "width"), [(1, 1), (1, 10), (3, 1), (4, 6)])
def test_a_wide_tree_has_every_path_whose_ranks_multiply_to_its_width(depth, width):
    wanted = {
        path
        for level in range(1, depth + 1)
        for path in itertools.product(range(width), repeat=level)
        if math.prod(rank + 1 for rank in path) <= width
    }
    assert set(static.wide_tree(depth, width).paths) == wanted


def test_the_recorded_tree_is_small_at_every_depth():
    for depth in range(1, static.MAX_DEPTH + 1):
        tree = static.widest_tree(depth)
        assert tree.depth == depth
        assert depth < tree.num_nodes <= 256


@pytest.mark.parametrize("depth", [1, 3, 8])
def test_recyclings_rates_are_those_of_its_own_tree(depth):
    tree = static.recorded_tree(RecyclingDrafter(vocab_size=9), depth)
    assert tree.depth == min(depth, RECYCLING_TREE.depth)
    assert set(tree.paths) <= set(RECYCLING_TREE.paths)
    assert tree.ranks.max() == RECYCLING_TREE.ranks.max()


def test_nodes_are_tried_where_their_parent_was_accepted():
    tree = from_paths([(0,), (1,), (0, 0), (1, 0), (1, 1), (1, 1, 0)])
    paths = [[0, 2, 5, 5], [0, 0, 0, 0], [0, 1, 3, 3]]
    done = Round(
        tree=root_only(jnp.int32(0), tree.num_nodes),
        acceptance=Acceptance(
            path=jnp.array(paths),
            num_accepted=jnp.array([2, 0, 2]),
            next_token=jnp.zeros(3, jnp.int32),
        ),
        tokens=jnp.zeros((3, 4), jnp.int32),
        count=jnp.array([3, 1, 0]),  # The last row had ended.
    )
    accepted, tried = static.count_tried([done, done], tree)
    np.testing.assert_array_equal(tried, [[4, 4], [2, 2], [2, 0]])
    np.testing.assert_array_equal(accepted, [[0, 2], [0, 2], [0, 0]])


def test_trees_keep_the_paths_that_are_most_often_right():
    rates = np.array([[0.5, 0.25], [0.5, 0.0]])
    (tree,) = static.static_trees(rates, max_nodes=4, count=2)
    assert tree == from_paths([(0,), (1,), (0, 0)])


@pytest.mark.parametrize(("max_nodes", "count"), [(2, 1), (8, 3), (64, 1), (64, 5)])
def test_trees_have_sizes_from_eight_nodes_to_the_largest(max_nodes, count):
    rates = np.full((8, 10), 0.09)
    sizes = [
        tree.num_nodes
        for tree in static.static_trees(rates, max_nodes=max_nodes, count=count)
    ]
    assert sizes == sorted(set(sizes))
    assert len(sizes) == (count if max_nodes > 8 else 1)
    assert sizes[0] == min(8, max_nodes)
    assert count == 1 or sizes[-1] == max_nodes


def test_a_static_tree_can_be_generated_with(tmp_path: Path):
    (tree,) = static.static_trees(np.full((5, 4), 0.2), max_nodes=8, count=1)
    choices = tmp_path / "tuned.choices.json"
    text = settings_file(
        Trial(tree=tree, tokens_per_round=2.0, speedup=1.5, measurements=1),
        GenerateConfig(decoding=DecodingConfig(method="medusa")),
        choices=str(choices),
        comments=(),
    )
    (tmp_path / "tuned.toml").write_text(text)
    choices.write_text(json.dumps(tree.paths))
    config = load_config(tmp_path / "tuned.toml", GenerateConfig)
    assert config.decoding.method == "medusa"
    assert read_choices(config.tree.choices, EAGLE1_TREE) == tree != chain(1)
