"""The trees of rounds, what was accepted in them, and how true confidences were."""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

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
        log_values: `[N]` float, the logs of path values; -inf in padding.
        accepted: The accepted nodes from the root's child on, in order.
    """

    parents: np.ndarray
    log_values: np.ndarray
    accepted: Sequence[int]

    @property
    def drafted(self) -> np.ndarray:
        """`[M]` int, the indices of real nodes without the root."""
        return 1 + np.flatnonzero(self.log_values[1:] > -np.inf)

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
    def of(cls, done: Round) -> "VerifiedTree":
        """Returns the tree of a round, see `Text.rounds`."""
        accepted = int(done.acceptance.num_accepted)
        return cls(
            parents=np.asarray(done.tree.parents),
            log_values=np.asarray(done.tree.log_values, np.float64),
            accepted=done.acceptance.path[1 : accepted + 1].tolist(),
        )

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
        return cls(parents=parents, log_values=np.array(values), accepted=accepted)

    def to_json(self) -> dict[str, Any]:
        """Returns parents, log values (`None` in padding) and accepted nodes."""
        values = self.log_values.tolist()
        return {
            "parents": self.parents.tolist(),
            "log_values": [None if x == -np.inf else round(x, _DIGITS) for x in values],
            "accepted": list(self.accepted),
        }


def tried_in(trees: Iterable[VerifiedTree]) -> np.ndarray:
    """Returns the tried nodes of some rounds, `[M]` of `TRIED`.

    They are the children of the roots and of accepted nodes.
    """
    found = []
    for tree in trees:
        ranks, nodes, values = tree.ranks, tree.drafted, tree.log_values
        path = [0, *tree.accepted, None]
        for level, (parent, following) in enumerate(itertools.pairwise(path), 1):
            for node in nodes[tree.parents[nodes] == parent].tolist():
                confidence = values[node] - values[parent]
                found.append((level, ranks[node], confidence, node == following))
    tried = np.array(found, TRIED)
    # Rounding in the logarithm may leave a probability just above 1.
    tried["log_confidence"] = np.clip(tried["log_confidence"], _IMPOSSIBLE, 0.0)
    return tried


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reliability:
    """Predicted against measured acceptance, in `NUM_BINS` equal bins of [0, 1].

    Attributes:
        count: `[bins]` int, the number of nodes.
        predicted: `[bins]` float64, the mean prediction; NaN in an empty bin.
        rates: `[bins]` float64, the share accepted; NaN in an empty bin.
        expected_error: The expected calibration error: the distance between both,
            averaged over nodes; NaN without nodes.
    """

    count: np.ndarray
    predicted: np.ndarray
    rates: np.ndarray
    expected_error: float

    @classmethod
    def of(cls, predicted: np.ndarray, is_accepted: np.ndarray) -> "Reliability":
        """Returns nodes sorted into bins; 1 belongs to the last.

        Args:
            predicted: `[M]` float, the predicted probabilities.
            is_accepted: `[M]` bool, whether each node was accepted.
        """
        places = np.minimum((predicted * NUM_BINS).astype(int), NUM_BINS - 1)
        count, accepted, total = (
            np.bincount(places, weights=weights, minlength=NUM_BINS)
            for weights in (None, is_accepted, predicted)
        )
        error = np.abs(accepted - total).sum()
        return cls(
            count=count,
            predicted=divide(total, count),
            rates=divide(accepted, count),
            expected_error=error / len(predicted) if len(predicted) else np.nan,
        )
