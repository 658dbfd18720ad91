"""What trees are compared by, and the settings file of the one that pays."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from eagle_jax.config import GenerateConfig, Method, TreeConfig, load_config
from eagle_jax.tuning import tried
from eagle_jax.tuning.contest import (
    MOST_TREES,
    Entry,
    Timing,
    distance,
    entries,
    settings_file,
)
from eagle_jax.tuning.prediction import Prediction, parse_grid, show


def entry(settings: str, speedup: float) -> Entry:
    (tree,) = parse_grid(settings)
    return Entry(
        prediction=Prediction(tree=tree, tokens_per_round=2.0, speedup=speedup),
        tokens_per_round=2.0,
        speedup=speedup,
    )


@pytest.mark.parametrize("method", ["eagle2", "small-model"])
def test_the_best_tree_is_recommended_if_it_pays(
    tmp_path: Path, method: Method
) -> None:
    file = tmp_path / "tuned.toml"
    fast, slow = entry("8/7/1", 1.5), entry("8/7/1", 0.9)
    common: dict[str, Any] = {"batch_size": 3, "comments": ("a line",)}
    common |= {"temperature": 0.0}
    text = settings_file(fast, method=method, dtype="float32", **common)
    assert "1.50 times" in text
    file.write_text(text)
    config = load_config(file, GenerateConfig)
    assert config.tree == TreeConfig(num_nodes=8, depth=7, width=1)
    assert config.decoding.method == method
    assert (config.decoding.batch_size, config.decoding.dtype) == (3, "float32")

    text = settings_file(
        fast, method=method, dtype="auto", **common | dict[str, Any](temperature=1.0)
    )
    file.write_text(text)
    config = load_config(file, GenerateConfig)
    assert config.tree == TreeConfig()
    assert config.at(0.0).tree == TreeConfig()
    assert config.at(0.7).tree == TreeConfig(num_nodes=8, depth=7, width=1)

    text = settings_file(slow, method=method, dtype="auto", **common)
    assert "no tree pays" in text
    file.write_text(text)
    config = load_config(file, GenerateConfig)
    assert config.decoding.method == "autoregressive"
    assert config.tree == TreeConfig()


@pytest.mark.parametrize("method", tried.METHODS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_setting_that_is_tried_is_generated_with(
    tmp_path: Path, method: Method, temperature: float
) -> None:
    trees = tried.settings(method)
    assert len(trees) == len(set(trees)) <= MOST_TREES
    shown = {show(tree, method) for tree in trees}
    assert len(shown) == len(trees)
    for tree in trees:
        best = Entry(
            prediction=Prediction(tree=tree), tokens_per_round=2.0, speedup=1.5
        )
        common = {"temperature": temperature, "batch_size": 1, "dtype": "auto"}
        file = tmp_path / "tuned.toml"
        file.write_text(settings_file(best, method=method, comments=(), **common))
        config = load_config(file, GenerateConfig).at(temperature)
        assert (config.tree, config.decoding.method) == (tree, method)


def test_a_calibration_goes_with_its_tree(tmp_path: Path) -> None:
    best = entry("8/4/2", 2.0)
    tree = dataclasses.replace(best.prediction.tree, calibration='a "b" 📁.json')
    prediction = dataclasses.replace(best.prediction, tree=tree)
    best = dataclasses.replace(best, prediction=prediction)
    file = tmp_path / "tuned.toml"
    sizes = {"temperature": 0.0, "batch_size": 1, "dtype": "auto"}
    comments = ["target a\nb"]
    file.write_text(settings_file(best, method="eagle2", comments=comments, **sizes))
    assert load_config(file, GenerateConfig).tree == tree


def test_speeds_compare_neighbours_in_time() -> None:
    plain = Timing(tokens=10, tokens_per_round=1.0, seconds=(1.0, 4.0, 2.0))
    tree = Timing(tokens=10, tokens_per_round=2.5, seconds=(0.5, 1.0, 2.0))
    assert tree.speedup(plain) == 2.0
    predictions = [entry("3/2/1", 1.0).prediction, entry("4/2/2", 0.5).prediction]
    found = entries(predictions, plain, [plain, tree])
    assert [show(e.prediction.tree) for e in found] == ["4/2/2", "3/2/1"]


def test_the_distance_is_that_of_the_second_measurement() -> None:
    swept = [entry("4/2/2", 2.0), entry("3/2/1", 1.5)]
    line = distance(entry("3/2/1", 9.0), swept)
    assert "best is 4/2/2 at 2.00" in line
    assert "measures 1.50, 25.0% less" in line
