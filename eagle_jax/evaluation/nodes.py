"""What became of every drafted node: the raw material of acceptance statistics."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from eagle_jax.errors import InputError
from eagle_jax.evaluation import fields
from eagle_jax.evaluation.metrics import NUM_BINS, Reliability

_DIGITS = 6
_COLUMNS = ("depth", "rank", "log_confidence", "is_accepted")


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
    def drafted(self) -> np.ndarray:
        """`[M]` int, the real nodes without the root."""
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

    @classmethod
    def from_json(cls, record: Any) -> "VerifiedTree":
        """Returns the round that an entry of the field `nodes.trees` holds.

        Raises:
            InputError: If it is none.
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
        """Yields depth, rank, log probability and fate of the children of the path."""
        path, ranks, nodes = [0, *self.accepted], self.ranks, self.drafted
        for level, parent in enumerate(path, 1):
            children = nodes[self.parents[nodes] == parent].tolist()
            following = path[level] if level < len(path) else None
            for node in children:
                confidence = self.log_values[node] - self.log_values[parent]
                yield level, int(ranks[node]), float(confidence), node == following


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tried:
    """Drafted nodes whose parents were accepted: each is a trial of its confidence.

    Attributes:
        depth: `[M]` int, 1 for children of the root.
        rank: `[M]` int, place among the siblings, 0 for the most likely; where they
            tie, the earlier node comes first.
        log_confidence: `[M]` float64, log probability given the parent, to the draft
            model.
        is_accepted: `[M]` bool.
    """

    depth: np.ndarray
    rank: np.ndarray
    log_confidence: np.ndarray
    is_accepted: np.ndarray

    @classmethod
    def of(cls, trees: Iterable[VerifiedTree]) -> "Tried":
        """Returns what was tried in some rounds."""
        found = [node for tree in trees for node in tree.tried()]
        columns = np.array(found, float).reshape(-1, 4).T
        return cls._of_columns(*columns)

    @classmethod
    def from_json(cls, nodes: Any) -> "Tried":
        """Returns what the field `tried` of a record's nodes holds.

        Raises:
            InputError: If it is missing or holds something else.
        """
        tried = cls._of_columns(*fields.columns(nodes, "tried", _COLUMNS))
        depth, rank = tried.depth, tried.rank
        if (depth < 1).any() or (rank < 0).any():
            raise InputError("`nodes.tried` holds a depth below 1 or a rank below 0")
        # Whatever was tried, its ancestors and its likelier siblings were, too.
        if max(depth.max(initial=0), rank.max(initial=0)) > len(depth):
            raise InputError("`nodes.tried` holds a depth or rank of nodes not tried")
        return tried

    @classmethod
    def _of_columns(cls, *columns: np.ndarray) -> "Tried":
        depth, rank, log_confidence, is_accepted = columns
        return cls(
            depth=depth.astype(int),
            rank=rank.astype(int),
            log_confidence=log_confidence,
            is_accepted=is_accepted.astype(bool),
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the field `tried` of a record's nodes."""
        return {
            "depth": self.depth.tolist(),
            "rank": self.rank.tolist(),
            "log_confidence": [round(x, _DIGITS) for x in self.log_confidence.tolist()],
            "is_accepted": self.is_accepted.astype(int).tolist(),
        }

    def __len__(self) -> int:
        """Returns `M`."""
        return len(self.depth)

    @property
    def confidence(self) -> np.ndarray:
        """`[M]` float64, probability given the parent, to the draft model."""
        # Rounding in the logarithm may leave a probability just above 1.
        return np.exp(np.minimum(self.log_confidence, 0.0))

    def where(self, chosen: np.ndarray) -> "Tried":
        """Returns some of the nodes, those where `chosen` `[M]` bool is true."""
        return Tried(**{name: getattr(self, name)[chosen] for name in _COLUMNS})

    @classmethod
    def joined(cls, parts: Sequence["Tried"]) -> "Tried":
        """Returns the nodes of at least one part, one after the other."""
        columns = {
            name: np.concatenate([getattr(part, name) for part in parts])
            for name in _COLUMNS
        }
        return cls(**columns)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Nodes:
    """What the drafted nodes of some rounds became.

    Attributes:
        rounds: Number of rounds.
        drafted: Nodes drafted in them, roots not counted.
        tried: Those whose parent was accepted.
        positions: `[N]` int, times that each node of a static tree was accepted, the
            root's in front; `None` where there was no round or it was not recorded.
        values: All drafted nodes by path value, the product of confidences.
        trees: Every round's; empty in records of before they were kept.
    """

    rounds: int
    drafted: int
    tried: Tried
    positions: np.ndarray | None
    values: Reliability
    trees: tuple[VerifiedTree, ...] = ()

    @classmethod
    def of(cls, rounds: Sequence[VerifiedTree]) -> "Nodes":
        """Returns what became of the nodes of some rounds, each with the same `N`."""
        positions = np.zeros(len(rounds[0].parents) if rounds else 1, int)
        values, were_accepted = [np.zeros(0)], [np.zeros(0, bool)]
        for done in rounds:
            positions[[0, *done.accepted]] += 1
            values.append(np.exp(done.log_values[done.drafted]))
            were_accepted.append(np.isin(done.drafted, done.accepted))
        predicted = np.concatenate(values)
        return cls(
            rounds=len(rounds),
            drafted=len(predicted),
            tried=Tried.of(rounds),
            positions=positions if rounds else None,
            values=Reliability.of(predicted, np.concatenate(were_accepted)),
            trees=tuple(rounds),
        )

    @classmethod
    def from_json(cls, nodes: Any) -> "Nodes":
        """Returns what the field `nodes` of a record holds.

        Raises:
            InputError: If a part of it is missing or holds something else.
        """
        tried = Tried.from_json(nodes)
        bins = fields.columns(nodes, "values", ("count", "accepted", "sum"))
        count, accepted, total = bins
        if len(count) != NUM_BINS:
            raise InputError(f"`nodes.values` has {len(count)} bins, not {NUM_BINS}")
        positions = None
        if nodes.get("positions") is not None:
            listed = fields.get(nodes, "positions", list, "nodes.")
            positions = np.asarray(fields.numbers(listed, "nodes.positions", int))
        trees = fields.get({"trees": [], **nodes}, "trees", list, "nodes.")
        return cls(
            rounds=fields.get(nodes, "rounds", int, "nodes."),
            drafted=fields.get(nodes, "drafted", int, "nodes."),
            tried=tried,
            positions=positions,
            values=Reliability(
                count=count.astype(int), accepted=accepted.astype(int), total=total
            ),
            trees=tuple(map(VerifiedTree.from_json, trees)),
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the field `nodes` of a record, which `from_json` reads."""
        return {
            "rounds": self.rounds,
            "tried": self.tried.to_json(),
            "positions": None if self.positions is None else self.positions.tolist(),
            "drafted": self.drafted,
            "values": {
                "count": self.values.count.tolist(),
                "accepted": self.values.accepted.tolist(),
                "sum": [round(total, _DIGITS) for total in self.values.total.tolist()],
            },
            "trees": [tree.to_json() for tree in self.trees],
        }

    @classmethod
    def joined(cls, parts: Sequence["Nodes"]) -> "Nodes":
        """Returns the nodes of at least one part together, without their trees."""
        positions = [part.positions for part in parts if part.positions is not None]
        values = [part.values for part in parts]
        return cls(
            rounds=sum(part.rounds for part in parts),
            drafted=sum(part.drafted for part in parts),
            tried=Tried.joined([part.tried for part in parts]),
            positions=np.sum(positions, axis=0) if positions else None,
            values=Reliability(
                count=np.sum([value.count for value in values], axis=0),
                accepted=np.sum([value.accepted for value in values], axis=0),
                total=np.sum([value.total for value in values], axis=0),
            ),
        )

    @property
    def accepted_per_round(self) -> float:
        """Accepted nodes per round, root not counted."""
        return float(self.tried.is_accepted.sum()) / max(self.rounds, 1)

    @property
    def wasted_per_round(self) -> float:
        """Drafted nodes per round that were not accepted."""
        return self.drafted / max(self.rounds, 1) - self.accepted_per_round
