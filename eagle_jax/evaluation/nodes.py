"""The drafted nodes and their acceptance: the raw material of its statistics."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from eagle_jax.decoding.speculative import Round
from eagle_jax.errors import InputError
from eagle_jax.evaluation.fields import get
from eagle_jax.evaluation.metrics import Reliability

_DIGITS = 6

TRIED = np.dtype(
    [("depth", int), ("rank", int), ("log_confidence", float), ("is_accepted", bool)]
)
"""The type of a drafted node whose parent was accepted: a trial of its confidence.

Its fields are the depth, 1 for children of the root; the rank among its siblings, 0 for
the most likely, the earlier node first where they tie; the log probability given the
parent, to the draft model; and whether the node was accepted.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifiedTree:
    """One row's tree of one round, on the host.

    Attributes:
        parents: `[N]` int, each node's parent, see `DraftTree`.
        log_values: `[N]` float, the logs of path values, see `DraftTree`.
        is_node: `[N]` bool, false in padding.
        accepted: The accepted nodes from the root's child on, in order.
    """

    parents: np.ndarray
    log_values: np.ndarray
    is_node: np.ndarray
    accepted: Sequence[int]

    @property
    def drafted(self) -> np.ndarray:
        """`[M]` int, the indices of real nodes without the root."""
        return 1 + np.flatnonzero(self.is_node[1:])

    @property
    def depths(self) -> np.ndarray:
        """`[N]` int, each node's distance from the root; 0 in padding."""
        depths = np.zeros(len(self.parents), int)
        for node in self.drafted:
            depths[node] = depths[self.parents[node]] + 1
        return depths

    @property
    def ranks(self) -> np.ndarray:
        """`[N]` int, each node's rank among its siblings, 0 for the most likely."""
        ranks = np.zeros(len(self.parents), int)
        # Stable sorting keeps siblings that tie in node order.
        by_value = np.argsort(-self.log_values, kind="stable")
        seen = np.zeros(len(self.parents), int)
        for node in by_value[self.is_node[by_value]]:
            if node != 0:
                ranks[node] = seen[self.parents[node]]
                seen[self.parents[node]] += 1
        return ranks

    @classmethod
    def of(cls, done: Round) -> "dict[int, VerifiedTree]":
        """Returns the trees of a round by row, but for rows that had ended.

        Args:
            done: The round, of `B` rows, on any device.
        """
        # The distributions of drafts are large, and not looked at.
        tree = dataclasses.replace(done.tree, draft_logits=None)
        tree, acceptance, count = jax.device_get((tree, done.acceptance, done.count))
        rows = count.nonzero()[0].tolist()
        return {row: cls._of_row(tree, acceptance, row) for row in rows}

    @classmethod
    def _of_row(cls, tree: Any, acceptance: Any, row: int) -> "VerifiedTree":
        count = int(acceptance.num_accepted[row])
        return cls(
            parents=np.asarray(tree.parents[row]),
            log_values=np.asarray(tree.log_values[row], np.float64),
            is_node=np.asarray(tree.is_node[row], bool),
            accepted=[int(node) for node in acceptance.path[row][1 : count + 1]],
        )

    @classmethod
    def from_json(cls, record: Any) -> "VerifiedTree":
        """Returns the round that an entry of the field `nodes.trees` holds.

        Raises:
            InputError: If the entry is no round.
        """
        try:
            parents = np.asarray(record["parents"], int)
            values = [-np.inf if x is None else float(x) for x in record["log_values"]]
            accepted = [int(node) for node in record["accepted"]]
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            wanted = "parents, log_values or accepted"
            raise InputError(
                f"`nodes.trees`: a tree lacks {wanted}: {error!r}"
            ) from error
        nodes, log_values = np.arange(parents.size), np.asarray(values)
        path = np.array([0, *accepted])
        is_tree = (
            parents.ndim == 1
            and len(values) == parents.size > 0
            and (parents >= -1).all()
            and (parents < np.maximum(nodes, 0)).all()
            and (path >= 0).all()
            and (path < parents.size).all()
            and (parents[path[1:]] == path[:-1]).all()
        )
        if not is_tree:
            raise InputError(
                "`nodes.trees`: a tree's parents and accepted nodes do not fit"
            )
        return cls(
            parents=parents,
            log_values=log_values,
            is_node=log_values > -np.inf,
            accepted=accepted,
        )

    def to_json(self) -> dict[str, Any]:
        """Returns parents, log values (`None` in padding) and accepted nodes."""
        values = zip(self.log_values.tolist(), self.is_node, strict=True)
        return {
            "parents": self.parents.tolist(),
            "log_values": [round(x, _DIGITS) if known else None for x, known in values],
            "accepted": list(self.accepted),
        }

    def tried(self) -> Iterable[tuple[int, int, float, bool]]:
        """Yields `TRIED` fields of every child of the root and of accepted nodes."""
        path, ranks, nodes = [0, *self.accepted], self.ranks, self.drafted
        for level, parent in enumerate(path, 1):
            children = nodes[self.parents[nodes] == parent].tolist()
            following = path[level] if level < len(path) else None
            for node in children:
                confidence = self.log_values[node] - self.log_values[parent]
                yield level, int(ranks[node]), float(confidence), node == following


def tried_in(trees: Iterable[VerifiedTree]) -> np.ndarray:
    """Returns the tried nodes of some rounds, `[M]` of `TRIED`."""
    return np.array([node for tree in trees for node in tree.tried()], TRIED)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Nodes:
    """The drafted nodes of some rounds, and their acceptance.

    Attributes:
        trees: The trees of all rounds.
    """

    trees: tuple[VerifiedTree, ...]

    @classmethod
    def of(cls, rounds: Iterable[VerifiedTree]) -> "Nodes":
        """Returns the nodes of some rounds, each with the same `N`."""
        return cls(trees=tuple(rounds))

    @classmethod
    def from_json(cls, nodes: Any) -> "Nodes":
        """Returns the nodes that the field `nodes` of a record holds.

        Raises:
            InputError: If it holds something else, or trees of different `N`.
        """
        made = cls.of(map(VerifiedTree.from_json, get(nodes, "trees", list)))
        if len({len(tree.parents) for tree in made.trees}) > 1:
            raise InputError("`nodes.trees` differ in size")
        return made

    def to_json(self) -> dict[str, Any]:
        """Returns the field `nodes` of a record, which `from_json` reads."""
        return {"trees": [tree.to_json() for tree in self.trees]}

    @property
    def size(self) -> int | None:
        """The number of nodes of each tree, `N`; `None` without any."""
        return len(self.trees[0].parents) if self.trees else None

    @property
    def positions(self) -> np.ndarray:
        """`[N]` int, times that each node was accepted, the root's in front."""
        positions = np.zeros(self.size or 1, int)
        for tree in self.trees:
            positions[[0, *tree.accepted]] += 1
        return positions

    @property
    def confidence(self) -> Reliability:
        """The acceptance of tried nodes by their draft probability given the parent."""
        tried = tried_in(self.trees)
        # Rounding in the logarithm may leave a probability just above 1.
        predicted = np.exp(np.minimum(tried["log_confidence"], 0.0))
        return Reliability.of(predicted, tried["is_accepted"])
