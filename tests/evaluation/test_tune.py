"""Which tree wins, and the settings file of the one that pays."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest

from eagle_jax.config import TreeConfig, load_config
from eagle_jax.engine.config import PairConfig
from eagle_jax.evaluation.tune import (
    MOST_TREES,
    Tree,
    Trial,
    halve,
    parse_grid,
    settings_file,
    show,
)
from eagle_jax.methods import METHODS, PLAIN
from tests.helpers import refused

TUNED = [name for name, method in METHODS.items() if method.trials]


def read_back(
    file: Path, tree: Tree, speedup: float, method: str, *shown: str
) -> PairConfig:
    """What the settings file says that is written when a tree was the quickest."""
    plain = Trial(tree=None, tokens=1, seconds=[speedup])
    best = Trial(tree=tree, plain=plain, tokens=1, tokens_per_round=2.0, seconds=[1.0])
    config = PairConfig(method=method, batch_size=3, dtype="float32")
    text = settings_file(best, config, comments=("target a\nb",))
    assert all(words in text for words in shown)
    assert ("no tree pays" in text) == (speedup <= 1)
    file.write_text(text)
    return load_config(file, PairConfig)


@pytest.mark.parametrize("method", TUNED)
def test_every_setting_that_is_tried_is_generated_with_if_it_pays(
    tmp_path: Path, method: str
) -> None:
    tried, file = METHODS[method].trials, tmp_path / "tuned.toml"
    shown = [show(tree, METHODS[method]) for tree in tried]
    assert parse_grid(" ".join(shown), METHODS[method]) == list(tried)

    for tree in tried:
        config = read_back(file, tree, 1.5, method, "1.50 times")
        assert (config.tree, config.method) == (tree, method)
        assert (config.batch_size, config.dtype) == (3, "float32")
    assert read_back(file, tried[0], 0.9, method, "0.90 times").method == PLAIN.name


@pytest.mark.parametrize("text", ["", "8/7", "8-7-1", "8/7/1,9/8/1", "1/3/2", "8/0/2"])
def test_grids_that_draft_nothing_are_refused(text: str) -> None:
    refused(lambda: parse_grid(text), "`grid`")
    refused(lambda: parse_grid(f"60/6/{'9' * 5000}"), "must be num_nodes/depth/width")
    many = " ".join(f"{n}/1/1" for n in range(2, 3 + MOST_TREES))
    refused(lambda: parse_grid(many), "13 settings to run in turns; give 1 to 12")


def test_a_calibration_goes_with_its_tree(tmp_path: Path) -> None:
    tree = TreeConfig(num_nodes=8, depth=4, width=2, calibration='a "b" 📁.json')
    assert read_back(tmp_path / "tuned.toml", tree, 2.0, "eagle2").tree == tree


def test_speeds_compare_neighbours_in_time() -> None:
    plain = Trial(tree=None, tokens=10, seconds=[1.0, 4.0, 2.0, 9.0])
    tree = Trial(tree=TreeConfig(), plain=plain, tokens=10, seconds=[0.5, 1.0, 2.0])
    assert tree.speedup == 2.0


@pytest.mark.parametrize("count", range(1, MOST_TREES + 1))
def test_the_slower_half_is_dropped_until_two_are_left(count: int) -> None:
    given = [TreeConfig(num_nodes=nodes) for nodes in range(2, 2 + count)]
    plain = Trial(tree=None, tokens=10, seconds=[99.0] * 9)
    stages: list[int] = []

    def measure(left: Sequence[Trial]) -> None:
        stages.append(len(left))
        for one in left:  # The largest is the quickest.
            one.seconds.append(1.0 / one.tree.num_nodes)

    found = halve([Trial(tree=tree, plain=plain, tokens=10) for tree in given], measure)
    assert [one.tree for one in found] == given[::-1]
    assert stages[0] == count
    assert stages[-1] == min(count, 2)
    for larger, smaller in itertools.pairwise(stages):
        assert smaller == (larger + 1) // 2
