"""The folder of a run, and its checkpoints."""

from pathlib import Path

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

from eagle_jax.training.checkpoint import Checkpoints, writing_run
from tests.helpers import refused


def test_a_run_has_one_writer_and_leaves_no_empty_folder(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(KeyError), writing_run(run):
        refused(lambda: writing_run(run).__enter__(), "is being written by another")
        raise KeyError
    assert not list(tmp_path.iterdir())
    run.mkdir()
    with writing_run(run):
        pass
    assert list(tmp_path.iterdir()) == [run]


def test_a_run_needs_a_place_for_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    refused(lambda: writing_run(tmp_path / "file").__enter__(), "is no folder")
    run = tmp_path / "file" / "run"
    refused(lambda: writing_run(run).__enter__(), f"cannot write {run}: Not a dir")


def test_the_best_checkpoint_outlives_the_newest_and_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    saved = Checkpoints(tmp_path, keep=1, best="agreement")
    for step, agreement in ((1, 0.2), (2, 0.9), (3, 0.5), (4, 0.4)):
        saved.save(step, {"x": jnp.full(2, step)}, {"agreement": agreement})
    with monkeypatch.context() as patch:
        patch.setattr(ocp.CheckpointManager, "save", full)
        named = ("the checkpoint of step 8", str(tmp_path), "No space left on device")
        refused(lambda: saved.save(8, {"x": jnp.ones(2)}, {"agreement": 1.0}), *named)
    assert (saved.best(), saved.latest()) == (2, 4)
    restored = saved.restore(2, {"x": jax.ShapeDtypeStruct((2,), jnp.int32)})
    assert restored["x"].tolist() == [2, 2]
    assert not (tmp_path / "3").exists()
    saved.close()
