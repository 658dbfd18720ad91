"""Figures hold the numbers that they claim to."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from eagle_jax.evaluation import plots
from eagle_jax.evaluation.nodes import Nodes
from eagle_jax.evaluation.read_runs import read_runs
from eagle_jax.evaluation.runs import Group, groups
from tests.evaluation.synthetic import plain, record, write

# Two rounds of a chain of two tokens, of which three were accepted.
NODES = Nodes.from_json(
    {
        "rounds": 2,
        "tried": {
            "depth": [1, 2, 1, 2],
            "rank": [0, 0, 0, 0],
            "log_confidence": np.log([0.5, 0.5, 0.5, 0.9]).tolist(),
            "is_accepted": [1, 1, 1, 0],
        },
        "positions": [2, 2, 1],
        "drafted": 4,
        "values": {
            "count": [0] * 19 + [4],
            "accepted": [0] * 19 + [3],
            "sum": [3.9] * 20,
        },
    }
)
STEPS = {"draft": 0.004, "verify": 0.006, "commit": 0.001, "token": 0.005}


def _group(folder: Path, **run: Any) -> Group:
    run = {"accept_lengths": [3, 2], "depth": 2} | run
    lines = [record(1, nodes=NODES, step_seconds=STEPS, **run), record(2, **run)]
    write(folder / "a.jsonl", lines)
    write(folder / "b.jsonl", [plain(1)])
    # Ablated runs stay out of figures.
    write(folder / "c.jsonl", [record(1, nodes=NODES, rerank=False)])
    (group,) = groups(read_runs([folder]), one_batch_size=True)
    return group


def _lines(figure: Figure | str, panel: int = 0) -> list[tuple[list, list]]:
    """The points of a panel's lines."""
    assert isinstance(figure, Figure)
    lines = figure.axes[panel].lines
    return [
        (np.asarray(x.get_xdata()).tolist(), np.asarray(x.get_ydata()).tolist())
        for x in lines
    ]


def _widths(figure: Figure | str) -> list[float]:
    """The lengths of lying bars."""
    assert isinstance(figure, Figure)
    bars = figure.axes[0].patches
    return [bar.get_width() for bar in bars if isinstance(bar, Rectangle)]


def test_depths_are_drawn_of_all_rounds_and_of_those_that_got_there(
    tmp_path: Path,
) -> None:
    figure = plots.depth(_group(tmp_path))
    assert _lines(figure, 0) == [([1, 2], [1.0, 0.5])]
    assert _lines(figure, 1) == [([1, 2], [1.0, 0.5])]


def test_ranks_and_n_alpha_are_drawn(tmp_path: Path) -> None:
    group = _group(tmp_path, method="chain", label="chain")
    assert _lines(plots.rank(group)) == [([0], [0.75])]
    assert _lines(plots.n_alpha(group)) == [([0, 1], [1.0, 0.5])]


def test_confidence_is_drawn_beside_the_diagonal(tmp_path: Path) -> None:
    group = _group(tmp_path)
    diagonal, (x, y) = _lines(plots.confidence(group))
    assert diagonal == ([0, 1], [0, 1])
    held = ~np.isnan(x)
    np.testing.assert_allclose(np.asarray(x)[held], [0.5, 0.9], atol=1e-6)
    np.testing.assert_allclose(np.asarray(y)[held], [1.0, 0.0])
    _, (x, y) = _lines(plots.value(group))
    assert (x[-1], y[-1]) == (pytest.approx(3.9 / 4), 0.75)


@pytest.mark.parametrize("method", ["lookup", "eagle2+lookup"])
def test_copied_drafts_have_no_confidence(tmp_path: Path, method: str) -> None:
    group = _group(tmp_path, method=method, label=method)
    assert isinstance(plots.confidence(group), str)
    assert isinstance(plots.value(group), str)


def test_positions_have_a_point_per_question_without_the_root(tmp_path: Path) -> None:
    figure = plots.positions(_group(tmp_path, method="eagle1", label="eagle1"))
    ((x, y), (deeper_x, deeper_y)) = _lines(figure)
    # Points are spread a little around their position.
    assert [round(place) for place in (*x, *deeper_x)] == [1, 2]
    assert (y, deeper_y) == ([1.0], [0.5])


def test_bars_stack_nodes_and_milliseconds(tmp_path: Path) -> None:
    group = _group(tmp_path)
    assert _widths(plots.wasted(group)) == [1.5, 0.5]
    assert _widths(plots.step_time(group)) == pytest.approx([4.0, 6.0, 1.0])


def test_lengths_are_shares_of_steps(tmp_path: Path) -> None:
    group = _group(tmp_path, accept_lengths=[1, 3, 3, 3])
    assert _lines(plots.lengths(group)) == [([1, 2, 3], [0.25, 0.0, 0.75])]


def test_a_run_keeps_its_colour_in_every_figure(tmp_path: Path) -> None:
    _group(tmp_path)
    # It drafts too, but has no nodes.
    lookup = record(1, method="lookup", label="lookup")
    write(tmp_path / "d.jsonl", [lookup])
    (group,) = groups(read_runs([tmp_path]), one_batch_size=True)
    figures = [plots.lengths(group), plots.rank(group)]
    colors = [
        f.axes[0].lines[-1].get_color() for f in figures if not isinstance(f, str)
    ]
    assert len(colors) == 2 and len(set(colors)) == 1


def test_without_data_there_is_a_reason(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [plain(1)])
    (group,) = groups(read_runs([tmp_path]), one_batch_size=True)
    for draw, named in (
        *((plots.positions, "eagle1"), (plots.confidence, "--nodes")),
        *((plots.depth, "--nodes"), (plots.lengths, "drafted")),
        *((plots.step_time, "step times"), (plots.n_alpha, "chain")),
    ):
        reason = draw(group)
        assert isinstance(reason, str) and named in reason
