"""Exponents that calibrate confidences, and the tokens that trees ranked by them give.

Every drafted node whose parent was accepted is one trial: it was accepted or not. With
`c` its confidence, acceptance is taken for a Bernoulli trial of probability `c ** s`,
and `s` is fitted by maximum likelihood, one number per cell.

There is a cell per depth and rank. One with fewer than `MIN_TRIALS` trials takes the
exponent of its rank at all depths, which matters more than the depth; a rank with fewer
takes that of all trials together.
"""

from collections.abc import Sequence

import numpy as np

from eagle_jax.drafting.calibration import Confidence
from eagle_jax.evaluation.nodes import Reliability, VerifiedTree

MIN_TRIALS = 200
"""The number of trials that a cell needs for an exponent of its own."""

BOUNDS = (1 / 8, 8.0)
"""The smallest and the largest exponent: all accepted, or none, would give 0 or inf."""

_BISECTIONS = 50
_ALMOST_CERTAIN = -1e-6  # A certain node that was refused has no likelihood at all.


def fit_exponents(trials: np.ndarray, depth: int) -> tuple[tuple[float, ...], ...]:
    """Returns the exponents of greatest likelihood by the rules of this module.

    Args:
        trials: `[M]` of `TRIED`, at least one.
        depth: The number of levels to return, also those without trials.
    """

    def fit(cell: np.ndarray, shared: float) -> float:
        return shared if len(cell) < MIN_TRIALS else fit_exponent(cell)

    overall, columns = fit_exponent(trials), []
    for rank in range(int(trials["rank"].max()) + 1):
        of_rank = trials[trials["rank"] == rank]
        shared, depths = fit(of_rank, overall), of_rank["depth"]
        columns.append([fit(of_rank[depths == d + 1], shared) for d in range(depth)])
    return tuple(zip(*columns, strict=True))


def fit_exponent(trials: np.ndarray) -> float:
    """Returns the `s` within `BOUNDS` under which the trials are most likely.

    The log likelihood, `s * log c` for an accepted node and `log(1 - c ** s)` for a
    refused one, is concave in `s`: its slope is bisected.
    """
    logs = np.minimum(trials["log_confidence"], _ALMOST_CERTAIN)
    is_accepted = trials["is_accepted"]
    accepted, refused = logs[is_accepted].sum(), logs[~is_accepted]

    def slope(exponent: float) -> float:
        with np.errstate(over="ignore"):  # An impossible node: refused, as expected.
            return float(accepted - (refused / np.expm1(-exponent * refused)).sum())

    low, high = BOUNDS
    if slope(low) <= 0:
        return low
    if slope(high) >= 0:
        return high
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(middle) > 0 else (low, middle)
    return (low + high) / 2


def calibration_error(trials: np.ndarray, confidence: Confidence) -> float:
    """Returns the expected calibration error of confidences with these exponents."""
    exponents = _exponents(confidence, trials["depth"], trials["rank"])
    predicted = np.exp(trials["log_confidence"] * exponents)
    return Reliability.of(predicted, trials["is_accepted"]).expected_error


def tokens_per_root(
    trees: Sequence[VerifiedTree], confidence: Confidence, num_nodes: int
) -> float:
    """Returns the mean tokens of trees that keep fewer nodes, ranked anew.

    The mean is over the roots of the decoded rounds, whether or not a smaller tree
    would have come to them, and uncut where a text ended: it is a figure to compare,
    not tokens per round.

    Args:
        trees: The verified trees.
        confidence: The confidence whose exponents rank the nodes; its other factors are
            those that the trees were drafted with.
        num_nodes: The number of nodes that are kept, root included, `N`.
    """
    accepted = []
    for tree in trees:
        exponents = _exponents(confidence, tree.depths, tree.ranks)
        values = np.where(tree.log_values > -np.inf, 0.0, -np.inf)
        for node in tree.drafted:
            parent = tree.parents[node]
            step = min(tree.log_values[node] - tree.log_values[parent], 0.0)
            values[node] = values[parent] + exponents[node] * step
        # Ties go to the lower index, as in `rerank`.
        kept = np.argsort(-values, kind="stable")[:num_nodes]
        accepted.append(np.isin(tree.accepted, kept).sum())
    return 1.0 + float(np.mean(accepted))


def _exponents(
    confidence: Confidence, depths: np.ndarray, ranks: np.ndarray
) -> np.ndarray:
    """Returns each node's exponent, `[M]` float64; its depth and rank are `[M]` int."""
    width = max(map(len, confidence.exponents))
    rows = [[*row, *[row[-1]] * (width - len(row))] for row in confidence.exponents]
    levels = np.clip(depths, 1, len(rows)) - 1
    return np.array(rows)[levels, np.minimum(ranks, width - 1)]
