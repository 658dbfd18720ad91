"""The drafted nodes and their acceptance: the raw material of its statistics."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from eagle_jax.decoding.speculative import Round
from eagle_jax.errors import InputError
from eagle_jax.evaluation import fields
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
        rounds: The number of rounds.
        tried: `[M]` of `TRIED`, the nodes whose parent was accepted.
        positions: `[N]` int, times that each node of a static tree was accepted, the
            root's in front; `None` where there was no round or it was not recorded.
    """

    rounds: int
    tried: np.ndarray
    positions: np.ndarray | None

    @classmethod
    def of(cls, rounds: Sequence[VerifiedTree]) -> "Nodes":
        """Returns the nodes of some rounds, each with the same `N`."""
        positions = np.zeros(len(rounds[0].parents) if rounds else 1, int)
        for done in rounds:
            positions[[0, *done.accepted]] += 1
        return cls(
            rounds=len(rounds),
            tried=tried_in(rounds),
            positions=positions if rounds else None,
        )

    @classmethod
    def from_json(cls, nodes: Any) -> "Nodes":
        """Returns the nodes that the field `nodes` of a record holds.

        Raises:
            InputError: If a part of the field is missing or holds something else.
        """
        columns = fields.columns(nodes, "tried", TRIED.names or ())
        tried = np.zeros(len(columns[0]), TRIED)
        for name, column in zip(TRIED.names or (), columns, strict=True):
            tried[name] = column
        if (tried["depth"] < 1).any() or (tried["rank"] < 0).any():
            raise InputError("`nodes.tried` holds a depth below 1 or a rank below 0")
        # With every tried node its ancestors and more likely siblings were tried, too.
        if max(tried[name].max(initial=0) for name in ("depth", "rank")) > len(tried):
            raise InputError("`nodes.tried` holds a depth or rank of nodes not tried")
        positions = None
        if nodes.get("positions") is not None:
            listed = fields.get(nodes, "positions", list, "nodes.")
            positions = np.asarray(fields.numbers(listed, "nodes.positions", int))
        return cls(
            rounds=fields.get(nodes, "rounds", int, "nodes."),
            tried=tried,
            positions=positions,
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the field `nodes` of a record, which `from_json` reads."""
        tried = self.tried
        return {
            "rounds": self.rounds,
            "tried": {
                "depth": tried["depth"].tolist(),
                "rank": tried["rank"].tolist(),
                "log_confidence": [
                    round(value, _DIGITS) for value in tried["log_confidence"].tolist()
                ],
                "is_accepted": tried["is_accepted"].astype(int).tolist(),
            },
            "positions": None if self.positions is None else self.positions.tolist(),
        }

    @classmethod
    def joined(cls, parts: Sequence["Nodes"]) -> "Nodes":
        """Returns the nodes of at least one part together."""
        positions = [part.positions for part in parts if part.positions is not None]
        return cls(
            rounds=sum(part.rounds for part in parts),
            tried=np.concatenate([part.tried for part in parts]),
            positions=np.sum(positions, axis=0) if positions else None,
        )

    @property
    def confidence(self) -> Reliability:
        """The acceptance of tried nodes by their draft probability given the parent."""
        # Rounding in the logarithm may leave a probability just above 1.
        predicted = np.exp(np.minimum(self.tried["log_confidence"], 0.0))
        return Reliability.of(predicted, self.tried["is_accepted"])
