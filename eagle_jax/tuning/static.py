"""Static trees for a pair, from how often its drafts of each depth and rank are right.

A wide tree is drafted round by round; the nodes that were tried in it, those whose
parent was accepted, say how often each depth and rank is right. From these rates
follows the best static tree of every size (`optimal_topology`).
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from eagle_jax.decoding.speculative import Round
from eagle_jax.drafting import TreeDrafter
from eagle_jax.errors import InputError
from eagle_jax.interface import Drafter
from eagle_jax.tree import RECYCLING_TREE, Topology, from_paths, optimal_topology
from eagle_jax.tuning.contest import NO_ROUNDS, Contest

MAX_DEPTH = 8
"""The deepest trees: deeper ones are hardly ever accepted, and take long to record."""

_FEWEST_NODES = 8
_COUNT = 5  # The sizes of trees that are run for real.
_WIDTH = 10  # Medusa's TOPK: the ranks that published trees have.
_MOST_RECORDED = 256  # Nodes, which the target verifies in every recorded round.


def recorded_tree(drafter: Drafter, max_depth: int) -> Topology:
    """Returns the tree that is drafted to measure rates.

    Args:
        drafter: The drafter, of any tree. Heads that draft a level each end it, and
            Token Recycling fills its matrix from all that is drafted, so that a wider
            tree than its own would make it better than it is.
        max_depth: The largest depth, at most `MAX_DEPTH`.
    """
    if isinstance(drafter, TreeDrafter):
        return widest_tree(min(drafter.model.max_levels or max_depth, max_depth))
    return RECYCLING_TREE.cut(max_depth)


def widest_tree(depth: int) -> Topology:
    """Returns the widest `wide_tree` of up to 256 nodes, for any depth allowed."""
    trees = (wide_tree(depth, width) for width in range(_WIDTH, 0, -1))
    return next(tree for tree in trees if tree.num_nodes <= _MOST_RECORDED)


def wide_tree(depth: int, width: int) -> Topology:
    """Returns the tree whose nodes' ranks, each plus one, multiply to `width` at most.

    >>> wide_tree(2, width=3).paths
    ((0,), (1,), (2,), (0, 0), (0, 1), (0, 2), (1, 0), (2, 0))

    Args:
        depth: The number of levels.
        width: The number of children of the root.
    """
    level: list[tuple[int, ...]] = [()]
    paths: list[tuple[int, ...]] = []
    for _ in range(depth):
        level = [
            (*path, rank)
            for path in level
            for rank in range(width // math.prod(r + 1 for r in path))
        ]
        paths += level
    return from_paths(paths)


def count_tried(rounds: Sequence[Round], tree: Topology) -> tuple[np.ndarray, ...]:
    """Counts a static tree's nodes by depth and rank.

    Args:
        rounds: The rounds, of `B` rows each, on any device.
        tree: The tree that was drafted in them.

    Returns:
        Two arrays `[D, K]` int, depth 1 and rank 0 first: how many nodes were accepted,
        and how many were tried: their parent was accepted.
    """
    parents, ranks, depths = tree.parents, tree.ranks, tree.depths
    accepted = np.zeros((tree.depth, int(ranks.max(initial=0)) + 1), int)
    tried = np.zeros_like(accepted)
    for done in rounds:
        paths = np.asarray(done.acceptance.path)
        lengths = np.asarray(done.acceptance.num_accepted)
        for row in np.flatnonzero(np.asarray(done.count)):
            path = paths[row, : lengths[row] + 1]
            children = np.flatnonzero(np.isin(parents, path))
            np.add.at(tried, (depths[children] - 1, ranks[children]), 1)
            np.add.at(accepted, (depths[path[1:]] - 1, ranks[path[1:]]), 1)
    return accepted, tried


def measure_rates(contest: Contest, tree: Topology) -> np.ndarray:
    """Returns how often drafts are right by depth and rank, `[D, K]` float64.

    Args:
        contest: The pair and its prompts.
        tree: The tree that is drafted, wide enough for all that is to be found.

    Raises:
        InputError: If no text has a second token.
    """
    runner = dataclasses.replace(contest.plain, drafter=contest.drafter_of(tree))
    rounds: list[Round] = []
    with contest.progress("recording", len(contest.prompts)) as done:
        for start in range(0, len(contest.prompts), runner.batch_size):
            batch = contest.prompts[start : start + runner.batch_size]
            seeds = list(range(start, start + len(batch)))
            found = runner.rounds(batch, seeds)
            rounds += [each.round for each in found if each.round is not None]
            done(start + len(batch))
    if not rounds:
        raise InputError(NO_ROUNDS)
    accepted, tried = count_tried(rounds, tree)
    # What was never tried was never reached: no node there is worth anything.
    return accepted / np.maximum(tried, 1)


def static_trees(
    rates: np.ndarray, *, max_nodes: int, count: int = _COUNT
) -> list[Topology]:
    """Returns the best static trees of some sizes, in equal ratios from 8 nodes on.

    Args:
        rates: `[D, K]` float, how often drafts are right by depth and rank.
        max_nodes: The largest number of nodes, root included.
        count: The number of sizes.

    Returns:
        Trees that all differ, the smallest first.
    """
    fewest = min(_FEWEST_NODES, max_nodes)
    sizes = np.geomspace(fewest, max_nodes, count).round().astype(int)
    trees = [optimal_topology(rates.tolist(), size) for size in sizes.tolist()]
    return list(dict.fromkeys(trees))
