"""Static trees: the same shape in every round, whatever the draft thinks (EAGLE-1).

A topology is a list of *rank paths*: `(0, 2)` is the third child of the root's first
child. Ranks count a node's children in the order in which they are drafted, from the
most likely on, or in the order in which they were sampled.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from eagle_jax.config import require
from eagle_jax.tree.structure import NO_PARENT

RankPath = tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Level:
    """One drafted level of a static tree: its nodes, and those that are expanded next.

    Attributes:
        nodes: `[M]` int32, the nodes of this level, ascending.
        ranks: `[M]` int32, each node's rank among its siblings, 0 first.
        parents: `[M]` int32, each node's parent.
        rows: `[M]` int32, the index of each node's parent in the level above's `inner`.
        inner: `[I]` int32, the nodes of this level that have children, ascending.
        inner_rows: `[I]` int32, the entries of `rows` of those inner nodes.
        visible: `[I, U]` bool: which inner nodes of levels 1 up to this one, oldest
            first, each inner node sees: its ancestors and itself.
    """

    nodes: np.ndarray
    ranks: np.ndarray
    parents: np.ndarray
    rows: np.ndarray
    inner: np.ndarray
    inner_rows: np.ndarray
    visible: np.ndarray

    @property
    def width(self) -> int:
        """The number of children of the parent that has most of them."""
        return int(self.ranks.max()) + 1


@dataclasses.dataclass(frozen=True)
class Topology:
    """The shape of a static tree; everything here is static.

    Attributes:
        paths: The drafted nodes' rank paths, level by level and, inside a level, in
            the order of their ranks; all ancestors of every node are among them. The
            root's path is empty and left out.

    Raises:
        InputError: If paths are missing, repeated or out of order; `from_paths` takes
            them in any order.
    """

    paths: tuple[RankPath, ...]

    def __post_init__(self) -> None:
        """Refuses paths that form no tree."""
        known = {(), *self.paths}
        for one, other in itertools.pairwise(sorted(self.paths)):
            require(one != other, "path", one, "given once, not twice")
        in_order = tuple(sorted(self.paths, key=_level_order)) == self.paths
        require(in_order, "paths", self.paths, "in level order")
        for path in self.paths:
            is_int32 = min(path) >= 0 and max(path) < 2**31
            require(is_int32, "path", path, "ranks of 0 to 2**31 - 1")
            require(path[:-1] in known, "path", path, f"preceded by {path[:-1]}")

    @property
    def num_nodes(self) -> int:
        """The number of nodes, root included, `N`."""
        return len(self.paths) + 1

    @property
    def depth(self) -> int:
        """The depth of the deepest node, `D`; 0 for the root alone."""
        return max(map(len, self.paths), default=0)

    @property
    def parents(self) -> np.ndarray:
        """`[N]` int32, each node's parent; `NO_PARENT` for the root."""
        node_of = {path: node for node, path in enumerate(((), *self.paths))}
        above = [node_of[path[:-1]] for path in self.paths]
        return np.array([NO_PARENT, *above], np.int32)

    @property
    def ranks(self) -> np.ndarray:
        """`[N]` int32, each node's rank among its siblings; 0 for the root."""
        return np.array([0, *(path[-1] for path in self.paths)], np.int32)

    @property
    def depths(self) -> np.ndarray:
        """`[N]` int32, each node's depth; 0 for the root."""
        return np.array([0, *map(len, self.paths)], np.int32)

    def cut(self, depth: int) -> "Topology":
        """Returns the topology of the nodes that are no deeper than `depth`."""
        return Topology(tuple(path for path in self.paths if len(path) <= depth))

    @property
    def has_every_rank(self) -> bool:
        """Whether every node's siblings of lower rank are in the tree."""
        known = set(self.paths)
        return all(p[-1] == 0 or (*p[:-1], p[-1] - 1) in known for p in known)

    @property
    def inner(self) -> np.ndarray:
        """`[J]` int32, the nodes that have children, ascending."""
        return np.unique(self.parents[1:])

    @functools.cached_property
    def levels(self) -> tuple[Level, ...]:
        """The `D` drafted levels, the root's children first."""
        parents, ranks, depths = self.parents, self.ranks, self.depths
        sees = np.eye(self.num_nodes, dtype=bool)
        for node in range(1, self.num_nodes):
            sees[node] |= sees[parents[node]]
        above, found = np.zeros(1, np.int32), []
        run = self.inner[1:]  # The draft reads the root before it drafts.
        for level in range(1, self.depth + 1):
            nodes = np.flatnonzero(depths == level).astype(np.int32)
            inner = run[depths[run] == level]
            found.append(
                Level(
                    nodes=nodes,
                    ranks=ranks[nodes],
                    parents=parents[nodes],
                    rows=np.searchsorted(above, parents[nodes]).astype(np.int32),
                    inner=inner,
                    inner_rows=np.searchsorted(above, parents[inner]).astype(np.int32),
                    visible=sees[np.ix_(inner, run[depths[run] <= level])],
                )
            )
            above = inner
        return tuple(found)


