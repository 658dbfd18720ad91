"""Calibration: a pair decodes prompts, and its draft's confidences are fitted.

Every drafted node whose parent was accepted is one trial: it was accepted or not. With
`c` its confidence, acceptance is taken for a Bernoulli trial of probability `c ** s`,
and `s` is fitted by maximum likelihood, one number per depth and rank. One with fewer
than `MIN_TRIALS` trials takes the exponent of its rank at all depths, which matters
more than the depth; a rank with fewer takes that of all trials together.

Under shared noise confidences depend on `kappa` and the sharpness too
(`drafting.calibration`): each pair of them that is decoded with gets exponents of its
own, and the one is taken whose trees, cut from the decoded ones, accept most.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from eagle_jax.checkpoints.draft_files import Kind, calibration_part
from eagle_jax.drafting import Calibration, TreeDrafter, find_tree_drafter
from eagle_jax.drafting.calibration import Confidence
from eagle_jax.engine import Pair, PairConfig
from eagle_jax.engine.calls import engine_for
from eagle_jax.errors import InputError
from eagle_jax.evaluation.nodes import VerifiedTree, tried_in
from eagle_jax.reporting import Progress, show_nothing

MIN_TRIALS = 200
"""The number of trials that a cell needs for an exponent of its own."""

BOUNDS = (1 / 8, 8.0)
"""The smallest and the largest exponent: all accepted, or none, would give 0 or inf."""

_BISECTIONS = 50
_ALMOST_CERTAIN = -1e-6  # A certain node that was refused has no likelihood at all.

CONFIDENCES: dict[Kind, tuple[Confidence, ...]] = {
    "greedy": (Confidence(),),
    "sampled": (
        Confidence(kappa=2.0),
        Confidence(kappa=1.0),
        Confidence(kappa=3.0),
        Confidence(kappa=1.0, sharpness=1.2),
    ),
}
"""The confidences that are decoded with, by kind of text, each in its own program.

The first is the nearest to what is drafted with where there is no calibration.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fit:
    """A fitted confidence, and the figures by which it was chosen.

    Attributes:
        confidence: The fitted confidence.
        rows: The number of tried nodes that it was fitted to.
        num_nodes: The number of nodes of the trees that are compared, half as
            many as were drafted.
        tokens_before: The tokens per root, see `tokens_per_root`, of trees
            that are ranked without a calibration.
        tried: The tokens per root of trees that are ranked with the exponents fitted to
            them, by confidence.
    """

    confidence: Confidence
    rows: int
    num_nodes: int
    tokens_before: float
    tried: dict[Confidence, float]


def calibrate_pair(
    pair: Pair,
    config: PairConfig,
    prompts: Sequence[list[int]],
    progress: Progress = show_nothing,
) -> dict[Kind, Fit]:
    """Fits a draft model's confidences, by kind, to texts that its target writes now.

    Args:
        pair: The pair, whose draft model grows dynamic trees.
        config: The tree, than which no deeper one can use the calibration, the lengths
            of texts and the size of batches.
        prompts: The ids of prompts, on which the draft was not trained. Their texts are
            written at temperature 0, and at 1 once for each confidence that is tried.
        progress: Called to show how far work is, with a label and a total.
    """
    grower = find_tree_drafter(pair.drafter)
    assert grower is not None, "its method drafts with a model"
    drafter = TreeDrafter(model=grower.model, tree=config.tree.shape)
    fits: dict[Kind, Fit] = {}
    count = itertools.count(1)
    with progress("confidences tried", sum(map(len, CONFIDENCES.values()))) as done:
        for kind, confidences in CONFIDENCES.items():
            heat = 0.0 if kind == "greedy" else 1.0
            settings = config.with_(temperature=heat, acceptance="coupled")
            own = dataclasses.replace(pair, config=settings)
            observed: dict[Confidence, list[VerifiedTree]] = {}
            for confidence in confidences:
                calibration = Calibration(**{kind: confidence})
                tried = dataclasses.replace(drafter, calibration=calibration)
                observed[confidence] = _decode(own, tried, prompts)
                done(next(count))
            fits[kind] = fit(observed, drafter.depth)
    return fits


