"""The trees of rounds, what was accepted in them, and how true confidences were."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from eagle_jax.decoding.rates import divide
from eagle_jax.decoding.speculative import Round
from eagle_jax.errors import InputError

NUM_BINS = 20
"""The number of equal bins of [0, 1] for confidences."""

TRIED = np.dtype(
    [("depth", int), ("rank", int), ("log_confidence", float), ("is_accepted", bool)]
)
"""The type of a drafted node whose parent was accepted: a trial of its confidence.

Its fields are the depth, 1 for children of the root; the rank among its siblings, 0 for
the most likely, the earlier node first where they tie; the log probability given the
parent, to the draft model; and whether the node was accepted.
"""

_DIGITS = 6
_IMPOSSIBLE = -69.0  # A logarithm, of about 1e-30.


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
        ranks, seen = np.zeros((2, len(self.parents)), int)
        drafted = self.drafted
        # Stable sorting keeps siblings that tie in node order.
        for node in drafted[np.argsort(-self.log_values[drafted], kind="stable")]:
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
        return {
            row: cls(
                parents=tree.parents[row],
                log_values=np.asarray(tree.log_values[row], np.float64),
                is_node=tree.is_node[row],
                accepted=acceptance.path[row][1 : accepted + 1].tolist(),
            )
            for row, accepted in enumerate(acceptance.num_accepted.tolist())
            if count[row]
        }

    @classmethod
    def from_json(cls, record: Any) -> "VerifiedTree":
        """Returns the tree that `to_json` gave.

        Raises:
            InputError: If the entry is no tree.
        """
        try:
            parents = np.asarray(record["parents"], int)
            values = [-np.inf if x is None else float(x) for x in record["log_values"]]
            accepted = [int(node) for node in record["accepted"]]
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            wanted = "parents, log_values or accepted"
            raise InputError(f"`nodes`: a tree lacks {wanted}: {error!r}") from error
        is_tree = parents.shape == (len(values),) != (0,) and bool(
            ((parents >= -1) & (parents < np.arange(parents.size))).all()
        )
        if not is_tree or not all(
            0 < node < parents.size and parents[node] == parent
            for parent, node in itertools.pairwise([0, *accepted])
        ):
            raise InputError("`nodes`: a tree's parents and accepted nodes do not fit")
        log_values = np.asarray(values)
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

    def tried(self) -> Iterator[tuple[int, int, float, bool]]:
        """Yields `TRIED` fields of every child of the root and of accepted nodes."""
        ranks, nodes = self.ranks, self.drafted
        path = [0, *self.accepted, None]
        for level, (parent, following) in enumerate(itertools.pairwise(path), 1):
            for node in nodes[self.parents[nodes] == parent].tolist():
                confidence = self.log_values[node] - self.log_values[parent]
                yield level, int(ranks[node]), float(confidence), node == following


def tried_in(trees: Iterable[VerifiedTree]) -> np.ndarray:
    """Returns the tried nodes of some rounds, `[M]` of `TRIED`."""
    tried = np.array([node for tree in trees for node in tree.tried()], TRIED)
    # Rounding in the logarithm may leave a probability just above 1.
    tried["log_confidence"] = np.clip(tried["log_confidence"], _IMPOSSIBLE, 0.0)
    return tried


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reliability:
    """Predicted against measured acceptance, in `NUM_BINS` equal bins of [0, 1].

    Attributes:
        count: `[bins]` int, the number of nodes.
        accepted: `[bins]` int, the number of accepted nodes.
        total: `[bins]` float64, the sum of the predictions.
    """

    count: np.ndarray
    accepted: np.ndarray
    total: np.ndarray

    @classmethod
    def of(cls, predicted: np.ndarray, is_accepted: np.ndarray) -> "Reliability":
        """Returns nodes sorted into bins; 1 belongs to the last.

        Args:
            predicted: `[M]` float, the predicted probabilities.
            is_accepted: `[M]` bool, whether each node was accepted.
        """
        places = np.minimum((predicted * NUM_BINS).astype(int), NUM_BINS - 1)
        return cls(
            count=np.bincount(places, minlength=NUM_BINS),
            accepted=np.bincount(places[is_accepted], minlength=NUM_BINS),
            total=np.bincount(places, weights=predicted, minlength=NUM_BINS),
        )

    @property
    def predicted(self) -> np.ndarray:
        """`[bins]` float64, the mean prediction; NaN in an empty bin."""
        return divide(self.total, self.count)

    @property
    def rates(self) -> np.ndarray:
        """`[bins]` float64, the share accepted; NaN in an empty bin."""
        return divide(self.accepted, self.count)

    @property
    def expected_error(self) -> float:
        """The expected calibration error, NaN without nodes.

        It is the distance between mean prediction and rate, averaged over nodes.
        """
        nodes = self.count.sum()
        error = np.abs(self.accepted - self.total).sum()
        return float(error / nodes) if nodes else float("nan")
