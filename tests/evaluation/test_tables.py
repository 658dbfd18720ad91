"""Tables of small folders, cell by cell."""

from pathlib import Path
from typing import Any

import pytest

from eagle_jax.evaluation import tables
from eagle_jax.evaluation.runs import (
    EvaluatedRun,
    Group,
    find_baseline,
    groups,
    read_runs,
    speedups,
)
from tests.evaluation.synthetic import plain, record, tree, write
from tests.helpers import refused


def _table_1(group: Group) -> str:
    """Table 1 with the prefill."""
    with_prefill, _ = tables.speedup_tables(group).values()
    return with_prefill


def _only(found: dict[str, str]) -> str:
    (table,) = found.values()
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
            plain(1, seconds=[2.0], decode_seconds=[1.0]),
            plain(2, category="math", seconds=[4.0], decode_seconds=[2.0]),
            plain(3, category="rag", seconds=[1.0], decode_seconds=[0.5]),
        ],
    )
    write(
        tmp_path / "b.jsonl",
        [
            # With prefill twice as fast, without four times.
            record(1, seconds=[1.0], decode_seconds=[0.25], accept_lengths=[2, 5]),
            # Four times and twice.
            record(
                2,
                category="math",
                seconds=[1.0],
                decode_seconds=[1.0],
                accept_lengths=[4],
                token_ids=[[0, 1, 2, 9, 9]],
            ),
        ],
    )
    return tmp_path


def _group(*folders: Path) -> Group:
    (group,) = groups(read_runs(folders))
    return group


def test_table_1_has_speedup_and_tau_of_each_task(folder: Path) -> None:
    table = _table_1(_group(folder))
    assert _rows(table) == [
        [
            "method",
            "mt_bench speedup",
            "mt_bench tau",
            "rag speedup",
            "rag tau",
            "mean speedup",
            "mean tau",
            "lossless",
        ],
        ["autoregressive", *["1.00x", "1.00"] * 3, "-"],
        # The median of 2 and 4; eight tokens in three steps, of which a limit cut off
        # what else was accepted; one text differs.
        ["eagle2", "3.00x", "2.67", "-", "-", "-", "-", "1/2"],
    ]


def test_speedups_without_prefill_use_the_decoding_time(folder: Path) -> None:
    group = _group(folder)
    eagle2 = group.runs[1]
    settings = {"baseline": find_baseline(eagle2, group.runs), "task": None}
    assert speedups(eagle2, with_prefill=True, **settings) == [2.0, 4.0]
    assert speedups(eagle2, with_prefill=False, **settings) == [4.0, 2.0]


def test_without_plain_decoding_there_are_no_speedups(folder: Path) -> None:
    (folder / "a.jsonl").unlink()
    group = _group(folder)
    rows = _rows(_table_1(group))
    assert rows[1] == ["eagle2", "-", "2.67", "-", "2.67", "-"]


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


@pytest.mark.parametrize(
    ("rule", "lossless"), [("rejection", "-"), ("typical", "NOT LOSSLESS")]
)
def test_other_draws_are_not_compared_token_for_token(
    folder: Path, rule: str, lossless: str
) -> None:
    write(folder / "b.jsonl", [record(1, acceptance=rule)])
    rows = _rows(_table_1(_group(folder)))
    assert rows[2][-1] == lossless


def test_table_3_finds_the_ablations_and_table_1_leaves_them_out(
    folder: Path,
) -> None:
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
    (title, table), _ = tables.ablation_tables(group).items()
    assert "num_nodes 60" in title and title.endswith("prefill included")
    names = [row[0] for row in _rows(table)[1:]]
    assert names == ["w/o both", "w/o value", "w/o reranking", "eagle2"]
    rows = _rows(_table_1(group))
    assert [row[0] for row in rows[1:]] == ["autoregressive", "eagle2", "eagle2:small"]


