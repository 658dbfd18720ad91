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
        `positions`, how often each of the `N` nodes was accepted; `drafted`, all
        nodes but roots; and `values`, these by path value in equal bins of [0, 1].
    """
    tried = {"depth": [], "rank": [], "log_confidence": [], "is_accepted": []}
    num_nodes = len(rounds[0].parents) if rounds else 1
    positions = np.zeros(num_nodes, int)
    values, were_accepted = [np.zeros(0)], [np.zeros(0, bool)]
    for done in rounds:
        positions[[0, *done.accepted]] += 1
        for depth, rank, log_confidence, is_accepted in _tried(done):
            tried["depth"].append(depth)
            tried["rank"].append(rank)
            tried["log_confidence"].append(round(log_confidence, _DIGITS))
            tried["is_accepted"].append(int(is_accepted))
        drafted = _drafted(done)
        values.append(np.exp(done.log_values[drafted]))
        were_accepted.append(np.isin(drafted, done.accepted))
    predicted = np.concatenate(values)
    bins = Reliability.of(predicted, np.concatenate(were_accepted))
    return {
        "rounds": len(rounds),
        "tried": tried,
        "positions": positions.tolist(),
        "drafted": len(predicted),
        "values": {
            "count": bins.count.tolist(),
            "accepted": bins.accepted.tolist(),
            "sum": [round(total, _DIGITS) for total in bins.total.tolist()],
        },
    }


def _drafted(done: VerifiedTree) -> np.ndarray:
    """Returns the real nodes without the root."""
    return 1 + np.flatnonzero(done.is_node[1:])


def _tried(done: VerifiedTree) -> Iterable[tuple[int, int, float, bool]]:
    """Yields depth, rank, log probability and fate of the children of a path."""
    path = [0, *done.accepted]
    for level, parent in enumerate(path, 1):
        children = [node for node in _drafted(done) if done.parents[node] == parent]
        # Sorting is stable: siblings that tie stay in node order.
        by_value = sorted(children, key=lambda node: -done.log_values[node])
        ranks = {node: rank for rank, node in enumerate(by_value)}
        following = path[level] if level < len(path) else None
        for node in children:
            confidence = done.log_values[node] - done.log_values[parent]
            yield level, ranks[node], float(confidence), bool(node == following)
