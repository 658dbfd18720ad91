"""Tables of small folders, cell by cell."""

from pathlib import Path
from typing import Any

import pytest

from eagle_jax.evaluation import tables
from eagle_jax.evaluation.runs import Group, find_baseline, groups, read_runs
from tests.evaluation.synthetic import plain, record, tree, write
from tests.helpers import refused

TASKS = ("mt_bench", "rag", "mean")


def _table_1(group: Group) -> str:
    (table,) = tables.speedup_tables(group).values()
    return table


def _rows(table: str) -> list[list[str]]:
    """The cells of a markdown table, without its rule."""
    lines = [line.strip("| ").split("|") for line in table.splitlines()]
    return [[cell.strip() for cell in line] for line in lines[:1] + lines[2:]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Plain decoding of three questions, and EAGLE-2 that answers two of them."""
    write(
        tmp_path / "a.jsonl",
        [
            plain(1, seconds=[2.0]),
            plain(2, category="math", seconds=[4.0]),
            plain(3, category="rag", seconds=[1.0]),
        ],
    )
    write(
        tmp_path / "b.jsonl",
        [
            # Twice as fast, and four times.
            record(1, seconds=[1.0], accept_lengths=[2, 5]),
            record(
                2,
                category="math",
                seconds=[1.0],
                accept_lengths=[4],
                token_ids=[[0, 1, 2, 9, 9]],
            ),
        ],
    )
    return tmp_path


def _group(folder: Path) -> Group:
    (group,) = groups(read_runs([folder]))
    return group


def test_table_1_has_speedup_and_tau_of_each_task(folder: Path) -> None:
    header, plain_row, eagle2 = _rows(_table_1(_group(folder)))
    columns = [f"{task} {what}" for task in TASKS for what in ("speedup", "tau")]
    assert header == ["method", *columns, "lossless"]
    assert plain_row == ["autoregressive", *["1.00x", "1.00"] * 3, "-"]
    # The median of 2 and 4; eight tokens in three steps, of which a limit cut off what
    # else was accepted; one text differs.
    assert eagle2 == ["eagle2", "3.00x", "2.67", *["-"] * 4, "1/2"]


def test_plain_decoding_with_other_settings_is_no_baseline(tmp_path: Path) -> None:
    others: tuple[dict[str, Any], ...] = (
        *({"temperature": 1.0}, {"batch_size": 2}, {"max_new_tokens": 9}),
        *({"device": "gpu"}, {"target": "other"}, {"seed": 1}),
    )
    for number, other in enumerate(others):
        write(tmp_path / f"{number}.jsonl", [plain(1, **other)])
    write(tmp_path / "eagle2.jsonl", [record(1)])
    runs = read_runs([tmp_path])
    (eagle2,) = [run for run in runs if not run.is_baseline]
    assert find_baseline(eagle2, runs) is None
    write(tmp_path / "same.jsonl", [plain(1, versions={"jax": "0.11"})])
    assert find_baseline(eagle2, read_runs([tmp_path])) is not None


def test_other_draws_are_not_compared_token_for_token(folder: Path) -> None:
    write(folder / "b.jsonl", [record(1, acceptance="rejection")])
    assert _rows(_table_1(_group(folder)))[2][-1] == "-"
    (folder / "a.jsonl").unlink()  # Without plain decoding there are no speedups.
    write(folder / "b.jsonl", [record(1)])
    row = ["eagle2", "-", "1.00", "-", "1.00", "-"]
    assert _rows(_table_1(_group(folder)))[1] == row


def test_table_3_finds_the_ablations_and_table_1_leaves_them_out(folder: Path) -> None:
    changes: dict[str, dict[str, Any]] = {
        "rerank=false": {"rerank": False},
        "both": {"rerank": False, "rank_by": "confidence"},
        "rank_by=confidence": {"rank_by": "confidence"},
        # Another size has no ablation: it is not in the table.
        "small": {"num_nodes": 30},
    }
    for name, change in changes.items():
        write(folder / f"{name}.jsonl", [record(1, label=f"eagle2:{name}", **change)])
    group = _group(folder)
    ((title, table),) = tables.ablation_tables(group).items()
    assert "num_nodes 60" in title
    names = [row[0] for row in _rows(table)[1:]]
    assert names == ["w/o both", "w/o value", "w/o reranking", "eagle2"]
    rows = _rows(_table_1(group))
    assert [row[0] for row in rows[1:]] == ["autoregressive", "eagle2", "eagle2:small"]


def test_chain_acceptance_comes_from_steps(tmp_path: Path) -> None:
    chain: dict[str, Any] = {"method": "chain", "label": "chain", "depth": 2}
    cases = {"0.000 (2) - (0)": [1, 1], "1.000 (2) 0.500 (2)": [3, 2]}
    for wanted, lengths in cases.items():
        write(tmp_path / "a.jsonl", [record(1, accept_lengths=lengths, **chain)])
        (table,) = tables.chain_acceptance_table(_group(tmp_path)).values()
        header, row = _rows(table)
        assert header == ["method", "depth 1", "depth 2"]
        assert " ".join(row) == f"chain {wanted}"


def test_each_temperature_batch_size_and_setup_is_a_group(tmp_path: Path) -> None:
    every: tuple[dict[str, Any], ...] = (
        {"temperature": 1.0, "batch_size": 4},
        *({"batch_size": 2}, {"batch_size": 8}, {"batch_size": 2, "target": "other"}),
    )
    for number, settings in enumerate(every):
        write(tmp_path / f"{number}.jsonl", [record(1, **settings)])
    found = groups(read_runs([tmp_path]))
    assert [group.title for group in found] == [
        "temperature 0, batch size 2, target toy",
        "temperature 0, batch size 2, target other",
        "temperature 0, batch size 8, target toy",
        "temperature 1, batch size 4, target toy",
    ]
    assert found[0].slug == "temperature-0-batch-size-2-target-toy"


def test_names_tell_runs_of_one_label_apart(tmp_path: Path) -> None:
    write(tmp_path / "x" / "a.jsonl", [record(1), record(2)])
    write(tmp_path / "x" / "b.jsonl", [record(1, depth=3)])
    write(tmp_path / "x" / "c.jsonl", [record(1, label="eagle2:depth=4", depth=4)])
    assert [name for name, _ in _group(tmp_path / "x").named] == [
        "eagle2 (x/a.jsonl)",
        "eagle2 (x/b.jsonl)",
        "eagle2:depth=4",
    ]


def test_what_is_no_folder_of_records_is_refused(tmp_path: Path) -> None:
    def read(named: str) -> None:
        refused(lambda: read_runs([tmp_path]), f"{tmp_path}{named}")

    refused(lambda: read_runs([tmp_path / "x"]), f"{tmp_path}/x holds no *.jsonl")
    (tmp_path / "a.jsonl").write_text("")
    read(" holds no *.jsonl")
    path = write(tmp_path / "a.jsonl", [record(1)])
    head, line = path.read_bytes().splitlines()
    cases = {
        head + b"\n\xff": "2 is not UTF-8",
        head + b"\n" + line.replace(b"[2.0]", b"[NaN]"): "2 is not valid JSON",
        head
        + b"\n"
        + line.replace(b"wall_time", b"wall"): "2: `wall_time` = None must",
        line: "1: `run` = None must be dict; expected records of eagle-jax",
        b'{"run": {"method": "chain"}}\n' + line: "1: `label` = None must be str",
    }
    for broken, named in cases.items():
        path.write_bytes(broken + b"\n")
        read(f"/a.jsonl:{named}")
    trees = [tree([-1, 0], [0.0, -1.0], [], size) for size in (2, 3)]
    write(path, [record(n, nodes=[one]) for n, one in enumerate(trees)])
    read("/a.jsonl holds trees of different sizes")
