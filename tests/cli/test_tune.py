"""The tuner as its users see it."""

import contextlib
import io
import json
from pathlib import Path

import pytest

from eagle_jax.config import load_config
from eagle_jax.generation.config import GenerateConfig
from eagle_jax.methods import METHODS
from eagle_jax.tuning import contest
from eagle_jax.tuning.trees import show
from tests.conftest import Main, load_main


@pytest.fixture(scope="module")
def tune() -> Main:
    return load_main("tune")


@pytest.fixture(scope="module")
def flags(tiny_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("tuned")
    prompts = folder / "prompts.json"
    prompts.write_text(json.dumps(["ten", "one more", "no"]))
    # The target drafts for itself: drafts are accepted.
    folders = ["--target", f"{tiny_pair}/target", "--draft", f"{tiny_pair}/target"]
    folders += ["--method", "small-model"]
    small = ["--max-new-tokens", "8", "--repeats", "1", "--grid", "2/1/1 3/1/2"]
    output = ["--output", str(folder / "tuned.toml")]
    return [*folders, "--prompts", str(prompts), *small, *output]


@pytest.fixture(scope="module")
def output(tune: Main, flags: list[str]) -> str:
    """What a run prints."""
    batch = ["--batch-size", "2"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert tune([*flags, *batch, "--temperature", "0.5"]) == 0
    return printed.getvalue()


def test_what_is_written_can_be_generated_with(output: str, flags: list[str]) -> None:
    file = Path(flags[-1])
    config = load_config(file, GenerateConfig)
    assert config.decoding.batch_size == 2
    pays = config.decoding.method == "small-model"
    assert pays or config.decoding.method == "autoregressive"
    assert ("no tree pays" in output) != pays
    names = sorted(path.name for path in file.parent.iterdir())
    assert names == ["prompts.json", "tuned.toml"]


def test_every_method_with_settings_to_try_is_tuned(
    tune: Main, capsys: pytest.CaptureFixture[str]
) -> None:
    for method in (name for name, row in METHODS.items() if row.trials):
        given = ["--method", method, "--target", "a", "--draft", "b", "--repeats", "0"]
        assert tune(given) == 2
        assert "--repeats = 0 must be at least 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("method", "sizes", "settings", "tree"),
    [
        ("lookup", ["--grid", "2/1/1"], "num_nodes/depth/width/max_ngram", "2/1/1/2"),
        (
            "eagle2+lookup",
            ["--grid", "2/1/1"],
            "num_nodes/depth/width/min_match",
            "2/1/1/3",
        ),
    ],
)
def test_every_setting_of_a_tree_is_run(
    tune: Main,
    tiny_pair: Path,
    flags: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    method: str,
    sizes: list[str],
    settings: str,
    tree: str,
) -> None:
    # Of equally quick ones the first is taken.
    monkeypatch.setattr(contest.Timing, "speedup", lambda *_: 2.0)
    given = ["--target", f"{tiny_pair}/target", "--method", method, *sizes]
    given += ["--draft", f"{tiny_pair}/head"] if METHODS[method].weights else []
    given += ["--prompts", flags[flags.index("--prompts") + 1], "--repeats", "1"]
    given += ["--max-new-tokens", "8", "--output", f"{tmp_path}/tuned.toml"]
    assert tune(given) == 0
    printed = capsys.readouterr().out
    assert f"{method}, batch size 1" in printed and settings in printed
    assert f"{tree}: 2.00 times" in printed
    config = load_config(tmp_path / "tuned.toml", GenerateConfig)
    assert config.decoding.method == method
    assert show(config.tree, METHODS[method]) == tree


def test_drafts_are_accepted_in_the_trees_that_are_run(output: str) -> None:
    rows = [line.split("│") for line in output.splitlines()]
    trees = [row for row in rows if len(row) > 4 and "/" in row[1]]
    assert {row[1].strip() for row in trees} == {"2/1/1", "3/1/2"}
    for row in trees:
        assert row[2].strip() == "1"
        assert float(row[3]) > 1
