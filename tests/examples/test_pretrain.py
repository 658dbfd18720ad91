"""Training a small target from scratch."""

import dataclasses
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from eagle_jax import checkpoints
from eagle_jax.models.transformer import (
    Transformer,
    TransformerConfig,
    TransformerParams,
)
from examples.embedded_pair import pretrain as command
from examples.embedded_pair.training import deepen
from tests.conftest import Main


def weights(run: Path) -> dict[str, np.ndarray]:
    return safetensors.numpy.load_file(run / "model" / "model.safetensors")


def test_the_model_generates_from_its_folder(
    main: Main, run: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    flags = ["--method", "autoregressive", "--max-new-tokens", "5", "--ignore-eos"]
    target = ["--target", f"{run}/model", "--prompt", "def f"]
    assert main([*target, *flags, "--json", str(out)]) == 0
    (found,) = json.loads(out.read_text())["runs"]
    assert found["prompt_ids"][0] == 0
    assert len(found["generated_ids"]) == 5


def test_a_deeper_model_computes_the_same_before_it_is_trained(run: Path) -> None:
    config, params = checkpoints.load_target(run / "model")
    deeper = dataclasses.replace(config, num_layers=6)

    def hidden(config: TransformerConfig, params: TransformerParams) -> jax.Array:
        model = Transformer(config=config)
        tokens = jnp.arange(8)[None]
        cache = model.init_cache(1, 0)
        return model.forward(params, tokens, tokens, None, cache).hidden

    found = hidden(deeper, deepen(params, 6))
    np.testing.assert_array_equal(found, hidden(config, params))


def test_held_out_text_is_kept_apart(run: Path) -> None:
    def text(name: str) -> str:
        lines = (run / f"{name}.jsonl").read_text().splitlines()
        return "".join(json.loads(line)["text"] for line in lines)

    assert '"""heapq."""' in text("held_out") and '"""one."""' in text("train")
    assert "heapq" not in text("train")


def test_a_resumed_run_ends_as_an_uninterrupted_one(
    pretrain: Main,
    flags: list[str],
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from eagle_jax.training.checkpoint import Checkpoints

    output = tmp_path / "stopped"
    save = Checkpoints.save

    def stop_after(self: Checkpoints, step: int, *rest: Any) -> None:
        save(self, step, *rest)
        if step == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", stop_after)
        assert pretrain([*flags, "--output", str(output)]) == 130
    assert not (output / "model").exists()
    assert pretrain([*flags, "--output", str(output), "--resume"]) == 0
    for name, tensor in weights(run).items():
        np.testing.assert_array_equal(weights(output)[name], tensor, err_msg=name)


def test_a_folder_with_something_in_it_is_refused(
    pretrain: Main, flags: list[str], run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pretrain([*flags, "--output", str(run)]) == 2
    assert "is not empty" in capsys.readouterr().err


def test_the_module_is_a_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = command.__name__
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    # A module that is imported already would be run with a warning.
    monkeypatch.delitem(sys.modules, name)
    with pytest.raises(SystemExit) as stopped:
        runpy.run_module(name, run_name="__main__")
    assert stopped.value.code == 0
    assert "--tokenizer" in capsys.readouterr().out
