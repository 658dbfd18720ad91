"""The folder of a run, and its checkpoints."""

from pathlib import Path

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

from eagle_jax.files import write_json
from eagle_jax.training.checkpoint import (
    LOCK,
    Checkpoints,
    check_settings,
    writing_run,
)
from eagle_jax.training.config import LossConfig, TrainConfig
from tests.helpers import refused


def test_a_second_writer_of_a_run_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with writing_run(run):
        write_json(run / "run.json", {})
        message = f"{run} is being written by another process"
        refused(lambda: writing_run(run).__enter__(), message)
    assert [path.name for path in run.iterdir()] == ["run.json"]
    with writing_run(run):
        assert (run / LOCK).exists()


def test_a_run_of_which_nothing_came_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(KeyError), writing_run(tmp_path / "runs" / "mine"):
        raise KeyError
    assert not list(tmp_path.iterdir())
    (tmp_path / "empty").mkdir()
    with writing_run(tmp_path / "empty"):
        pass
    assert (tmp_path / "empty").is_dir()


def test_a_run_needs_a_place_for_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    refused(lambda: writing_run(tmp_path / "file").__enter__(), "is no folder")
    run = tmp_path / "file" / "run"
    refused(lambda: writing_run(run).__enter__(), f"cannot write {run}: Not a dir")


@pytest.mark.parametrize("table", [None, {}, {"noise": 0.1}])
def test_a_setting_that_was_not_known_yet_had_its_default(
    tmp_path: Path, table: dict[str, float] | None
) -> None:
    before = {} if table is None else {"loss": table}
    check_settings(tmp_path, before, TrainConfig())
    changed = TrainConfig(loss=LossConfig(decay=0.5))
    refused(lambda: check_settings(tmp_path, before, changed), "decay = 0.8, not 0.5")


def test_the_best_checkpoint_outlives_the_newest(tmp_path: Path) -> None:
    saved = Checkpoints(tmp_path, keep=1, best="agreement")
    for step, agreement in ((1, 0.2), (2, 0.9), (3, 0.5), (4, 0.4)):
        saved.save(step, {"x": jnp.full(2, step)}, {"agreement": agreement})
    assert (saved.best(), saved.latest()) == (2, 4)
    restored = saved.restore(2, {"x": jax.ShapeDtypeStruct((2,), jnp.int32)})
    assert restored["x"].tolist() == [2, 2]
    assert not (tmp_path / "3").exists()
    saved.close()


def test_a_full_disk_is_told_in_one_line_and_keeps_what_was_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    saved = Checkpoints(tmp_path, keep=2, best="agreement")
    saved.save(4, {"x": jnp.arange(2)}, {"agreement": 0.5})
    with monkeypatch.context() as patch:
        patch.setattr(ocp.CheckpointManager, "save", full)
        named = ("the checkpoint of step 8", str(tmp_path), "No space left on device")
        state = {"x": jnp.arange(2)}
        refused(lambda: saved.save(8, state, {"agreement": 0.5}), *named)
    assert saved.latest() == 4
    restored = saved.restore(4, {"x": jax.ShapeDtypeStruct((2,), jnp.int32)})
    assert restored["x"].tolist() == [0, 1]
    saved.close()
