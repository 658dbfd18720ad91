"""What no command can do: exit code 2, one line, nothing written.

Every command has a few cases here; what a function behind it refuses by itself is
tested beside that function.
"""

import json
import os
from pathlib import Path

import pytest

from eagle_jax import assets
from tests.conftest import load_main

_BIG = "1000000000000"
_HUGE = "hidden=1000000,layers=1000000,heads=4,vocabulary=1000000"
_RANDOM = ["--random", "tiny"]
_TARGET = ["--target", str(assets.TARGET)]
_LOOKAHEAD = ["--method", "lookahead"]
_QUESTIONS = ["--questions", "questions.jsonl", "--output", "out"]
_EVALUATE = [*_QUESTIONS, "--methods"]
_TRAIN = [*_TARGET, "--data", "texts.jsonl", "--output", "out"]
_REGENERATE = [*_TARGET, "--output", "out.jsonl"]
_GRID = ["--grid", "2/1/1"]
_REWRITE = [*_REGENERATE, "--data", "texts.jsonl"]

_INT32 = "must be below 2**31"
_MEMORY = "|GiB, but there are"
_CIRCLE = "circle.json is a link that leads to itself; give another path"
_FULL = "cannot write /dev/full: No space left on device"

_CASES: dict[str, list[tuple[list[str], str]]] = {
    "generate": [
        (["--target", "nowhere"], "--draft, the EAGLE head|autoregressive"),
        (["--draft", "head"], "--target|--random tiny|embedded"),
        ([*_TARGET, "--method", "lookup", "--chat"], "--chat needs a chat template"),
        (["--prompt", "a", "--prompt", "x " * 600], "prompt 1 has|512 positions"),
        ([*_RANDOM, "--temperature", "-1"], "temperature = -1.0 must be finite"),
        ([*_RANDOM, "--no-such-flag"], "unrecognized arguments: --no-such-flag"),
        ([*_RANDOM, "--method", "eagle3"], "argument --method: invalid choice"),
        ([*_RANDOM, "--trace"], "--trace needs --json FILE"),
        ([*_RANDOM, "--stream", "--batch-size", "2"], "--stream|batch_size = 2"),
        ([*_RANDOM, "--prompts", "big.toml"], "must end in .txt, .json or .jsonl"),
        ([*_RANDOM, "--mesh", "data=99,tensor=3"], "for 297 devices, but there are"),
        ([*_RANDOM, "--mesh", "model=4"], "'model=4' is no size of an axis|give"),
        ([*_RANDOM, "--quantization", "int4"], "down_proj.weight has 172 inputs|int8"),
        ([*_RANDOM, "--config", "nowhere.toml"], "cannot read nowhere.toml"),
        (["--choices", "eagle1_25"], "eagle2 does not read --choices|choose medusa, "),
        (["--method", "lookup", "--level", "9"], "--level; leave|choose lookahead"),
        ([*_LOOKAHEAD, "--min-match", "2"], "--min-match; |choose eagle2+lookup"),
        (
            ["--method", "lookup", "--draft-vocabulary", "9"],
            "--draft-vocabulary; leave",
        ),
        (["--draft-vocabulary", "9"], "--draft-vocabulary 9|no |draft_vocabulary.json"),
        ([*_RANDOM, "--draft-vocabulary", "none.json"], "cannot read none.json"),
        ([*_RANDOM, "--draft-vocabulary", "9@none.txt"], "no tokenizer"),
        ([*_RANDOM, "--guesses", "7"], "method eagle2 does not read --guesses"),
        ([*_RANDOM, "--window", "7"], "method eagle2 does not read --window"),
        (["--num-nodes", "1000000"], f"num_nodes = 1000000{_MEMORY}"),
        ([*_LOOKAHEAD, "--level", "1"], "level = 1 must be at least 2"),
        ([*_LOOKAHEAD, "--window", "0"], "window = 0 must be at least 1"),
        ([*_LOOKAHEAD, "--guesses", "0"], "guesses = 0 must be at least 1"),
        ([*_LOOKAHEAD, "--guesses", "10000000"], _MEMORY),
        (["--max-new-tokens", _BIG], f"max_new_tokens = {_BIG} {_INT32}"),
        (["--config", "big.toml"], f"num_nodes = 1000000{_MEMORY}"),
        (["--random", _HUGE], f"layers = 1000000{_MEMORY}"),
        (["--json", "/dev/full"], _FULL),
        (["--json", "circle.json"], _CIRCLE),
    ],
    "evaluate": [
        ([], "required: --questions, --output, --methods"),
        ([*_EVALUATE, "eagle3"], "'eagle3' is no method; known are autoregressive"),
        ([*_EVALUATE, "lookup", "eagle2", *_TARGET], "--draft, the EAGLE head"),
        ([*_EVALUATE, "small-model", *_TARGET], "--small-model, a smaller model"),
        ([*_EVALUATE, "medusa"], "method medusa needs --medusa, the Medusa heads"),
        ([*_EVALUATE, "hydra"], "method hydra needs --hydra, the Hydra heads"),
        (
            [*_EVALUATE, "eagle2", "lookup", "--medusa", "medusa"],
            "no method reads --medusa medusa; leave it out, or add the method medusa",
        ),
        ([*_EVALUATE, "eagle2+lookup", *_TARGET], "--draft, the EAGLE head"),
        ([*_EVALUATE, "eagle1:choices=none.json"], "none.json is neither a file nor"),
        ([*_EVALUATE, "eagle1:choices=big.toml"], "big.toml is not valid JSON"),
        ([*_EVALUATE, "lookahead:level=1"], "level = 1 must be at least 2"),
        ([*_EVALUATE, "medusa:acceptance=likely"], "one of 'coupled', 'rejection'"),
        ([*_EVALUATE, "chain:draft_vocabulary=none.json"], "cannot read none.json"),
        ([*_EVALUATE, "chain:draft_vocabulary=1.5"], "must be str or int"),
        (
            [*_EVALUATE, "medusa:draft_vocabulary=9"],
            "'draft_vocabulary=9' is not known",
        ),
        ([*_EVALUATE, "lookup", "--max-length", "9999"], "512 positions"),
        ([*_EVALUATE, "lookup", "--max-new-tokens", "512"], "no room for a prompt"),
        ([*_EVALUATE, "lookup", "--template", "tokenizer"], "needs a chat template"),
        ([*_EVALUATE, "lookup", "--categories", "a,b"], "'b' is unknown"),
        ([*_EVALUATE, "eagle2:num_nodes=1000000"], f"num_nodes = 1000000{_MEMORY}"),
        ([*_EVALUATE, "lookup", "--temperatures", "1e39"], "temperature = 1e+39"),
        ([*_EVALUATE, "lookup", "--batch-sizes", "1000000000"], _MEMORY),
        ([*_EVALUATE, "lookup", "--output", "/proc/out"], "cannot write to /proc/out"),
        ([*_EVALUATE, "lookup", "--output", "circle.json"], _CIRCLE),
    ],
    "train": [
        ([*_TRAIN, "--steps", _BIG], f"steps = {_BIG} {_INT32}"),
        ([*_TRAIN, "--mesh", "tensor=two"], "'tensor=two' is no size of an axis"),
        ([*_TRAIN, "--resume"], "holds no run"),
        ([*_TRAIN, "--row-length", "256", "--batch-size", "1000000000"], _MEMORY),
        ([*_TRAIN, "--output", "/proc/out"], "/proc/out"),
        ([*_TRAIN, "--resume", "--output", "circle.json"], _CIRCLE),
    ],
    "regenerate": [
        (_REGENERATE, "give either --data FILE or --samples N"),
        ([*_REWRITE, "--samples", "2"], "give either --data FILE or --samples N"),
        ([*_REGENERATE, "--samples", "0"], "--samples 0 must be at least 1"),
        ([*_REWRITE, "--limit", "0"], "--limit 0 must be at least 1"),
        (
            [*_REGENERATE, "--samples", "2", "--temperature", "0"],
            "one text many times",
        ),
        ([*_REWRITE, "--max-length", "5000"], "max_length = 5000"),
        ([*_REWRITE, "--config", "rejection.toml"], "make the texts depend on the"),
        ([*_REWRITE, "--config", "typical.toml"], "make the texts depend on the"),
        ([*_REGENERATE, "--data", "none.json"], "cannot read the data none.json"),
        ([*_REWRITE, "--batch-size", _BIG], f"batch_size = {_BIG} {_INT32}"),
        ([*_REWRITE, "--output", "/dev/full"], _FULL),
        ([*_REWRITE, "--output", "circle.json"], _CIRCLE),
        (
            [*_REWRITE, "--draft", str(assets.HEAD), "--num-nodes", "1000000"],
            f"num_nodes = 1000000{_MEMORY}",
        ),
    ],
    "tune": [
        ([*_GRID, "--max-depth", "3"], "whose tree is static: medusa,"),
        (
            ["--method", "recycling", "--output", "/dev/null"],
            "is no file, and the tree",
        ),
        (["--target", "somewhere"], "--draft"),
        (["--repeats", "0"], "--repeats = 0 must be at least 1"),
        (["--max-new-tokens", "1"], "--max-new-tokens = 1 must be at least 2"),
        ([*_GRID, "--max-new-tokens", "600"], "512 positions"),
        ([*_GRID, "--batch-size", "400"], "more prompts"),
        (["--calibration", "none.json"], "none.json"),
        (["--grid", "1000000/6/10"], f"num_nodes = 1000000{_MEMORY}"),
        (["--temperature", "1e39"], "temperature = 1e+39"),
        (["--batch-size", "1000000000"], f"batch_size = 1000000000{_MEMORY}"),
        (["--output", "/dev/full"], _FULL),
        (["--method", "medusa"], "method medusa needs --draft, the Medusa heads"),
        (["--method", "eagle1", *_GRID], "does not read --grid; leave it out, or"),
        (["--method", "recycling", *_GRID], "recycling does not read --grid"),
        (
            ["--method", "lookup", "--calibration", "a"],
            "--calibration; leave it out, or choose small-model",
        ),
        (["--method", "lookahead", "--max-nodes", "3"], "leave them out for lookahead"),
        (["--method", "eagle1", "--max-depth", "9"], "--max-depth = 9 must be at most"),
        (
            ["--method", "lookup", "--grid", "2/1/1 3/2/1 4/3/1 5/4/1 6/5/1"],
            "gives lookup 15 settings to run, and at most 12",
        ),
        (
            ["--method", "lookup", "--draft-vocabulary", "9"],
            "lookup does not read --draft-vocabulary; leave",
        ),
        (["--acceptance", "typical"], "unrecognized arguments: --acceptance"),
    ],
    "benchmark": [
        (["--random", _HUGE], f"layers = 1000000{_MEMORY}"),
        (["--width", "1000000"], f"width = 1000000{_MEMORY}"),
        (["--slots", _BIG], f"{_BIG} cache slots{_MEMORY}"),
        (["--batch-size", _BIG], f"batch_size = {_BIG}{_MEMORY}"),
        (["--methods", "lookup", "--training"], "not allowed with argument"),
        (["--methods", "small-model"], "give --target FOLDER and --draft FOLDER"),
        (["--methods", "lookup", "--slots", _BIG], f"{_BIG} cache slots{_MEMORY}"),
        ([*_TARGET, "--random", "tiny"], "not allowed with argument"),
        ([*_TARGET, "--methods", "medusa"], "needs --draft, the Medusa heads"),
        (["--training", "--draft", "head"], "leave out --draft"),
        (["--draft", "head"], "give --target with --draft"),
        (["--training", "--row-length", _BIG], f"row_length = {_BIG} tokens"),
        (["--training", "--row-length", "-1"], "row_length = -1 must be at least 1"),
    ],
    "calibrate": [
        (["--output", "/dev/full"], _FULL),
        (["--output", "circle.json"], _CIRCLE),
        (_TARGET, "method eagle2 needs --draft"),
        (["--method", "eagle1"], "argument --method: invalid choice"),
        (["--depth", "0"], "--depth = 0 must be at least 1"),
        (["--max-new-tokens", "1"], "--max-new-tokens = 1 must be at least 2"),
        (["--num-nodes", "1000000"], f"num_nodes = 1000000{_MEMORY}"),
        (["--prompts", "one.json"], "--prompts = one.json must be 2 prompts or more"),
    ],
    "convert": [
        ([*_TARGET, "--output", "/proc/out"], "cannot write /proc/out"),
        ([*_TARGET, "--output", "circle.json"], _CIRCLE),
        ([*_TARGET, "--output", "~nobody-of-that-name/out"], "home"),
        (["--target", "nowhere", "--output", "out"], "nowhere is no folder"),
    ],
    "export": [
        (["--head", str(assets.TARGET), "--output", "out"], "config.json"),
    ],
    "report": [
        (["records", "--output", "/proc/out"], "cannot write to /proc/out"),
        (["records", "--output", "circle.json"], _CIRCLE),
    ],
    "compile_report": [
        (["--only", "nosuch"], "--only 'nosuch': no case begins so"),
        (["--layers", "2"], "--layers = 2 must be at least 3"),
    ],
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with what commands read."""
    (tmp_path / "one.json").write_text('["once"]')
    (tmp_path / "big.toml").write_text("[tree]\nnum_nodes = 1000000\n")
    for rule in ("rejection", "typical"):
        text = f'[sampling]\nacceptance = "{rule}"\n'
        (tmp_path / f"{rule}.toml").write_text(text)
    question = {"question_id": 1, "category": "a", "turns": ["Once upon"]}
    (tmp_path / "questions.jsonl").write_text(json.dumps(question))
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": "Once upon a time"}))
    (tmp_path / "medusa").mkdir()
    (tmp_path / "medusa" / "config.json").write_text('{"medusa_num_heads": 3}')
    (tmp_path / "circle.json").symlink_to("circle.json")
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
    place: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    files = sorted(os.walk(place))
    assert load_main(script)(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "compiling" not in err, "the refusal came too late"
    # Some say how much of the data they could read before.
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert err.endswith(f"{line}\n") and "Traceback" not in err
    assert all(part in line for part in named.split("|"))
    assert len(line) <= 300
    assert sorted(os.walk(place)) == files
