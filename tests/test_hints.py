"""How to install what is missing is said in one way, that of a clone."""

import re
import tomllib
from pathlib import Path

import pytest

from eagle_jax.benchmarks.cases import CASES
from eagle_jax.cli import compile_report

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = set(PROJECT["optional-dependencies"])
HINT = re.compile(r"(?:eagle-jax|\.)\[([a-z,-]+)\]")


def texts() -> dict[Path, str]:
    """What a user may read: code, scripts, pages and the notebook."""
    folders = ("eagle_jax", "scripts", "docs", "examples")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.*")]
    found = [path for path in paths if path.suffix in (".py", ".md", ".ipynb")]
    found += ROOT.glob("*.md")
    return {path: path.read_text("utf-8") for path in found}


def test_every_hint_names_an_extra_of_the_clone() -> None:
    seen: set[str] = set()
    for path, text in texts().items():
        for hint in HINT.finditer(text):
            assert hint[0].startswith("."), f"{path}: no index has {hint[0]}"
            named = set(hint[1].split(","))
            assert named <= EXTRAS, f"{path}: {hint[0]}"
            seen |= named
    assert seen >= {"hf", "cli", "serve", "grammar", "torch", "gcs"}


def test_a_missing_compiler_is_brought_by_a_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert {case.extra for case in CASES} <= EXTRAS
    monkeypatch.setattr(compile_report, "has_compiler", lambda _: False)
    ways = {
        "": "pip install '.[gpu-compile]' or pip install '.[tpu-compile]'",
        "Mixtral": "pip install '.[tpu-compile]'",
    }
    for chosen, way in ways.items():
        assert compile_report.main(["--only", chosen]) == 2
        assert f"missing; {way} in the clone" in capsys.readouterr().err
