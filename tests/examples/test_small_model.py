"""A small model of a target's own answers drafts for that target."""

import json
from pathlib import Path

import numpy as np
import pytest

from eagle_jax import load_pair
from examples.real_model import small_model


def test_a_small_model_learns_answers_and_drafts_for_its_target(
    chat_pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = np.random.default_rng(0).integers(40, size=(60, 30)).tolist()
    lines = [json.dumps({"ids": one, "loss_mask": [1] * 30}) + "\n" for one in ids]
    (tmp_path / "answers.jsonl").write_text("".join(lines))
    (tmp_path / "small.toml").write_text(
        "[model]\nhidden_size = 16\nintermediate_size = 16\nnum_layers = 2\n"
        "[run]\nbatch_size = 8\nrow_length = 15\neval_every = 10\nwarmup_steps = 2\n"
    )
    run, target = tmp_path / "run", chat_pair / "target"
    command = ["--target", target, "--config", tmp_path / "small.toml"]
    command += ["--data", tmp_path / "answers.jsonl", "--output", run, "--steps"]
    assert small_model.main([*map(str, command), "10"]) == 0
    assert small_model.main([*map(str, command), "20", "--resume"]) == 0
    assert "going on after step 10" in capsys.readouterr().err
    how = {"method": "small-model", "num_nodes": 3, "depth": 2, "width": 1}
    pair = load_pair(str(target), str(run / "model"), **how)
    (done,) = pair.generate("there", max_new_tokens=6, ignore_eos=True)
    (plain,) = pair.with_drafter(None).generate(
        "there", max_new_tokens=6, ignore_eos=True
    )
    assert done.token_ids == plain.token_ids
