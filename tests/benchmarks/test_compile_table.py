"""The file of a report: what is compiled anew changes, and all else stays."""

import importlib.metadata
from pathlib import Path

import pytest

from eagle_jax.benchmarks.cases import every_case, with_layers
from eagle_jax.benchmarks.compilation import PROGRAMS, Case
from eagle_jax.benchmarks.compile_table import CompileTable
from tests.benchmarks.reports import a_report
from tests.helpers import refused

_REPORT = Path(__file__).parents[2] / "docs" / "compile.md"


@pytest.fixture(autouse=True)
def versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler need not be installed: nothing is compiled."""
    found = {"jax": "9.8.7", "libtpu": "6.5.4"}
    monkeypatch.setattr(importlib.metadata, "version", found.__getitem__)


def tables(text: str) -> list[list[list[str]]]:
    """The cells of each table's rows, its header first."""
    found: list[list[list[str]]] = []
    last = ""
    for line in text.splitlines():
        if line.startswith("|"):
            if not last.startswith("|"):
                found.append([])
            found[-1].append([cell.strip() for cell in line.strip("|").split("|")])
        last = line
    return [[table[0], *table[2:]] for table in found]


def words(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.startswith("|")]


def written(table: CompileTable, folder: Path) -> str:
    table.write(folder / "compile.md")
    return (folder / "compile.md").read_text()


def with_programs(cases: list[Case], programs: tuple[str, ...]) -> CompileTable:
    table = CompileTable(_REPORT)
    for case in cases:
        for program in programs:
            table.add(case, a_report(program, seconds=12345))
    return table


def test_a_report_with_nothing_new_is_written_as_it_was_read(tmp_path: Path) -> None:
    CompileTable(_REPORT).write(tmp_path / "compile.md")
    assert (tmp_path / "compile.md").read_bytes() == _REPORT.read_bytes()


def test_compiling_everything_anew_keeps_what_people_wrote(tmp_path: Path) -> None:
    text, before = _REPORT.read_text(), tables(_REPORT.read_text())
    new = written(with_programs(every_case(), PROGRAMS), tmp_path)
    after = tables(new)
    shown = [line for line in words(new) if "9.8.7" not in line and "6.5.4" not in line]
    assert set(shown) <= set(words(text))
    assert len(words(new)) == len(words(text))
    assert "(last with jax 9.8.7 and libtpu\n6.5.4). Sizes" in new
    assert after[1:] == before[1:]  # Those of 4 layers are no cases of every report.
    kept = {tuple(row[:5]) for row in before[0]}
    assert kept <= {tuple(row[:5]) for row in after[0]}
    assert all("12345" in row for row in after[0][1:])
    assert len(after[0]) == 1 + len({tuple(row[:5]) for row in after[0][1:]})


def test_a_new_row_replaces_the_old_one_in_its_table(tmp_path: Path) -> None:
    text = _REPORT.read_text()
    cases = [with_layers(case, 4) for case in every_case()]
    (case,) = (c for c in cases if c.name == "Llama-2-70B (4 layers)")
    program = "training step, hydra"
    first, before = tables(text)
    same, after = tables(written(with_programs([case], (program,)), tmp_path))
    assert same == first
    assert len(after) == len(before)
    for old, new in zip(before, after, strict=True):
        if old[0] == case.name:
            assert "12345" in new and new[:5] == old[:5] and len(new) > len(old)
        else:  # Reports that are older have fewer columns.
            assert new[: len(old)] == old
            assert set(new[len(old) :]) <= {
                "-",
                "GFLOP",
                "GB in memory",
                "predicted ms",
            }


def test_a_new_row_stands_with_others_of_its_model(tmp_path: Path) -> None:
    case = with_layers(every_case()[3], 4)
    first, before = tables(_REPORT.read_text())
    same, after = tables(written(with_programs([case], ("token",)), tmp_path))
    assert same == first
    assert [row[4] for row in after[1:]] == ["token", *(row[4] for row in before[1:])]


def test_columns_are_explained_in_the_report_as_in_a_new_one(tmp_path: Path) -> None:
    table = CompileTable()
    table.add(every_case()[0], a_report("token", seconds=12345))
    new = written(table, tmp_path)
    assert "(last with jax 9.8.7 and libtpu\n6.5.4). Sizes" in new
    missing = set(words(new)) - set(words(_REPORT.read_text()))
    assert not [line for line in missing if "9.8.7" not in line and "6.5.4" not in line]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("| model ", "| name ", "is no report of this command"),
        ("|    8 |       prefill |", "|    8 |", "the row 'Llama-3-8B | v5e:2x2"),
        ("|    8 |       prefill |", "| all |       prefill |", "the row 'Llama-3-8B"),
    ],
)
def test_what_is_no_row_of_a_report_is_refused(
    old: str, new: str, said: str, tmp_path: Path
) -> None:
    file = tmp_path / "compile.md"
    assert old in _REPORT.read_text()
    file.write_text(_REPORT.read_text().replace(old, new))
    refused(lambda: CompileTable(file), said, "compile.md")


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "compile.md"
    file.write_bytes(b"\xff" + _REPORT.read_bytes())
    refused(lambda: CompileTable(file), "is no report of this command")
