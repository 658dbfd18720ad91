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
from eagle_jax.errors import InputError
from eagle_jax.evaluation.metrics import Reliability
from eagle_jax.evaluation.nodes import VerifiedTree, tried_in

MIN_TRIALS = 200
"""The number of trials that a cell needs for an exponent of its own."""

BOUNDS = (1 / 8, 8.0)
"""The smallest and the largest exponent: all accepted, or none, would give 0 or inf."""

_BISECTIONS = 50
_ALMOST_CERTAIN = -1e-6  # A certain node that was refused has no likelihood at all.
_IMPOSSIBLE = -69.0  # A logarithm, of about 1e-30.


def trials_of(trees: Sequence[VerifiedTree]) -> np.ndarray:
    """Returns the trials of some rounds, `[M]` of `TRIED`.

    Raises:
        InputError: If nothing was drafted in them.
    """
    trials = tried_in(trees)
    if not len(trials):
        raise InputError("there are rounds, but nothing was drafted in them")
    # Rounding in the logarithm may leave a probability just above 1.
    trials["log_confidence"] = np.clip(trials["log_confidence"], _IMPOSSIBLE, 0.0)
    return trials


def fit_exponents(trials: np.ndarray, depth: int) -> tuple[tuple[float, ...], ...]:
    """Returns the exponents of greatest likelihood by the rules of this module.

    Args:
        trials: `[M]` of `TRIED`, at least one.
        depth: The number of levels to return, also those without trials.
    """
    overall = fit_exponent(trials)
    ranks = [trials[trials["rank"] == r] for r in range(int(trials["rank"].max()) + 1)]
    shared = [_fit_or(overall, of_rank) for of_rank in ranks]
    return tuple(
        tuple(
            _fit_or(other, of_rank[of_rank["depth"] == level])
            for other, of_rank in zip(shared, ranks, strict=True)
        )
        for level in range(1, depth + 1)
    )


def fit_exponent(trials: np.ndarray) -> float:
    """Returns the `s` within `BOUNDS` under which the trials are most likely.

    The log likelihood, `s * log c` for an accepted node and `log(1 - c ** s)` for a
    refused one, is concave in `s`: its slope is bisected.

    Args:
        trials: `[M]` of `TRIED`.
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


def calibration_error(
    trials: np.ndarray, confidence: Confidence | None = None
) -> float:
    """Returns the expected calibration error of confidences, or of the draft's own."""
    exponents = 1.0 if confidence is None else _exponents(trials, confidence)
    predicted = np.exp(trials["log_confidence"] * exponents)
    error = Reliability.of(predicted, trials["is_accepted"]).expected_error
    assert error is not None, "there are trials"
    return error


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
    accepted = [_accepted(tree, confidence, num_nodes) for tree in trees]
    return 1.0 + float(np.mean(accepted))


def _accepted(tree: VerifiedTree, confidence: Confidence, num_nodes: int) -> int:
    """Returns how many accepted nodes a smaller tree keeps."""
    ranks, depths = tree.ranks, tree.depths
    values = np.where(tree.is_node, 0.0, -np.inf)
    for node in tree.drafted:
        parent = tree.parents[node]
        step = min(tree.log_values[node] - tree.log_values[parent], 0.0)
        exponent = _exponent(confidence, int(depths[node]), int(ranks[node]))
        values[node] = values[parent] + exponent * step
    # Ties go to the lower index, as in `rerank`.
    kept = set(np.argsort(-values, kind="stable")[:num_nodes].tolist())
    return sum(node in kept for node in tree.accepted)


def _fit_or(shared: float, trials: np.ndarray) -> float:
    """Returns the cell's own exponent if it has enough trials, or the shared one."""
    return shared if len(trials) < MIN_TRIALS else fit_exponent(trials)


def _exponents(trials: np.ndarray, confidence: Confidence) -> np.ndarray:
    """Returns each trial's exponent, `[M]` float64."""
    cells = zip(trials["depth"].tolist(), trials["rank"].tolist(), strict=True)
    return np.array([_exponent(confidence, depth, rank) for depth, rank in cells])


def _exponent(confidence: Confidence, depth: int, rank: int) -> float:
    row = confidence.exponents[min(depth, len(confidence.exponents)) - 1]
    return row[min(rank, len(row) - 1)]
