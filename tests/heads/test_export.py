"""Exports appear whole or not at all; `tests/test_files.py` has folders in general."""

from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.numpy

from eagle_jax.checkpoints import Export
from eagle_jax.heads import export_head
from tests import tiny
from tests.heads.samples import weights, write
from tests.helpers import file_bytes, refused

HEAD = tiny.HEAD


@pytest.mark.parametrize("kind", ["notes", "a folder", "someone else's", "no JSON"])
def test_a_folder_that_is_not_ours_is_never_replaced(tmp_path: Path, kind: str) -> None:
    folder = write(tmp_path / "head", HEAD)
    settings = folder / "config.json"
    if kind == "notes":
        (folder / "notes.txt").write_text("do not lose me")
    elif kind == "a folder":
        (folder / "tokenizer.json").mkdir()
    elif kind == "someone else's":
        settings.write_text(settings.read_text().replace("eagle_jax", "somebody"))
    else:
        settings.write_text("{")
    before = sorted(path.name for path in folder.iterdir())
    refused(lambda: write(folder, HEAD, overwrite=True), str(folder), "something else")
    assert sorted(path.name for path in folder.iterdir()) == before


def fail(error: BaseException) -> Callable[..., None]:
    """A function that raises, whatever it is called with."""

    def raise_it(*_: object, **__: object) -> None:
        raise error

    return raise_it


@pytest.mark.torch
@pytest.mark.parametrize(
    ("writer", "error", "named"),
    [
        (
            "safetensors.numpy.save_file",
            safetensors.SafetensorError("I/O error: No space left on device (28)"),
            ": No space left on device;",
        ),
        (
            "torch.save",
            RuntimeError("unexpected pos 576 vs 534"),
            ": unexpected pos 576 vs 534; is the disk full?",
        ),
    ],
)
def test_a_full_disk_is_told_in_one_line_and_changes_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    writer: str,
    error: Exception,
    named: str,
) -> None:
    folder = write(tmp_path / "head", HEAD, with_pickle=True)
    before = file_bytes(folder)
    monkeypatch.setattr(writer, fail(error))
    how = Export(dtype="float16", overwrite=True)
    for path in (folder, tmp_path / "other"):
        refused(
            lambda path=path: export_head(path, tiny.head_of(HEAD), weights(HEAD), how),
            f"cannot write {path}: ",
            named,
            "free some space",
        )
    assert file_bytes(folder) == before
    assert [path.name for path in tmp_path.iterdir()] == ["head"]


def test_a_calibration_that_a_kill_left_half_written_hinders_nobody(
    tmp_path: Path,
) -> None:
    folder = write(tmp_path / "head", HEAD)
    (folder / ".calibration.json.unfinished").write_text("{")
    (folder / ".calibration.json.lock").touch()
    write(folder, HEAD, overwrite=True)
    assert not list(folder.glob(".*"))
