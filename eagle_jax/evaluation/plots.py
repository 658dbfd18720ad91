"""Figures of one group's runs: acceptance by depth, Figures 5 and 6 of EAGLE-2."""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter

from eagle_jax.evaluation.nodes import Reliability, tried_in
from eagle_jax.evaluation.runs import EvaluatedRun, Group
from eagle_jax.reporting import decimals

# Okabe and Ito's colours, which colour-blind readers tell apart; no yellow on white.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_WIDTH = 8.0
"""The width in inches, 800 pixels: text of 10 points is 14 pixels high."""


def depths(group: Group) -> Figure | None:
    """Draws how far rounds get: the share that accepts at least so many drafts.

    It is `None` if no run drafts.
    """
    runs = list(_drafting(group))
    if not runs:
        return None
    title = f"Acceptance by depth, {group.title}"
    figure, (axis,) = _panels(1, 3.6, title)
    for name, run, (color, marker) in runs:
        levels = np.arange(1, max(run.accepted, default=0) + 1)
        shares = [np.mean(np.array(run.accepted) >= level) for level in levels]
        label = f"{name}: tau {decimals(run.tau())}"
        axis.plot(levels, shares, color=color, marker=marker, ms=5, lw=1.6, label=label)
    axis.set(xlabel="drafted tokens", ylabel="share of rounds that accept as many")
    axis.set(ylim=(-0.03, 1.03))
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    _legend(figure, [name for name, _, _ in runs])
    return figure


def positions(group: Group) -> Figure | None:
    """Draws Figure 5: how often each node of a static tree is accepted.

    It is `None` if no run of such a tree recorded its nodes.
    """
    runs = [
        (name, color, np.array(rates))
        for name, run, (color, _) in _drafting(group)
        if run.is_static and (rates := _rates_of_positions(run))
    ]
    if not runs:
        return None
    figure, axes = _panels(len(runs), 3.2, f"Acceptance by position, {group.title}")
    jitter = np.random.default_rng(0)
    for axis, (name, color, rates) in zip(axes, runs, strict=True):
        places = np.arange(1, rates.shape[1] + 1)
        spots = places + jitter.uniform(-0.25, 0.25, rates.shape)
        axis.plot(spots, rates, ls="", marker=".", ms=5, alpha=0.5, color=color)
        medians = np.median(rates, axis=0)
        axis.hlines(medians, places - 0.4, places + 0.4, color="black", lw=1.8)
        axis.set(title=f"{name}: a point per question, bar = median")
        axis.set(ylabel="share of rounds accepted", ylim=(-0.03, 1.03))
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=20))
    axes[-1].set_xlabel("position in the static tree (level order, root left out)")
    return figure


def confidence(group: Group) -> Figure | None:
    """Draws Figure 6: a tried node's confidence against how often it is accepted.

    Below it stands how many nodes each bin of confidences holds. It is `None` if no run
    whose drafts all have probabilities recorded its nodes.
    """
    found = []
    for name, run, style in _drafting(group):
        trees = [tree for a in run.answers.values() for tree in a.nodes or ()]
        if run.row.has_confidence and trees:
            tried = tried_in(trees)
            predicted = np.exp(tried["log_confidence"])
            found.append((name, Reliability.of(predicted, tried["is_accepted"]), style))
    if not found:
        return None
    title = f"Draft confidence against acceptance, {group.title}"
    figure, (top, bottom) = _panels(2, 2.9, title, height_ratios=(3, 1))
    top.plot((0, 1), (0, 1), ls="--", lw=1.2, color="gray", label="perfect")
    for name, held, (color, marker) in found:
        label = f"{name}: ECE {decimals(held.expected_error, 3)}"
        look = {"color": color, "marker": marker, "ms": 5, "lw": 1.6}
        top.plot(held.predicted, held.rates, label=label, **look)
        edges = np.linspace(0, 1, len(held.count) + 1)
        counts = np.where(held.count > 0, held.count, np.nan)
        bottom.stairs(counts, edges, color=color, lw=1.6)
    top.set(ylabel="share accepted", xlim=(-0.03, 1.03), ylim=(-0.03, 1.03))
    bottom.set(xlabel="draft confidence of a tried node", ylabel="nodes")
    bottom.set(xlim=(-0.03, 1.03), yscale="log", ylim=(0.8, None))
    bottom.yaxis.set_minor_formatter(NullFormatter())
    _legend(figure, [name for name, _, _ in found])
    return figure


def _legend(figure: Figure, names: Sequence[str]) -> None:
    columns = 1 if max(map(len, names)) > 30 else 2
    figure.legend(loc="outside lower center", ncols=columns, frameon=False)


def _rates_of_positions(run: EvaluatedRun) -> list[np.ndarray]:
    """Returns each question's shares of rounds that accepted each drafted node."""
    shares = []
    for trees in filter(None, (answer.nodes for answer in run.answers.values())):
        count = np.zeros(len(trees[0].parents))
        for tree in trees:
            count[tree.accepted] += 1
        shares.append(count[1:] / len(trees))
    return shares


def _drafting(group: Group) -> Iterator[tuple[str, EvaluatedRun, tuple[str, str]]]:
    """Yields the runs that draft, with their colours and markers in every figure.

    Table 3's ablated runs are left out. Colour and marker both differ, for prints
    without colour.
    """
    styles = itertools.cycle(zip(_COLORS, _MARKERS, strict=True))
    for name, run in group.named:
        if not run.is_baseline and not run.is_ablated:
            yield name, run, next(styles)


def _panels(
    count: int, height: float, title: str, height_ratios: Sequence[float] | None = None
) -> tuple[Figure, list[Axes]]:
    """Returns a figure of panels below each other, on average `height` inches high."""
    figure = Figure(figsize=(_WIDTH, height * count + 0.6), layout="constrained")
    axes = figure.subplots(count, 1, squeeze=False, height_ratios=height_ratios)[:, 0]
    figure.suptitle(title)
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.set_axisbelow(True)
    return figure, list(axes)
