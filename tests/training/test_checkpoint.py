from pathlib import Path

import pytest

from eagle_jax.files import write_json
from eagle_jax.training.checkpoint import LOCK, writing_run
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
