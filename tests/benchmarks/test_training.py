"""Timing of training steps."""

from pathlib import Path

import jax
import pytest

from eagle_jax.benchmarks.training import (
    TIMED,
    TRAININGS,
    time_training,
    training_step,
)
from eagle_jax.cli import benchmark
from eagle_jax.models import transformer
from tests import tiny


# The head of many levels, and the one whose first weights share arrays.
@pytest.mark.parametrize("name", ["eagle3", "hydra"])
def test_steps_are_timed_beside_the_targets_forward(name: str) -> None:
    target = tiny.target_config(num_layers=3)
    config = training_step(name, target, "float32", row_length=8)
    weights = transformer.init_params(jax.random.key(0), target)
    speeds = time_training(config, weights, batch_size=1, row_length=8, repeats=2)
    assert tuple(speeds) == TIMED
    assert all(len(values) == 2 and min(values) > 0 for values in speeds.values())


def test_a_target_alone_is_enough(
    tiny_pair: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(benchmark, "TRAININGS", {"eagle2": TRAININGS["eagle2"]})
    sizes = ["--batch-size", "1", "--row-length", "8", "--repeats", "1"]
    target = ["--target", f"{tiny_pair}/target"]
    assert benchmark.main(["--training", *target, *sizes]) == 0
    assert "eagle2" in capsys.readouterr().out


def test_a_target_too_shallow_for_a_kind_is_refused_before_any_is_timed(
    tiny_pair: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = ["--target", f"{tiny_pair}/target"]
    assert benchmark.main(["--training", *target]) == 2
    captured = capsys.readouterr()
    assert "timing" not in captured.out + captured.err
    assert "layers" in captured.err
