"""Exports appear whole or not at all; `tests/test_files.py` has folders in general."""

import dataclasses
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
import safetensors.numpy

from eagle_jax.checkpoints import export_files, export_head
from tests.helpers import file_bytes, refused
from tests.tiny import HEAD, random_head

_FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _fail(error: BaseException) -> Callable[..., None]:
    """A function that raises, whatever it is called with."""

    def raise_it(*_: object, **__: object) -> None:
        raise error

    return raise_it


@pytest.mark.parametrize("kind", ["notes", "a folder", "someone else's", "no JSON"])
def test_a_folder_that_is_not_ours_is_never_replaced(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "head"
    export_head(folder, HEAD, random_head())
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
    refused(
        lambda: export_head(folder, HEAD, random_head(), overwrite=True),
        str(folder),
        "holds something else",
    )
    assert sorted(path.name for path in folder.iterdir()) == before


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
            "pytorch_model.bin failed (unexpected pos 576 vs 534); is the disk full?",
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
    folder = tmp_path / "head"
    export_head(folder, HEAD, random_head())
    before = file_bytes(folder)
    monkeypatch.setattr(writer, _fail(error))
    for path in (folder, tmp_path / "other"):
        refused(
            lambda path=path: export_head(
                path, HEAD, random_head(), dtype="float16", overwrite=True
            ),
            f"cannot write {path}: ",
            named,
            "free some space",
        )
    assert file_bytes(folder) == before
    assert [path.name for path in tmp_path.iterdir()] == ["head"]


def test_an_interrupted_export_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_files, "_check_bits", _fail(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        export_head(tmp_path / "head", HEAD, random_head())
    assert not list(tmp_path.iterdir())


@pytest.mark.torch
def test_what_reads_back_differently_never_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    save_torch, save_numpy = torch.save, safetensors.numpy.save_file

    def negate(tensors: dict[str, Any], *names: str) -> dict[str, Any]:
        return tensors | {name: -tensors[name] for name in names}

    def save_wrong_bin(tensors: dict[str, Any], path: Path) -> None:
        save_torch(negate(tensors, "fc.bias"), path)

    def save_wrong(tensors: dict[str, Any], path: Path, **fields: Any) -> None:
        save_numpy(negate(tensors, "fc.bias"), path, **fields)

    folder = tmp_path / "head"
    # Negative zero equals zero, but not in its bits.
    params = dataclasses.replace(random_head(), fc_bias=jnp.zeros(32))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", save_wrong_bin)
        refused(lambda: export_head(folder, HEAD, params), "pytorch_model.bin reads")
    with monkeypatch.context() as patch:
        patch.setattr(safetensors.numpy, "save_file", save_wrong)
        refused(lambda: export_head(folder, HEAD, params), "model.safetensors reads")
    assert not list(tmp_path.iterdir())


def test_a_calibration_that_a_kill_left_half_written_hinders_nobody(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "head"
    export_head(folder, HEAD, random_head())
    (folder / ".calibration.json.unfinished").write_text("{")
    (folder / ".calibration.json.lock").touch()
    export_head(folder, HEAD, random_head(), overwrite=True)
    assert not list(folder.glob(".*"))