def test_n_alpha_comes_from_steps(tmp_path: Path) -> None:
    chain: dict[str, Any] = {"method": "chain", "label": "chain", "depth": 2}
    write(tmp_path / "a.jsonl", [record(1, accept_lengths=[1, 1], **chain)])
    rows = _rows(_only(tables.n_alpha_table(_group(tmp_path))))
    assert rows[1] == ["chain", "0.000 (2)", "- (0)"]
    write(tmp_path / "a.jsonl", [record(1, accept_lengths=[3, 2], **chain)])
    rows = _rows(_only(tables.n_alpha_table(_group(tmp_path))))
    assert rows[1] == ["chain", "1.000 (2)", "0.500 (2)"]


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


def test_batches_are_compared_with_plain_decoding_at_their_size(tmp_path: Path) -> None:
    for size, slow, fast in ((1, 5.0, 1.0), (2, 2.0, 1.0)):
        write(tmp_path / f"a{size}.jsonl", [plain(1, seconds=[slow], batch_size=size)])
        write(tmp_path / f"b{size}.jsonl", [record(1, seconds=[fast], batch_size=size)])
    found = groups(read_runs([tmp_path]))
    shown = [_rows(_table_1(g))[2][1] for g in found]
    assert shown == ["5.00x", "2.00x"]


def test_names_tell_runs_of_one_label_apart(tmp_path: Path) -> None:
    write(tmp_path / "x" / "a.jsonl", [record(1), record(2)])
    write(tmp_path / "x" / "b.jsonl", [record(1, depth=3)])
    write(tmp_path / "x" / "c.jsonl", [record(1, label="eagle2:depth=4", depth=4)])
    assert _group(tmp_path / "x").names == [
        "eagle2 (x/a.jsonl)",
        "eagle2 (x/b.jsonl)",
        "eagle2:depth=4",
    ]


def test_folders_with_other_questions_are_one_run(tmp_path: Path) -> None:
    for name, category in (("x", "qa"), ("y", "rag")):
        write(tmp_path / name / "a.jsonl", [plain(1, category=category)])
        write(tmp_path / name / "b.jsonl", [record(1, category=category)])
    group = _group(tmp_path / "x", tmp_path / "y")
    assert [run.tasks for run in group.runs] == [["qa", "rag"]] * 2
    rows = _rows(_table_1(group))
    assert rows[2] == ["eagle2", *["1.00x", "1.00"] * 3, "2/2"]


def _read(path: Path) -> list[EvaluatedRun]:
    return read_runs([path.parent])


def test_what_is_no_folder_of_records_is_refused(tmp_path: Path) -> None:
    refused(lambda: read_runs([tmp_path / "x"]), f"{tmp_path}/x holds no *.jsonl")
    (tmp_path / "empty.jsonl").write_text("")
    refused(lambda: read_runs([tmp_path]), f"{tmp_path} holds no *.jsonl")


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [record(1)])
    head, line = path.read_bytes().splitlines()
    cases = {
        b"\xff": "2 is not UTF-8",
        line.replace(b"[2.0]", b"[NaN]"): "2 is not valid JSON",
        line.replace(b"wall_time", b"wall"): "2: `wall_time` = None must be list",
    }
    for broken, named in cases.items():
        path.write_bytes(head + b"\n" + broken + b"\n")
        refused(lambda: _read(path), f"{path}:{named}")
    path.write_bytes(line + b"\n")
    refused(lambda: _read(path), f"{path}:1: `run` = None", "records of eagle-jax")
    path.write_bytes(b'{"run": {"method": "chain"}}\n' + line + b"\n")
    refused(lambda: _read(path), f"{path}:1: `label` = None must be str")


def test_trees_of_one_run_have_one_size(tmp_path: Path) -> None:
    trees = [tree([-1, 0], [0.0, -1.0], [], size) for size in (2, 3)]
    lines = [record(n, nodes=[one]) for n, one in enumerate(trees)]
    path = write(tmp_path / "a.jsonl", lines)
    refused(lambda: _read(path), f"{path} holds trees of different sizes")
