"""The report as its readers see it: markdown, pictures, refusals."""

import os
import re
from pathlib import Path

import pytest
from matplotlib.image import imread

from tests.conftest import Main, load_main
from tests.evaluation.synthetic import plain, record, write, write_evaluation
from tests.helpers import file_names


@pytest.fixture(scope="module")
def report() -> Main:
    """`main` of `scripts/report.py`."""
    return load_main("report")


@pytest.fixture(scope="module")
def whole(report: Main, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of an evaluation that lacks nothing but differences."""
    folder = tmp_path_factory.mktemp("whole")
    write_evaluation(folder / "runs", questions=3)
    assert report([str(folder / "runs"), "--output", str(folder / "report")]) == 0
    return folder / "report"


def _sections(folder: Path) -> dict[str, str]:
    """The report's sections by their titles."""
    parts = (folder / "report.md").read_text().split("\n## ")
    return {part.partition("\n")[0]: part.partition("\n")[2] for part in parts}


def test_every_figure_with_data_is_drawn(whole: Path) -> None:
    # Of larger batches and at temperature 1 no nodes were recorded.
    figures = ("figure-5-positions", "figure-6-confidence")
    wanted = [f"{name}-temperature-0-batch-size-1.png" for name in figures]
    # Nothing else: no temporary file is left.
    assert file_names(whole) == sorted([*wanted, "report.md"])
    for name in wanted:
        picture = imread(whole / name)
        assert picture.shape[1] >= 800
        assert picture[..., :3].std() > 0.01, f"{name} is blank"


def test_every_figure_is_shown_and_every_table_is_there(whole: Path) -> None:
    text = (whole / "report.md").read_text()
    shown = re.findall(r"!\[.+\]\((.+)\)", text)
    assert sorted(shown) == [name for name in file_names(whole) if name != "report.md"]
    assert [*_sections(whole)][1:] == [
        *("Runs", "Table 1: speedup and tau", "Table 3: ablations", "n-alpha"),
        *("Figure 5: acceptance by position", "Figure 6: acceptance by confidence"),
        "Left out",
    ]
    table_1 = _sections(whole)["Table 1: speedup and tau"]
    for temperature, size in ((0, 1), (0, 4), (1, 1)):
        for prefill in ("included", "excluded"):
            title = f"temperature {temperature}, batch size {size}, prefill {prefill}"
            assert f"### {title}" in table_1


def test_the_report_states_runs_device_and_versions(whole: Path) -> None:
    runs = _sections(whole)["Runs"]
    for line in ("16 runs on 3 questions", "device: cpu", "versions: jax 0.10.0"):
        assert line in runs
    assert "runs/eagle2-t0-b1.jsonl" in runs
    assert "No autoregressive run" not in runs


def test_what_has_no_data_is_left_out_and_says_why(
    report: Main, tmp_path: Path
) -> None:
    write(tmp_path / "runs" / "a.jsonl", [plain(1), plain(2)])
    write(tmp_path / "runs" / "b.jsonl", [record(1)])
    assert report([f"{tmp_path}/runs", "--output", f"{tmp_path}/new/report"]) == 0
    output = tmp_path / "new" / "report"
    assert file_names(output) == ["report.md"]
    sections = _sections(output)
    assert [*sections][-1] == "Left out"
    lines = sections["Left out"].strip().splitlines()
    reasons = dict(line.removeprefix("- ").split(": ", 1) for line in lines)
    for title in ("Table 3", "n-alpha", "Figure 5", "Figure 6"):
        assert title in reasons
    assert "--nodes" in reasons["Figure 6"]
    assert "not all runs hold the same questions" in sections["Runs"]


def test_without_plain_decoding_the_report_says_so(
    report: Main, tmp_path: Path
) -> None:
    write(tmp_path / "b.jsonl", [record(1)])
    assert report([str(tmp_path), "--output", f"{tmp_path}/report"]) == 0
    runs = _sections(tmp_path / "report")["Runs"]
    assert "No autoregressive run has the settings" in runs


def test_a_run_that_is_not_lossless_says_so(report: Main, tmp_path: Path) -> None:
    warm = {"temperature": 1.0, "label": "medusa", "method": "medusa"}
    write(tmp_path / "a.jsonl", [record(1, acceptance="typical", **warm)])
    write(tmp_path / "b.jsonl", [plain(1, temperature=1.0, seconds=[4.0])])
    assert report([str(tmp_path), "--output", f"{tmp_path}/report"]) == 0
    table = _sections(tmp_path / "report")["Table 1: speedup and tau"]
    row = next(line for line in table.splitlines() if line.startswith("| medusa"))
    assert "2.00x" in row and row.rstrip(" |").endswith("NOT LOSSLESS")


def test_several_folders_are_one_report(report: Main, tmp_path: Path) -> None:
    write(tmp_path / "x" / "a.jsonl", [plain(1)])
    write(tmp_path / "y" / "b.jsonl", [record(1, seconds=[0.5])])
    folders = [f"{tmp_path}/x", f"{tmp_path}/y"]
    assert report([*folders, "--output", f"{tmp_path}/report"]) == 0
    assert "4.00x" in _sections(tmp_path / "report")["Table 1: speedup and tau"]


def test_bad_input_ends_in_one_line(
    report: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "runs" / "a.jsonl", [record(1)])
    file = str(write(tmp_path / "file", []))
    folder, output = str(path.parent), str(tmp_path / "report")
    cases = [
        ([f"{tmp_path}/none", "--output", output], "holds no *.jsonl"),
        ([folder, "--output", file], "is no folder; give another name"),
        ([folder, "--output", f"{file}/deeper"], "cannot write to"),
    ]
    for flags, named in cases:
        assert report(flags) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("error: ") and err.count("\n") == 1 and named in err
    path.write_text("{\n")
    assert report([folder, "--output", output]) == 2
    assert f"{path}:1 is not valid JSON" in capsys.readouterr().err
    assert not os.path.exists(output)


def test_a_report_replaces_the_one_before(report: Main, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [record(1)])
    flags = [str(tmp_path), "--output", f"{tmp_path}/report"]
    assert report(flags) == 0
    write(path, [record(1), record(2)])
    assert report(flags) == 0
    assert "1 run on 2 questions" in _sections(tmp_path / "report")["Runs"]
