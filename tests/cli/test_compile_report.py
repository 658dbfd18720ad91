"""The report's file; `tests/benchmarks/test_compilation.py` has what is compiled."""

import importlib.util
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import pytest

from eagle_jax.benchmarks.compilation import Case, Report
from eagle_jax.cli import compile_report
from tests.benchmarks.reports import a_report
from tests.conftest import Main

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="the TPU compiler is missing; pip install '.[tpu-compile]' brings it",
)

_SET_BY_THE_SCRIPT = (
    *("JAX_PLATFORMS", "TPU_SKIP_MDS_QUERY", "TPU_ACCELERATOR_TYPE"),
    *("TPU_WORKER_HOSTNAMES", "ALLOW_MULTIPLE_LIBTPU_LOAD"),
    "JAX_ENABLE_COMPILATION_CACHE",
)


def compiled(case: Case, only: Sequence[str]) -> Iterator[Report]:
    """Refuses Mixtral's training step; of all else says how many layers there are."""
    for program in only:
        if case.name.startswith("Mixtral") and program == "training step":
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 33 of 32 GiB\n...")
        yield a_report(
            program,
            seconds=case.target.num_layers,
            collectives={"all-reduce": 2, "all-gather": 1},
            moved=2**20,
            traffic=1638 * 10**7,
            most_collectives=3,
        )


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Main:
    monkeypatch.setattr(compile_report, "compile_case", compiled)
    for name in _SET_BY_THE_SCRIPT:
        monkeypatch.setenv(name, os.environ.get(name, ""))
    return compile_report.main


def rows_of(file: Path) -> list[list[str]]:
    lines = [line for line in file.read_text().splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_a_report_is_made_in_pieces(main: Main, tmp_path: Path) -> None:
    file = tmp_path / "report.md"
    output = ["--output", str(file)]
    assert main(["--only", "Mixtral", "--programs", "token", *output]) == 0
    assert main(["--only", "Llama-3-8B v5e", "--programs", "token", *output]) == 0
    both = ["sampled round", "round"]
    assert main(["--only", "Mixtral", "--programs", *both, *output]) == 0
    assert main(["--only", "Mixtral", "--programs", "token", *output]) == 0
    rows = rows_of(file)
    assert [(row[0], row[3], row[4]) for row in rows] == [
        ("Llama-3-8B", "1", "token"),
        ("Llama-3-8B", "8", "token"),
        ("Mixtral-8x7B", "1", "round"),
        ("Mixtral-8x7B", "1", "sampled round"),
        ("Mixtral-8x7B", "1", "token"),
    ]
    sizes = ["32", "1.00", "0.50", "0.25", "yes", "0", "0"]
    counts = ["1 all-gather, 2 all-reduce", "3", "1.0", "32"]
    assert rows[-1][5:] == [*sizes, *counts, "2.0", "16.38", "10.01"]


def test_what_does_not_fit_is_said_and_the_rest_goes_on(
    main: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.md"
    flags = ["--only", "Mixtral", "--layers", "3", "--output", str(file)]
    assert main([*flags, "--programs", "training step", "token"]) == 1
    said = capsys.readouterr().err
    assert "training step: the compiler refuses it: RESOURCE_EXHAUSTED" in said
    assert [row[0] for row in rows_of(file)] == ["Mixtral-8x7B (3 layers)"]


def test_other_files_are_not_overwritten(
    main: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "notes.md"
    file.write_text("# Notes\n")
    assert main(["--output", str(file)]) == 2
    assert "is no report of this command" in capsys.readouterr().err
    assert file.read_text() == "# Notes\n"
