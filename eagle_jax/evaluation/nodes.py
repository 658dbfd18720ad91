"""What became of every drafted node: the raw material of acceptance statistics."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from eagle_jax.evaluation.metrics import Reliability

_DIGITS = 6


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifiedTree:
    """One row's tree of one round, on the host.

    Attributes:
        parents: `[N]` int, as in `DraftTree`.
        log_values: `[N]` float, as in `DraftTree`.
        is_node: `[N]` bool.
        accepted: Accepted nodes from the root's child on, in order.
    """

    parents: np.ndarray
    log_values: np.ndarray
    is_node: np.ndarray
    accepted: Sequence[int]

    @property
    def depths(self) -> np.ndarray:
        """`[N]` int, each node's distance from the root; 0 in padding."""
        depths = np.zeros(len(self.parents), int)
        for node in drafted_nodes(self):
            depths[node] = depths[self.parents[node]] + 1
        return depths

    @property
    def ranks(self) -> np.ndarray:
        """`[N]` int, each node's place among its siblings, 0 for the most likely."""
        ranks = np.zeros(len(self.parents), int)
        # Sorting is stable: siblings that tie stay in node order.
        by_value = np.argsort(-self.log_values, kind="stable")
        seen = np.zeros(len(self.parents), int)
        for node in by_value[self.is_node[by_value]]:
            if node != 0:
                ranks[node] = seen[self.parents[node]]
                seen[self.parents[node]] += 1
        return ranks

    @classmethod
    def of(cls, tree: Any, acceptance: Any, row: int) -> "VerifiedTree":
        """Takes one row out of a round.

        Args:
            tree: A `DraftTree` of `[B, N]` fields, on the host.
            acceptance: An `Acceptance` of `[B]` and `[B, P]` fields, on the host.
            row: Of the batch.
        """
        count = int(acceptance.num_accepted[row])
        return cls(
            parents=np.asarray(tree.parents[row]),
            log_values=np.asarray(tree.log_values[row], np.float64),
            is_node=np.asarray(tree.is_node[row], bool),
            accepted=[int(node) for node in acceptance.path[row][1 : count + 1]],
        )


def nodes_record(rounds: Sequence[VerifiedTree]) -> dict[str, Any]:
    """Returns the field `nodes` of a question's record.

    Args:
        rounds: Of all turns, each with the same `N`.

    Returns:
        `rounds`; under `tried` every node whose parent was accepted, with its depth,
        its place among its siblings (0 = likeliest, the earlier node first where they
        tie), its log probability given the parent, and whether it was accepted;
        `positions`, how often each of the `N` nodes was accepted, `None` where there
        was no round; `drafted`, all
        nodes but roots; `values`, these by path value in equal bins of [0, 1]; and
        `trees`, every round's parents, log values (`null` in padding) and accepted
        nodes, from which `read_tree` makes the round again.
    """
    tried = {"depth": [], "rank": [], "log_confidence": [], "is_accepted": []}
    num_nodes = len(rounds[0].parents) if rounds else 1
    positions = np.zeros(num_nodes, int)
    values, were_accepted = [np.zeros(0)], [np.zeros(0, bool)]
    for done in rounds:
        positions[[0, *done.accepted]] += 1
        for depth, rank, log_confidence, is_accepted in tried_nodes(done):
            tried["depth"].append(depth)
            tried["rank"].append(rank)
            tried["log_confidence"].append(round(log_confidence, _DIGITS))
            tried["is_accepted"].append(int(is_accepted))
        drafted = drafted_nodes(done)
        values.append(np.exp(done.log_values[drafted]))
        were_accepted.append(np.isin(drafted, done.accepted))
    predicted = np.concatenate(values)
    bins = Reliability.of(predicted, np.concatenate(were_accepted))
    return {
        "rounds": len(rounds),
        "tried": tried,
        "positions": positions.tolist() if rounds else None,
        "drafted": len(predicted),
        "values": {
            "count": bins.count.tolist(),
            "accepted": bins.accepted.tolist(),
            "sum": [round(total, _DIGITS) for total in bins.total.tolist()],
        },
        "trees": [_tree_record(done) for done in rounds],
    }


def read_tree(record: Any) -> VerifiedTree:
    """Returns a round of the field `nodes.trees`.

    Raises:
        ValueError: If it is none.
    """
    try:
        parents = np.asarray(record["parents"], int)
        values = [-np.inf if x is None else float(x) for x in record["log_values"]]
        accepted = [int(node) for node in record["accepted"]]
    except (KeyError, TypeError) as error:
        wanted = "parents, log_values or accepted"
        raise ValueError(f"a tree lacks {wanted}: {error!r}") from error
    nodes, log_values = np.arange(len(parents)), np.asarray(values)
    path = np.array([0, *accepted])
    is_tree = (
        parents.ndim == 1
        and len(values) == len(parents) > 0
        and (parents >= -1).all()
        and (parents < np.maximum(nodes, 0)).all()
        and (path >= 0).all()
        and (path < len(parents)).all()
        and (parents[path[1:]] == path[:-1]).all()
    )
    if not is_tree:
        raise ValueError("a tree's parents and accepted nodes do not fit")
    return VerifiedTree(
        parents=parents,
        log_values=log_values,
        is_node=log_values > -np.inf,
        accepted=accepted,
    )


def _tree_record(done: VerifiedTree) -> dict[str, Any]:
    values = zip(done.log_values.tolist(), done.is_node, strict=True)
    return {
        "parents": done.parents.tolist(),
        "log_values": [round(x, _DIGITS) if known else None for x, known in values],
        "accepted": list(done.accepted),
    }


def drafted_nodes(done: VerifiedTree) -> np.ndarray:
    """Returns the real nodes without the root."""
    return 1 + np.flatnonzero(done.is_node[1:])


def tried_nodes(done: VerifiedTree) -> Iterable[tuple[int, int, float, bool]]:
    """Yields depth, rank, log probability and fate of the children of a path."""
    path, ranks = [0, *done.accepted], done.ranks
    nodes = drafted_nodes(done)
    for level, parent in enumerate(path, 1):
        children = nodes[done.parents[nodes] == parent].tolist()
        following = path[level] if level < len(path) else None
        for node in children:
            confidence = done.log_values[node] - done.log_values[parent]
            yield level, int(ranks[node]), float(confidence), bool(node == following)