def fit(observed: Mapping[Confidence, Sequence[VerifiedTree]], depth: int) -> Fit:
    """Fits confidences to one kind of text.

    Args:
        observed: The trees, all of one size, by the confidence, without exponents, that
            they were drafted with. The first stands for drafts without a calibration.
        depth: The depth of the trees, `D`.

    Raises:
        InputError: If nothing was drafted.
    """
    tried: dict[Confidence, float] = {}
    rows: dict[Confidence, int] = {}
    nodes = 0
    for one, trees in observed.items():
        trials = tried_in(trees)
        if not len(trials):
            raise InputError("nothing was drafted; give prompts with longer texts")
        nodes = max(len(trees[0].parents) // 2, 2)
        fitted = dataclasses.replace(one, exponents=fit_exponents(trials, depth))
        tried[fitted] = tokens_per_root(trees, fitted, nodes)
        rows[fitted] = len(trials)
    best = max(tried, key=lambda one: tried[one])
    before, trees = next(iter(observed.items()))
    return Fit(
        confidence=best,
        rows=rows[best],
        num_nodes=nodes,
        tokens_before=tokens_per_root(trees, before, nodes),
        tried=tried,
    )


def fit_exponents(trials: np.ndarray, depth: int) -> tuple[tuple[float, ...], ...]:
    """Returns the exponents of greatest likelihood by the rules of this module.

    Args:
        trials: `[M]` of `nodes.TRIED`, at least one.
        depth: The number of levels to return, also those without trials.
    """

    def own(cell: np.ndarray, shared: float) -> float:
        return shared if len(cell) < MIN_TRIALS else fit_exponent(cell)

    overall, columns = fit_exponent(trials), []
    for rank in range(int(trials["rank"].max()) + 1):
        of_rank = trials[trials["rank"] == rank]
        shared, depths = own(of_rank, overall), of_rank["depth"]
        columns.append([own(of_rank[depths == d + 1], shared) for d in range(depth)])
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


def tokens_per_root(
    trees: Sequence[VerifiedTree], confidence: Confidence, num_nodes: int
) -> float:
    """Returns the mean tokens of trees that keep fewer nodes, ranked anew.

    The mean is over the roots of the decoded rounds, whether or not a smaller tree
    would have come to them, and uncut where a text ended: it is a figure to compare,
    not tokens per round.

    Args:
        trees: The verified trees.
        confidence: The confidence whose exponents, as many in each row, rank the nodes;
            its other factors are those that the trees were drafted with.
        num_nodes: The number of nodes that are kept, root included, `N`.
    """
    rows, accepted = np.array(confidence.exponents), []
    for tree in trees:
        levels = np.clip(tree.depths, 1, len(rows)) - 1
        exponents = rows[levels, np.minimum(tree.ranks, rows.shape[1] - 1)]
        values = np.where(tree.log_values > -np.inf, 0.0, -np.inf)
        for node in tree.drafted:
            parent = tree.parents[node]
            step = min(tree.log_values[node] - tree.log_values[parent], 0.0)
            values[node] = values[parent] + exponents[node] * step
        # Ties go to the lower index, as in `rerank`.
        kept = np.argsort(-values, kind="stable")[:num_nodes]
        accepted.append(np.isin(tree.accepted, kept).sum())
    return 1.0 + float(np.mean(accepted))


def describe(fitted: Fit) -> str:
    """Returns the figures of a fit in one line."""
    found = fitted.confidence
    sweep = ", ".join(
        f"{tried.kappa:g}/{tried.sharpness:g}: {tokens:.3f}"
        for tried, tokens in fitted.tried.items()
    )
    line = (
        f"{fitted.rows:,} nodes | kappa/sharpness {found.kappa:g}/{found.sharpness:g} "
        f"| tokens per root of trees of {fitted.num_nodes} nodes: "
        f"{fitted.tokens_before:.3f} before, after {sweep}"
    )
    if len({exponent for row in found.exponents for exponent in row}) == 1:
        line += (
            "; one exponent for all nodes changes no order: a depth or rank needs "
            f"{MIN_TRIALS} tried nodes for its own, so give more prompts"
        )
    return line


def calibration_file(
    vocab_size: int, fits: Mapping[Kind, Fit], source: Sequence[str]
) -> dict[str, Any]:
    """Returns a calibration file's content, as `checkpoints.draft_files` reads it.

    The lines of `source` say what was decoded.
    """
    parts: dict[str, Any] = {}
    for kind, fitted in fits.items():
        figures = dict(vars(fitted))
        del figures["confidence"], figures["tried"]
        parts[kind] = calibration_part(fitted.confidence) | figures
    return {"vocab_size": vocab_size, **parts, "source": list(source)}


def _decode(
    pair: Pair, drafter: TreeDrafter, prompts: Sequence[list[int]]
) -> list[VerifiedTree]:
    """Decodes prompts to the end of their texts, and returns every tree."""
    pair = pair.with_drafter(drafter)
    texts = pair.texts(list(prompts), pair.request(seed=0))
    for text in texts:
        text.keeps_rounds = True
    engine_for(pair, texts, pair.config.batch_size).write()
    return [VerifiedTree.of(done) for text in texts for done, _ in text.rounds]
