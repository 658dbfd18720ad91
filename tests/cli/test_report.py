"""The report as its readers see it: markdown, pictures, refusals."""

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


def test_every_table_is_there_and_every_figure_with_data_is_drawn(whole: Path) -> None:
    # Of larger batches and at temperature 1 no nodes were recorded.
    figures = ("figure-5-positions", "figure-6-confidence")
    wanted = [f"{name}-temperature-0-batch-size-1.png" for name in figures]
    # Nothing else: no temporary file is left.
    assert file_names(whole) == sorted([*wanted, "report.md"])
    for name in wanted:
        picture = imread(whole / name)
        assert picture.shape[1] >= 800
        assert picture[..., :3].std() > 0.01, f"{name} is blank"
    text = (whole / "report.md").read_text()
    assert re.findall(r"!\[.+\]\((.+)\)", text) == wanted
    sections = _sections(whole)
    assert [*sections][1:] == [
        "Runs",
        "Table 1: speedup and tau",
        "Table 3: ablations",
        "n-alpha",
        "Figure 5: acceptance by position",
        "Figure 6: acceptance by confidence",
        "Left out",
    ]
    for temperature, size in ((0, 1), (0, 4), (1, 1)):
        for prefill in ("included", "excluded"):
            title = f"temperature {temperature}, batch size {size}, prefill {prefill}"
            assert f"### {title}" in sections["Table 1: speedup and tau"]


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
    (tmp_path / "runs" / "a.jsonl").unlink()
    assert report([f"{tmp_path}/runs", "--output", str(output)]) == 0
    assert "No autoregressive run has the settings" in _sections(output)["Runs"]
