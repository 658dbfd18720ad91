"""The papers' figures from runs.

Every figure compares the runs of one group. Where there is no data, a line of text with
the reason is returned instead of a figure.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter

from eagle_jax.evaluation import metrics
from eagle_jax.evaluation.metrics import Reliability
from eagle_jax.evaluation.nodes import Nodes
from eagle_jax.evaluation.runs import Group, Run

# Okabe and Ito's colours, which colour-blind readers tell apart; no yellow on white.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_NO_NODES = "no run recorded its nodes; decode with --nodes"
_PHASES = ("draft", "verify", "commit")
_HATCHES = ("", "//", "..")
_WIDTH = 8.0
"""The width in inches, 800 pixels: text of 10 points is 14 pixels high."""


def positions(group: Group) -> Figure | str:
    """Draws Figure 5: how often each node of a static tree is accepted."""
    runs = [
        (name, run, style)
        for name, run, style in _drafting(group)
        if run.method == "eagle1" and _rates_of_positions(run)
    ]
    if not runs:
        return "no eagle1 run recorded its nodes; decode eagle1 with --nodes"
    figure, axes = _panels(len(runs), 3.2, f"Acceptance by position, {group.title}")
    jitter = np.random.default_rng(0)
    for axis, (name, run, (color, _)) in zip(axes, runs, strict=True):
        rates = np.asarray(_rates_of_positions(run))
        places = np.arange(1, rates.shape[1] + 1)
        spots = places + jitter.uniform(-0.25, 0.25, rates.shape)
        axis.plot(spots, rates, ls="", marker=".", ms=5, alpha=0.5, color=color)
        medians = np.median(rates, axis=0)
        axis.hlines(medians, places - 0.4, places + 0.4, color="black", lw=1.8)
        axis.set(title=f"{name}: a point per question, bar = median")
        axis.set(ylabel="share of rounds accepted", ylim=(-0.03, 1.03))
        _whole_numbers(axis)
    axes[-1].set_xlabel("position in the static tree (level order, root left out)")
    return figure


def confidence(group: Group) -> Figure | str:
    """Draws Figure 6: a node's confidence against how often it is accepted."""
    label = "draft confidence of a tried node"
    return _reliability(
        group, lambda nodes: nodes.confidence, label=label, title="Draft confidence"
    )


def value(group: Group) -> Figure | str:
    """Draws Figure 6 for path values, of all drafted nodes."""
    label = "path value of a drafted node (product of confidences)"
    return _reliability(
        group, lambda nodes: nodes.values, label=label, title="Path value"
    )


def depth(group: Group) -> Figure | str:
    """Draws acceptance by depth: of all rounds, and of those that got so far."""
    found = _with_nodes(group)
    if not found:
        return _NO_NODES
    figure, (top, bottom) = _panels(2, 2.6, f"Acceptance by depth, {group.title}")
    for name, run, _, style in found:
        rates = run.n_alpha()
        depths = range(1, len(rates.tried) + 1)
        _line(top, depths, rates.accepted / rates.tried[0], name, style)
        _line(bottom, depths, rates.rates, "", style)
    top.set(ylabel="share of all rounds", title="a node of this depth was accepted")
    bottom.set(ylabel="share of these rounds", title="where its parent was accepted")
    bottom.set_xlabel("depth in the tree (levels below the root)")
    _whole_numbers(top, bottom)
    _finish(figure, (top, bottom))
    return figure


def rank(group: Group) -> Figure | str:
    """Draws acceptance by a node's rank among its siblings."""
    found = _with_nodes(group)
    if not found:
        return _NO_NODES
    figure, (axis,) = _panels(1, 3.8, f"Acceptance by rank, {group.title}")
    for name, _, nodes, style in found:
        rates = metrics.rates_by_rank(
            nodes.tried["rank"], nodes.tried["is_accepted"]
        ).rates
        _line(axis, range(len(rates)), rates, name, style)
    axis.set_xlabel("rank among siblings (0 = the draft's most likely)")
    axis.set_ylabel("share of tried nodes accepted")
    _whole_numbers(axis)
    _finish(figure, [axis])
    return figure


