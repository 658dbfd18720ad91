"""The comparison with other programs, on one prompt."""

import sys

import pytest

from examples import peers

pytestmark = pytest.mark.torch


def test_other_programs_write_the_same_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--prompts", "1", "--turns", "1", "--new-tokens", "12", "--only"]
    named = ["eagle_jax 8/7/1 uncalibrated", "transformers lookup"]
    monkeypatch.setattr(sys, "argv", ["peers.py", *flags, *named])
    peers.main()
    rows = capsys.readouterr().out.splitlines()[-3:]
    names = [row.split(" | ")[0].removeprefix("| ") for row in rows]
    assert names == ["eagle_jax plain", *named]
    assert all(row.endswith("| 1 of 1 |") for row in rows), rows