def from_paths(paths: Iterable[Sequence[int]]) -> Topology:
    """Returns the topology of these rank paths, given in any order.

    >>> from_paths([(0, 0), (1,), (0,)]).parents
    array([-1,  0,  0,  1], dtype=int32)

    Raises:
        InputError: If an ancestor is missing, or a path is repeated.
    """
    return Topology(tuple(sorted((tuple(path) for path in paths), key=_level_order)))


def from_counts(counts: Mapping[str, int]) -> Topology:
    """Returns the topology whose nodes have so many children.

    >>> from_counts({"": 3, "0": 2, "00": 1}).paths
    ((0,), (1,), (2,), (0, 0), (0, 1), (0, 0, 0))

    Args:
        counts: The number of children by the node's rank path, a digit per rank; the
            ranks of a node's children are 0, 1, ....

    Raises:
        InputError: If the children of a node are listed, but not the node.
    """
    return from_paths(
        (*map(int, path), rank)
        for path, count in counts.items()
        for rank in range(count)
    )


def chain(length: int) -> Topology:
    """Returns a chain of `length` drafted tokens."""
    return Topology(tuple((0,) * depth for depth in range(1, length + 1)))


def _level_order(path: RankPath) -> tuple[int, RankPath]:
    return len(path), path


EAGLE1_TREE = from_counts(
    {"": 4}
    | {"0": 3, "1": 2, "2": 2, "3": 1}
    | {"00": 3, "01": 2, "02": 2, "10": 1}
    | {"000": 3, "0000": 2}
)
"""The 25 drafted nodes of EAGLE-1 (Figure 9), five levels deep."""

MEDUSA_TREE = from_counts(
    {"": 10}
    | {"0": 10, "1": 7, "2": 3, "3": 2, **dict.fromkeys("456789", 1)}
    | {"00": 10, "01": 3, "02": 2, "10": 2}
    | dict.fromkeys(("03", "04", "05", "06", "07", "20"), 1)
    | {"000": 2}
)
"""The 63 drafted nodes of Medusa, four levels deep; Hydra drafts the same."""

RECYCLING_TREE = from_counts(
    {"": 8}
    | {"0": 8, "1": 4, "2": 3, "3": 2, **dict.fromkeys("4567", 1)}
    | {"00": 8, "01": 3, "02": 2, "10": 2}
    | dict.fromkeys(("03", "04", "05", "06", "07"), 1)
    | dict.fromkeys(("11", "20", "30", "40", "50"), 1)
    | {"000": 5, "001": 2}
    | dict.fromkeys(("002", "003", "004", "010", "020"), 1)
    | dict.fromkeys(("100", "200", "300"), 1)
    | {"0000": 3}
    | dict.fromkeys(("0001", "0002", "0010", "0100", "1000"), 1)
    | {"00000": 2, "00010": 1}
)
"""The 80 drafted nodes of Token Recycling, six levels deep."""

STATIC_TREES: Mapping[str, Topology] = {
    "eagle1_25": EAGLE1_TREE,
    "mc_sim_7b_63": MEDUSA_TREE,
    "recycling_80": RECYCLING_TREE,
}
"""Published static trees by name and number of drafted nodes."""