def lengths(group: Group) -> Figure | str:
    """Draws how many tokens the steps accept, uncut; tau is what they emitted."""
    runs = [(n, run, style) for n, run, style in _drafting(group) if run.tau()]
    if not runs:
        return "no run drafted anything"
    figure, (axis,) = _panels(1, 3.8, f"Accepted lengths, {group.title}")
    for name, run, style in runs:
        shares = np.bincount(run.accept_lengths) / len(run.accept_lengths)
        label = f"{name}: tau {run.tau():.2f}"
        _line(axis, range(1, len(shares)), shares[1:], label, style)
    axis.set_xlabel("tokens of one step (accepted + bonus)")
    axis.set(ylabel="share of steps", ylim=(0, None))
    _whole_numbers(axis)
    _finish(figure)
    return figure


def wasted(group: Group) -> Figure | str:
    """Draws how many drafted nodes of a round are accepted, and how many are not."""
    found = _with_nodes(group)
    if not found:
        return _NO_NODES
    names = [name for name, _, _, _ in found]
    parts = {
        "accepted": [nodes.accepted_per_round for _, _, nodes, _ in found],
        "wasted": [nodes.wasted_per_round for _, _, nodes, _ in found],
    }
    figure, axis = _bars(names, parts, f"Drafted nodes of a round, {group.title}")
    axis.set_xlabel("drafted nodes per round (root left out)")
    _finish(figure)
    return figure


def step_time(group: Group) -> Figure | str:
    """Draws the time of one step's parts, beside one step of plain decoding."""
    measured = [
        (name, run.step_seconds)
        for name, run, _ in _drafting(group)
        if run.step_seconds and any(phase in run.step_seconds for phase in _PHASES)
    ]
    if not measured:
        return "no run with drafts measured its step times"
    parts = {
        phase: [1e3 * seconds.get(phase, 0.0) for _, seconds in measured]
        for phase in _PHASES
    }
    names = [name for name, _ in measured]
    figure, axis = _bars(names, parts, f"Time of a step, {group.title}")
    tokens = [1e3 * seconds.get("token", np.nan) for _, seconds in measured]
    places = np.arange(len(measured))
    label = "one step of plain decoding"
    axis.vlines(tokens, places - 0.4, places + 0.4, color="black", lw=3, label=label)
    axis.set_xlabel("time of one batch step [ms], median")
    _finish(figure)
    return figure


def n_alpha(group: Group) -> Figure | str:
    """Draws n-alpha of the chains."""
    chains = [
        (name, run.n_alpha(), style)
        for name, run, style in _drafting(group)
        if run.method == "chain"
    ]
    if not any(rates.tried.any() for _, rates, _ in chains):
        return "no chain run; decode with the method chain"
    figure, (axis,) = _panels(1, 3.8, f"n-alpha of chains, {group.title}")
    for name, rates, style in chains:
        _line(axis, range(len(rates.tried)), rates.rates, name, style)
    axis.set_xlabel("n, drafted tokens accepted before")
    axis.set_ylabel("share of tried tokens accepted")
    _whole_numbers(axis)
    _finish(figure, [axis])
    return figure


def _reliability(
    group: Group, bins: Callable[[Nodes], Reliability], *, label: str, title: str
) -> Figure | str:
    """Draws predictions against acceptance rates, and how many nodes a bin holds."""
    found = [of for of in _with_nodes(group) if of[1].has_confidence]
    if not found:
        return _NO_NODES
    title = f"{title} against acceptance, {group.title}"
    figure, (top, bottom) = _panels(2, 2.9, title, height_ratios=(3, 1))
    top.plot((0, 1), (0, 1), ls="--", lw=1.2, color="gray", label="perfect")
    for name, _, nodes, style in found:
        held = bins(nodes)
        error = held.expected_error
        shown = name if error is None else f"{name}: ECE {error:.3f}"
        _line(top, held.predicted, held.rates, shown, style)
        edges = np.linspace(0, 1, len(held.count) + 1)
        counts = np.where(held.count > 0, held.count, np.nan)
        bottom.stairs(counts, edges, color=style[0], lw=1.6)
    top.set(ylabel="share accepted", xlim=(-0.03, 1.03))
    bottom.set(xlabel=label, ylabel="nodes", xlim=(-0.03, 1.03))
    bottom.set(yscale="log", ylim=(0.8, None))
    bottom.yaxis.set_minor_formatter(NullFormatter())
    _finish(figure, [top])
    return figure


