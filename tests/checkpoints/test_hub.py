"""Where checkpoints lie."""

from pathlib import Path

import pytest

from eagle_jax.checkpoints import resolve
from tests.helpers import refused


def test_what_is_no_checkpoint_is_refused(target: Path, tmp_path: Path) -> None:
    for name in (
        *(str(tmp_path / "nowhere"), str(target / "config.json")),
        "~nobody-of-that-name/model",
    ):
        refused(lambda name=name: resolve(name), name, "is no folder; give")
    (tmp_path / "empty").mkdir()
    refused(lambda: resolve(str(tmp_path / "empty")), "holds no config.json; give")
    assert resolve(str(target)) == target


def test_a_name_that_the_hub_does_not_have_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def offline(*_: object, **__: object) -> str:
        raise OSError("there is no network\nand more lines")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    named = ("nobody/nothing is neither a local folder", "(there is no network)")
    refused(lambda: resolve("nobody/nothing"), *named)
