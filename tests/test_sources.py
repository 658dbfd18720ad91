"""Sources are short, and one file decides by the name of a method."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle_jax.methods import METHODS

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("eagle_jax", "scripts", "examples", "docs", "tests")
FILES = {
    path.relative_to(ROOT).as_posix(): path
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*.py")
}
LONGEST = {"tests": 500} | dict.fromkeys(FOLDERS[:-1], 400)
"""The most lines that a file of each folder may have."""


@pytest.mark.parametrize("folder", FOLDERS)
def test_files_and_functions_are_short(folder: str) -> None:
    for name, path in FILES.items():
        if not name.startswith(f"{folder}/"):
            continue
        text = path.read_text()
        assert len(text.splitlines()) <= LONGEST[folder], name
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                assert node.end_lineno - node.lineno < 80, f"{name}: {node.name}"


def compared(path: Path) -> Iterator[str]:
    """Yields the texts that something is compared with, alone or in a collection."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Compare | ast.MatchValue):
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.value


def test_one_file_decides_by_a_methods_name() -> None:
    for name, path in FILES.items():
        if name.startswith("eagle_jax/") and name != "eagle_jax/methods.py":
            assert not set(compared(path)) & set(METHODS), name