def _rates_of_positions(run: Run) -> list[np.ndarray]:
    """Returns each question's shares of rounds that accepted each drafted node."""
    nodes = [answer.nodes for answer in run.answers.values()]
    return [
        part.positions[1:] / part.rounds
        for part in nodes
        if part is not None and part.positions is not None and part.rounds
    ]


def _drafting(group: Group) -> Iterator[tuple[str, Run, tuple[str, str]]]:
    """Yields the runs that draft, with their colours and markers in every figure.

    Table 3's ablated runs are left out. Colour and marker both differ, for prints
    without colour.
    """
    styles = itertools.cycle(zip(_COLORS, _MARKERS, strict=True))
    for name, run in zip(group.names, group.runs, strict=True):
        if not run.is_baseline and not run.is_ablated:
            yield name, run, next(styles)


def _with_nodes(group: Group) -> list[tuple[str, Run, Nodes, tuple[str, str]]]:
    """Returns the runs that recorded nodes, with all of them."""
    return [
        (name, run, nodes, style)
        for name, run, style in _drafting(group)
        if (nodes := run.nodes()) is not None and nodes.rounds
    ]


def _panels(
    count: int, height: float, title: str, *, height_ratios: Sequence[float] = ()
) -> tuple[Figure, list[Axes]]:
    """Returns a figure of panels below each other, on average `height` inches high."""
    figure = Figure(figsize=(_WIDTH, height * count + 0.6), layout="constrained")
    ratios = list(height_ratios) or None
    axes = figure.subplots(count, 1, squeeze=False, height_ratios=ratios)[:, 0]
    figure.suptitle(title)
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.set_axisbelow(True)
    return figure, list(axes)


def _bars(
    names: list[str], parts: dict[str, list[float]], title: str
) -> tuple[Figure, Axes]:
    """Returns horizontal bars, one per run, stacked of parts."""
    figure, (axis,) = _panels(1, 1.0 + 0.5 * len(names), title)
    places, left = np.arange(len(names)), np.zeros(len(names))
    looks = zip(parts.items(), _COLORS, _HATCHES, strict=False)
    for (part, sizes), color, hatch in looks:
        bars = axis.barh(places, sizes, left=left, label=part, color=color)
        for bar in bars:
            bar.set(hatch=hatch, edgecolor="white")
        left += np.asarray(sizes)
    axis.set_yticks(places, names)
    axis.invert_yaxis()
    axis.set_ymargin(0.1)
    return figure, axis


def _whole_numbers(*axes: Axes) -> None:
    """Puts ticks at whole numbers only."""
    for axis in axes:
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=20))


def _line(
    axis: Axes,
    x: Sequence[float] | np.ndarray,
    y: np.ndarray,
    name: str,
    style: tuple[str, str],
) -> None:
    color, marker = style
    axis.plot(x, y, label=name or None, color=color, marker=marker, ms=5, lw=1.6)


def _finish(figure: Figure, shares: Sequence[Axes] = ()) -> None:
    """Gives a figure its legend, and axes of shares the range from 0 to 1."""
    for axis in shares:
        axis.set_ylim(-0.03, 1.03)
    pairs = [axis.get_legend_handles_labels() for axis in figure.axes]
    handles = [handle for found, _ in pairs for handle in found]
    longest = max((len(label) for _, labels in pairs for label in labels), default=0)
    columns = 3 if longest < 25 else 2 if longest < 45 else 1
    if handles:
        figure.legend(loc="outside lower center", ncols=columns, frameon=False)
