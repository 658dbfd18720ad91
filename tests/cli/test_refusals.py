"""What no command can do: exit code 2, one line, nothing written."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from eagle_jax import assets
from tests.conftest import Main, load_main

_BIG = "1000000000000"
_HUGE = "hidden=1000000,layers=1000000,heads=4,vocabulary=1000000"
_TARGET = ["--target", str(assets.TARGET)]
_QUESTIONS = ["--questions", "questions.jsonl", "--output", "out", "--methods"]
_TRAIN = [*_TARGET, "--data", "texts.jsonl", "--output", "out"]
_REGENERATE = [*_TARGET, "--data", "texts.jsonl", "--output", "out.jsonl"]

_INT32 = "must be below 2**31"
_FLOAT32 = "temperature = 1e+39 must be at most"
_MEMORY = "|GiB, but there are"
_FULL = "cannot write /dev/full: No space left on device"
_REACH = "drafts further than the target's 512 positions"

_CASES: dict[str, list[tuple[list[str], str]]] = {
    "generate": [
        (["--num-nodes", "1000000"], f"num_nodes = 1000000{_MEMORY}"),
        (["--width", "1000000"], f"width = 1000000{_MEMORY}"),
        (["--depth", "1000000"], f"depth = 1000000 {_REACH}"),
        (["--method", "chain", "--depth", "1000000"], f"depth = 1000000 {_REACH}"),
        (["--max-new-tokens", _BIG], f"max_new_tokens = {_BIG} {_INT32}"),
        (["--max-length", _BIG], f"max_length = {_BIG} {_INT32}"),
        (["--top-k", _BIG], f"top_k = {_BIG} {_INT32}"),
        (["--temperature", "1e39"], _FLOAT32),
        (["--config", "big.toml"], f"num_nodes = 1000000{_MEMORY}"),
        (["--config", "long.toml"], f"max_new_tokens = {_BIG} {_INT32}"),
        (["--config", "hot.toml"], _FLOAT32),
        (["--random", _HUGE], f"layers = 1000000{_MEMORY}"),
        (["--random", "hidden=8,layers=1,heads=1,kv_heads=0,vocabulary=9"], "kv_heads"),
        (["--random", f"hidden={'9' * 5000},layers=1,heads=1,vocabulary=9"], "digits"),
        (["--json", "/dev/full"], _FULL),
    ],
    "evaluate": [
        ([], "required: --questions, --output, --methods"),
        ([*_QUESTIONS, "eagle2:num_nodes=1000000"], f"num_nodes = 1000000{_MEMORY}"),
        ([*_QUESTIONS, "chain:depth=1000000"], f"depth = 1000000 {_REACH}"),
        ([*_QUESTIONS, "lookup", "--temperatures", "1e39"], _FLOAT32),
        ([*_QUESTIONS, "lookup", "--batch-sizes", "1000000000"], _MEMORY),
        ([*_QUESTIONS, "lookup", "--output", "/proc/out"], "cannot write to /proc/out"),
    ],
    "train": [
        ([*_TRAIN, "--steps", _BIG], f"steps = {_BIG} {_INT32}"),
        ([*_TRAIN, "--row-length", "99999999"], "99999999 is more than the target's"),
        ([*_TRAIN, "--row-length", "256", "--batch-size", "1000000000"], _MEMORY),
        ([*_TRAIN, "--output", "/proc/out"], "/proc/out"),
    ],
    "regenerate": [
        ([*_REGENERATE, "--max-new-tokens", _BIG], f"max_new_tokens = {_BIG} {_INT32}"),
        ([*_REGENERATE, "--batch-size", _BIG], f"batch_size = {_BIG} {_INT32}"),
        ([*_REGENERATE, "--output", "/dev/full"], _FULL),
        (
            [*_REGENERATE, "--draft", str(assets.HEAD), "--num-nodes", "1000000"],
            f"num_nodes = 1000000{_MEMORY}",
        ),
    ],
    "tune": [
        (["--grid", "1000000/6/10"], f"num_nodes = 1000000{_MEMORY}"),
        (["--grid", f"60/6/{'9' * 5000}"], "must be num_nodes/depth/width"),
        (["--max-new-tokens", _BIG], f"max_new_tokens = {_BIG} {_INT32}"),
        (["--temperature", "1e39"], _FLOAT32),
        (["--batch-size", "1000000000"], f"batch_size = 1000000000{_MEMORY}"),
        (["--output", "/dev/full"], _FULL),
    ],
    "benchmark": [
        (["--random", _HUGE], f"layers = 1000000{_MEMORY}"),
        (["--width", "1000000"], f"width = 1000000{_MEMORY}"),
        (["--slots", _BIG], f"{_BIG} cache slots{_MEMORY}"),
        (["--contexts", _BIG], f"{_BIG} cache slots{_MEMORY}"),
        (["--batch-size", _BIG], f"batch_size = {_BIG}{_MEMORY}"),
        (["--training", "--row-length", _BIG], f"row_length = {_BIG} tokens"),
        (["--training", "--row-length", "-1"], "row_length = -1 must be at least 1"),
    ],
    "calibrate": [
        ([], "required: records, --output"),
        (["records", "--output", "/dev/full"], _FULL),
    ],
    "convert": [
        ([*_TARGET, "--output", "/proc/out"], "cannot write /proc/out"),
        ([*_TARGET, "--output", "~nobody-of-that-name/out"], "home"),
    ],
    "export": [
        (["--head", str(assets.TARGET), "--output", "out"], "config.json"),
    ],
    "report": [(["records", "--output", "/proc/out"], "cannot write to /proc/out")],
    "compile_report": [(["--output", "/nowhere/out.md"], "cannot write /nowhere")],
}


@pytest.fixture(scope="module")
def mains() -> Callable[[str], Main]:
    """Every script's `main`, loaded once."""
    loaded: dict[str, Main] = {}
    return lambda script: (
        loaded.get(script) or loaded.setdefault(script, load_main(script))
    )


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with what commands read."""
    (tmp_path / "big.toml").write_text("[tree]\nnum_nodes = 1000000\n")
    (tmp_path / "long.toml").write_text(f"[decoding]\nmax_new_tokens = {_BIG}\n")
    (tmp_path / "hot.toml").write_text("[sampling]\ntemperature = 1e39\n")
    question = {"question_id": 1, "category": "a", "turns": ["Once upon"]}
    (tmp_path / "questions.jsonl").write_text(json.dumps(question))
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": "Once upon a time"}))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("script", "argv", "named"),
    [
        pytest.param(script, argv, named, id=f"{script}-{' '.join(argv)[:60]}")
        for script, cases in _CASES.items()
        for argv, named in cases
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line_and_nothing_is_written(
    script: str,
    argv: list[str],
    named: str,
    mains: Callable[[str], Main],
    place: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    files = sorted(os.walk(place))
    assert mains(script)(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1, err
    assert all(part in err for part in named.split("|"))
    assert len(err) < 400
    assert sorted(os.walk(place)) == files
