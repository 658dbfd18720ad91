"""What trees took, kept for the next process: read as written, or plainly ignored."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eagle_jax import files
from eagle_jax.engine import PairConfig, ladder, load_pair
from eagle_jax.engine.choice import STRETCH, Figures, Ladder, choose
from eagle_jax.engine.figures import read_figures, write_figures
from eagle_jax.engine.ladder import Chooser, chooser_of

LABELS = ["root", "4/3/1", "60/6/10"]
KNOWN = Figures(
    costs={(0, 1): (10.0, 1.0), (1, 1): (640.0, 96.0), (1, 8): (20.0, 6.0)},
    yields={1: (640.0, 1280.0)},
)


def test_figures_count_as_much_as_a_stretch_when_they_are_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "trees.json"
    write_figures(path, LABELS, KNOWN)
    found = read_figures(path, LABELS)
    assert found.costs == {
        (0, 1): (10.0, 1.0),
        (1, 1): (STRETCH, pytest.approx(0.15 * STRETCH)),
        (1, 8): (20.0, 6.0),
    }
    assert found.yields == {1: (STRETCH, pytest.approx(2.0 * STRETCH))}
    # Trees by their sizes, wherever they stand in the ladder.
    assert read_figures(path, ["60/6/10", "4/3/1"]).costs.keys() == {(1, 1), (1, 8)}
    write_figures(path, LABELS, Figures())
    assert read_figures(path, LABELS) == found


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"costs": 3, "yields": {}}',
        '{"costs": {"root": {"1": [0, 1]}}, "yields": {}}',
        '{"costs": {"root": {"1": [1, Infinity]}}, "yields": {}}',
        '{"costs": {"root": {"one": [1, 1]}}, "yields": {}}',
        '{"costs": {"root": {"1": [1]}}, "yields": {}}',
        '{"costs": {"root": {"1": ["1", 1]}}, "yields": {}}',
        b"\xff",
    ],
)
def test_a_broken_file_says_nothing(tmp_path: Path, content: Any) -> None:
    path = tmp_path / "trees.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert read_figures(path, LABELS) == Figures()
    assert read_figures(tmp_path, LABELS) == Figures()


def test_a_kept_choice_is_where_the_next_process_starts(tmp_path: Path) -> None:
    rungs = Ladder(nodes=[1, 4, 60], depths=[0, 3, 6], start=2)
    path = tmp_path / "trees.json"
    write_figures(path, LABELS, KNOWN)
    costs = {"left": 100, "compile_seconds": [30.0, 30.0, 30.0]}
    assert choose(rungs, Figures(), 1, **costs)[0] == 2
    assert choose(rungs, read_figures(path, LABELS), 1, **costs)[0] == 1


def test_a_choice_is_kept_by_device_sizes_and_settings(
    tiny_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is kept unless programs are; each machine and rule has its own file."""
    kept: list[Any] = []
    monkeypatch.setattr(ladder, "atexit", SimpleNamespace(register=kept.append))

    def opened(rule: Any = "greedy", **settings: Any) -> Chooser:
        folder, head = str(tiny_pair / "target"), str(tiny_pair / "head")
        pair = load_pair(folder, head, PairConfig(), **settings)
        chooser = chooser_of(pair, rule)
        assert chooser is not None
        return chooser

    opened()
    assert not kept
    monkeypatch.setattr(files, "_KEPT", [tmp_path])
    chooser = opened()
    chooser.known.figures = KNOWN
    kept.pop()()
    assert len([*tmp_path.glob("trees-*.json")]) == 1
    assert opened().known.figures.costs.keys() == KNOWN.costs.keys()
    assert opened("coupled").known.figures == Figures()
    assert opened(rerank=False).known.figures == Figures()
    monkeypatch.setattr("os.cpu_count", lambda: 1000)
    assert opened().known.figures == Figures()
