"""The report as its readers see it: markdown, pictures, refusals."""

import re
from pathlib import Path

from matplotlib.image import imread

from eagle_jax.cli.report import main
from tests.evaluation.synthetic import plain, record, write, write_evaluation
from tests.helpers import file_names


def _report(folder: Path) -> dict[str, str]:
    """Makes the report of `runs`; returns its sections by their titles."""
    output = folder / "new" / "report"
    assert main([f"{folder}/runs", "--output", str(output)]) == 0
    parts = (output / "report.md").read_text().split("\n## ")
    return {part.partition("\n")[0]: part.partition("\n")[2] for part in parts}


def test_every_table_is_there_and_every_figure_with_data_is_drawn(
    tmp_path: Path,
) -> None:
    write_evaluation(tmp_path / "runs", questions=3)
    sections, whole = _report(tmp_path), tmp_path / "new" / "report"
    # Of larger batches and at temperature 1 no nodes were recorded.
    alone, groups = "temperature-0-batch-size-1", [(0, 1), (0, 4), (1, 1)]
    wanted = [f"acceptance-by-depth-temperature-{t}-batch-size-{b}" for t, b in groups]
    wanted += [f"figure-5-positions-{alone}", f"figure-6-confidence-{alone}"]
    wanted = [f"{name}.png" for name in wanted]
    # Nothing else: no temporary file is left.
    assert file_names(whole) == sorted([*wanted, "report.md"])
    for name in wanted:
        picture = imread(whole / name)
        assert picture.shape[1] >= 800
        assert picture[..., :3].std() > 0.01, f"{name} is blank"
    text = (whole / "report.md").read_text()
    assert re.findall(r"!\[.+\]\((.+)\)", text) == wanted
    assert [*sections][1:] == [
        "Runs",
        "Table 1: speedup and tau",
        "Table 3: ablations",
        "Chain acceptance by depth",
        "Acceptance by depth",
        "Figure 5: acceptance by position",
        "Figure 6: acceptance by confidence",
    ]
    for temperature, size in groups:
        title = f"temperature {temperature}, batch size {size}"
        assert f"### {title}" in sections["Table 1: speedup and tau"]
    for line in ("16 runs on 3 questions", "device: cpu", "versions: jax 0.10.0"):
        assert line in sections["Runs"]
    assert "runs/eagle2-t0-b1.jsonl" in sections["Runs"]
    assert "No autoregressive run" not in sections["Runs"]


def test_what_has_no_data_is_left_out_and_says_why(tmp_path: Path) -> None:
    write(tmp_path / "runs" / "a.jsonl", [plain(1), plain(2)])
    write(tmp_path / "runs" / "b.jsonl", [record(1)])
    sections = _report(tmp_path)
    figure = "acceptance-by-depth-temperature-0-batch-size-1.png"
    assert file_names(tmp_path / "new") == [f"report/{figure}", "report/report.md"]
    assert [*sections][-1] == "Left out"
    *_, names = sections["Left out"].partition("such runs: ")
    found = [name.strip().partition(":")[0] for name in names.split(",")]
    assert found == ["Table 3", "Chain acceptance by depth", "Figure 5", "Figure 6"]
    assert "not all runs hold the same questions" in sections["Runs"]
    (tmp_path / "runs" / "a.jsonl").unlink()
    missing = "No autoregressive run has the settings"
    assert missing in _report(tmp_path)["Runs"]


def test_what_is_unfinished_or_rests_on_too_few_questions_is_marked(
    tmp_path: Path,
) -> None:
    rag = [plain(number, category="rag") for number in range(6)]
    write(tmp_path / "runs" / "whole.jsonl", [*rag, plain(9, asked=7)])
    write(tmp_path / "runs" / "begun.jsonl", [record(n, asked=7) for n in range(9, 11)])
    runs = _report(tmp_path)["Runs"]
    assert "Unfinished: runs/begun.jsonl. The same command" in runs
    assert runs.count(" 2 of 7 |") == runs.count(" of 7 |") == 1
    assert "Too few questions: mt_bench (2). Of fewer than 6" in runs
