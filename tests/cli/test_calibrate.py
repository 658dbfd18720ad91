"""The calibration of a pair as its users see it."""

import json
from pathlib import Path

import pytest

from eagle_jax.checkpoints.draft_files import load_calibration
from tests.conftest import load_main


def test_a_pair_is_calibrated_for_both_kinds_of_text(
    tiny_pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, file = tmp_path / "prompts.json", tmp_path / "calibration.json"
    prompts.write_text(json.dumps(["ten", "one more", "x" * 300, "no"]))
    # The target drafts for itself: drafts are accepted.
    pair = ["--target", f"{tiny_pair}/target", "--draft", f"{tiny_pair}/target"]
    pair += ["--method", "small-model"]
    tree = ["--num-nodes", "5", "--depth", "2", "--width", "2"]
    text = ["--prompts", str(prompts), "--max-new-tokens", "8", "--batch-size", "2"]
    calibrate = load_main("calibrate")
    assert calibrate([*pair, *tree, *text, "--output", str(file)]) == 0
    captured = capsys.readouterr()
    assert "1 prompts of over 248 tokens are left out" in captured.err
    content = json.loads(file.read_text())
    assert set(content) == {"vocab_size", "greedy", "sampled", "source"}
    for kind in ("greedy", "sampled"):
        assert content[kind]["rows"] > 0
        size = content["vocab_size"]
        read = load_calibration(file, vocab_size=size, depth=2, kind=kind)
        assert len(getattr(read, kind).exponents) == 2
