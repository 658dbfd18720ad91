"""Figures hold the numbers that they claim to."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from eagle_jax.evaluation import plots
from eagle_jax.evaluation.runs import Group, groups, read_runs
from tests.evaluation.synthetic import plain, record, tree, write

# Two rounds of a chain of two tokens, of which three were accepted.
NODES = [
    tree([-1, 0, 1], np.log([1.0, 0.5, 0.5 * second]).tolist(), accepted, 3)
    for second, accepted in ((0.5, [1, 2]), (0.9, [1]))
]


def _group(folder: Path, **run: Any) -> Group:
    run = {"accept_lengths": [3, 2], "depth": 2} | run
    lines = [record(1, nodes=NODES, **run), record(2, **run)]
    write(folder / "a.jsonl", lines)
    write(folder / "b.jsonl", [plain(1)])
    # Ablated runs stay out of figures.
    write(folder / "c.jsonl", [record(1, nodes=NODES, rerank=False)])
    (group,) = groups(read_runs([folder]))
    return group


def _lines(figure: Figure | None) -> list[tuple[list, list]]:
    """The points of the first panel's lines."""
    assert figure is not None
    lines = figure.axes[0].lines
    return [
        (np.asarray(x.get_xdata()).tolist(), np.asarray(x.get_ydata()).tolist())
        for x in lines
    ]


def test_acceptance_falls_with_depth_as_rounds_end(tmp_path: Path) -> None:
    group = _group(tmp_path, accept_lengths=[3, 2, 1, 3])
    ((levels, shares),) = _lines(plots.depths(group))
    assert (levels, shares) == ([1, 2], [0.75, 0.5])


def test_confidence_is_drawn_beside_the_diagonal(tmp_path: Path) -> None:
    group = _group(tmp_path)
    diagonal, (x, y) = _lines(plots.confidence(group))
    assert diagonal == ([0, 1], [0, 1])
    held = ~np.isnan(x)
    np.testing.assert_allclose(np.asarray(x)[held], [0.5, 0.9], atol=1e-6)
    np.testing.assert_allclose(np.asarray(y)[held], [1.0, 0.0])


@pytest.mark.parametrize(
    ("method", "has_positions", "has_confidence"),
    [
        *(("eagle1", True, True), ("hydra", True, True), ("recycling", True, False)),
        *((name, False, True) for name in ("eagle2", "chain", "later")),
        # Copied drafts have no confidence.
        *((name, False, False) for name in ("lookup", "eagle2+lookup")),
    ],
)
def test_figures_are_of_methods_with_positions_of_their_own_or_confidences(
    tmp_path: Path, method: str, has_positions: bool, has_confidence: bool
) -> None:
    group = _group(tmp_path, method=method, label=method)
    assert (plots.confidence(group) is not None) == has_confidence
    figure = plots.positions(group)
    assert (figure is not None) == has_positions
    if has_positions:
        # A point per question, spread a little around its place, without the root.
        ((x, y), (deeper_x, deeper_y)) = _lines(figure)
        assert [round(place) for place in (*x, *deeper_x)] == [1, 2]
        assert (y, deeper_y) == ([1.0], [0.5])
