"""The notebook runs as it stands, and shows what it prints."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "tour.ipynb"


def printed(notebook: nbformat.NotebookNode) -> list[str]:
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [
        "".join(one.text for one in cell.outputs if one.get("name") == "stdout")
        for cell in cells
    ]


def test_the_tour_prints_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A process of its own compiles here as quickly as other tests do.
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOK.parents[1]))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    shown = printed(notebook)
    NotebookClient(notebook, timeout=None).execute()
    assert printed(notebook) == shown, "jupyter execute --inplace examples/tour.ipynb"
