"""The tuner as its users see it."""

import json
from pathlib import Path

import pytest

from eagle_jax.config import load_config
from eagle_jax.engine.config import PairConfig
from tests.conftest import load_main


def test_trees_are_run_and_what_is_written_can_be_generated_with(
    tiny_pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, file = tmp_path / "prompts.json", tmp_path / "tuned.toml"
    prompts.write_text(json.dumps(["ten", "one more", "no"]))
    # The target drafts for itself: drafts are accepted.
    pair = ["--target", f"{tiny_pair}/target", "--draft", f"{tiny_pair}/target"]
    pair += ["--method", "small-model", "--prompts", str(prompts)]
    trees = ["--grid", "2/1/1 3/1/2", "--repeats", "1", "--max-new-tokens", "8"]
    text = ["--batch-size", "2", "--temperature", "0.5", "--output", str(file)]
    assert load_main("tune")([*pair, *trees, *text]) == 0
    output = capsys.readouterr().out
    rows = [line.split("│") for line in output.splitlines()]
    measured = {row[1].strip(): row[2] for row in rows if len(row) > 4}
    assert {"2/1/1", "3/1/2"} <= measured.keys()
    for name in ("2/1/1", "3/1/2"):
        assert float(measured[name]) > 1
    config = load_config(file, PairConfig)
    assert config.batch_size == 2
    pays = config.method == "small-model"
    assert pays or config.method == "autoregressive"
    assert ("no tree pays" in output) != pays
    assert sorted(tmp_path.iterdir()) == [prompts, file]
