"""The papers' figures, and the tables that have them beside ours."""

import re
from pathlib import Path
from typing import Any

import pytest

from eagle_jax.evaluation import papers
from eagle_jax.evaluation.read_runs import read_runs
from eagle_jax.evaluation.runs import Group, groups
from tests.evaluation.synthetic import plain, record, write

_MODELS = {
    "V 13B": "Vicuna 13B",
    "L2 13B": "LLaMA2-Chat 13B",
    "V 7B": "Vicuna 7B",
    "L2 7B": "LLaMA2-Chat 7B",
}


def _rows(table: str | None) -> list[list[str]]:
    assert table is not None
    lines = [line.strip("| ").split("|") for line in table.splitlines()]
    return [[cell.strip() for cell in line] for line in lines[:1] + lines[2:]]


def _group(folder: Path) -> Group:
    (group,) = groups(read_runs([folder]), one_batch_size=True)
    return group


def test_the_figures_of_table_1_are_those_of_the_paper(shared: Path) -> None:
    text = (shared / "papers" / "eagle-2.md").read_text()
    body = text[text.index("Temperature=0") : text.index("rugby union")]
    cold, warm = re.split(r"Ter\s+nperatu.*", body)
    for temperature, part in ((0.0, cold), (1.0, warm)):
        printed = [
            line.split("\t")[1:16]
            for line in part.splitlines()
            if re.search(r"\d\.\d\dx", line)
        ]
        ours = papers.table_1(temperature)
        found = [
            [method, *cells]
            for figures in ours.values()
            for method, cells in figures.items()
        ]
        assert found == printed
        # The scan prints "L2 7B" beside the third of its four rows.
        names = [name for name in _MODELS if f"{name}\t" in part]
        assert list(ours) == [_MODELS[name] for name in names] == [*_MODELS.values()]
    assert papers.table_1(0.7) == {}


def test_the_figures_of_table_5_are_those_of_the_paper(
    shared: Path, tmp_path: Path
) -> None:
    text = (shared / "papers" / "eagle-1.txt").read_text()
    printed = text[text.index("Table 5: ") :][:500]
    write(tmp_path / "a.jsonl", [record(1, method="chain", label="chain")])
    write(tmp_path / "b.jsonl", [record(1)])
    ((_, table),) = papers.chain_tables(_group(tmp_path)).items()
    rows = [row[1:] for row in _rows(table) if row[1].startswith("paper, ")]
    assert len(rows) == 6
    for name, chain, tree, gain in rows:
        assert f"{name.split()[-1]} {chain} {tree} ({gain})" in printed


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Plain decoding, EAGLE-2 and an ablation, of two of the paper's tasks."""
    questions: list[dict[str, Any]] = [
        {"question_id": 1},
        {"question_id": 2, "category": "math_reasoning"},
    ]
    write(tmp_path / "a.jsonl", [plain(seconds=[4.0], **q) for q in questions])
    write(tmp_path / "b.jsonl", [record(accept_lengths=[4], **q) for q in questions])
    ablated: dict[str, Any] = {"label": "eagle2:rerank=false", "rerank": False}
    write(tmp_path / "c.jsonl", [record(**q, **ablated) for q in questions])
    heads: dict[str, Any] = {"label": "hydra", "method": "hydra"}
    write(tmp_path / "d.jsonl", [record(1, seconds=[1.0], **heads)])
    return tmp_path


def test_the_papers_rows_stand_below_ours_in_its_order(folder: Path) -> None:
    header, *rows = _rows(papers.whole_table_1(_group(folder)))
    assert header[:4] == ["method", "figures", "MT-bench speedup", "MT-bench tau"]
    assert header[-3:] == ["mean speedup", "mean tau", "lossless"]
    names = [row[0] for row in rows]
    wanted = ["autoregressive", "SpS", "PLD", "Medusa", "Lookahead", "hydra", "Hydra"]
    assert list(dict.fromkeys(names)) == [*wanted, "EAGLE", "eagle2", "EAGLE-2"]
    ours = {row[0]: row[2:] for row in rows if row[1] == "ours"}
    missing = ["-", "-"]
    # Two of six tasks make no mean that could be compared with the paper's.
    assert ours["eagle2"] == [
        *("2.00x", "4.00", *missing, "2.00x", "4.00", *missing * 4, "2/2")
    ]
    assert ours["hydra"][:2] == ["4.00x", "1.00"]
    theirs = [row for row in rows if row[:2] == ["EAGLE-2", "paper, Vicuna 7B"]]
    assert [row[2:4] for row in theirs] == [["3.62x", "4.98"]]
    assert all(row[-1] == "-" for row in rows if row[1] != "ours")


@pytest.mark.parametrize(("temperature", "methods"), [(1.0, 3), (0.7, 0)])
def test_other_temperatures_have_the_figures_that_the_paper_has(
    tmp_path: Path, temperature: float, methods: int
) -> None:
    write(tmp_path / "a.jsonl", [record(1, temperature=temperature)])
    rows = _rows(papers.whole_table_1(_group(tmp_path)))
    assert len({row[0] for row in rows if row[1].startswith("paper")}) == methods


def test_tasks_that_the_paper_has_not_make_no_table(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [record(1, category="rag")])
    assert papers.whole_table_1(_group(tmp_path)) is None
    write(tmp_path / "a.jsonl", [plain(1)])
    assert papers.whole_table_1(_group(tmp_path)) is None


def test_a_chain_is_compared_with_trees_of_its_depth(tmp_path: Path) -> None:
    chain: dict[str, Any] = {"method": "chain", "label": "chain:depth=5", "depth": 5}
    write(tmp_path / "a.jsonl", [record(1, accept_lengths=[2, 2], **chain)])
    eagle1: dict[str, Any] = {"method": "eagle1", "label": "eagle1", "depth": 5}
    write(tmp_path / "b.jsonl", [record(1, accept_lengths=[4], **eagle1)])
    write(tmp_path / "c.jsonl", [record(1)])  # Six levels.
    write(tmp_path / "d.jsonl", [record(1, **eagle1, draft="another")])
    ((title, table),) = papers.chain_tables(_group(tmp_path)).items()
    assert "chain:depth=5 and eagle1" in title
    assert _rows(table)[1] == ["mt_bench", "ours", "2.00", "4.00", "+2.00"]
