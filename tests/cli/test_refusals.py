"""What no command can do: exit code 2, one line, nothing written.

Here is what commands refuse themselves, and that they ask before long work; what the
functions behind them refuse is tested beside those.
"""

import json
import os
import shlex
from pathlib import Path

import pytest

from eagle_jax import assets
from tests.conftest import load_main

_TARGET = f"--target {assets.TARGET}"
_HEAD = f"--head {assets.HEAD}"
_EVALUATE = "evaluate --questions questions.jsonl --output out --methods"
_TRAIN = f"train {_TARGET} --data texts.jsonl --output out"
_REGENERATE = f"regenerate {_TARGET} --output out.jsonl"
_REWRITE = f"{_REGENERATE} --data texts.jsonl"
_LONG = "x " * 600

_MEMORY = "|GiB, but there are"
_CIRCLE = "circle.json is a link that leads to itself; give another path"
_FULL = "cannot write /dev/full: No space left on device"

_CASES = [
    (f"chat {_TARGET} --method lookup", "has no chat template; give --target"),
    ("generate --target nowhere", "--draft, the EAGLE head|autoregressive"),
    ("generate --draft head", "--target|embedded"),
    (f"generate {_TARGET} --method lookup --chat", "need a chat template"),
    (f"generate --prompt a --prompt '{_LONG}'", "prompt 1 has|512 positions"),
    ("generate --no-such-flag", "unrecognized arguments: --no-such-flag"),
    ("generate --method eagle3", "argument --method: invalid choice"),
    ("generate --trace", "--trace needs --json FILE"),
    ("generate --stream --batch-size 2", "--stream|batch_size = 2"),
    ("generate --prompts rejection.toml", "must end in .txt, .json or .jsonl"),
    ("generate --mesh data=99,tensor=3", "for 297 devices, but there"),
    ("generate --choices eagle1_25", "eagle2 does not read --choices|choose medusa, "),
    ("generate --draft-vocabulary 9", "--draft-vocabulary 9 must be N@FILE"),
    ("generate --json /dev/full", _FULL),
    ("generate --json circle.json", _CIRCLE),
    ("evaluate", "required: --questions, --output, --methods"),
    (f"{_EVALUATE} lookup eagle2 {_TARGET}", "--draft, the EAGLE head"),
    (f"{_EVALUATE} medusa", "method medusa needs --medusa, the Medusa heads"),
    (f"{_EVALUATE} lookup --max-new-tokens 512", "no room for a prompt"),
    (f"{_EVALUATE} lookup --template tokenizer", "need a chat template"),
    (f"{_EVALUATE} lookup --batch-sizes 1000000000", f"1000000000{_MEMORY}"),
    (f"{_EVALUATE} lookup --output /proc/out", "cannot write to /proc/out"),
    (f"{_EVALUATE} lookup --output circle.json", _CIRCLE),
    (f"{_EVALUATE} lookup autoregressive --output answers", "use the same settings"),
    (f"{_TRAIN} --mesh tensor=two", "'tensor=two' is no size of an axis"),
    (f"{_TRAIN} --output /proc/out", "/proc/out"),
    (_REGENERATE, "give either --data FILE or --samples N"),
    (f"{_REWRITE} --samples 2", "give either --data FILE or --samples N"),
    (f"{_REGENERATE} --samples 2 --systems a", "--systems is for --questions alone"),
    (f"{_REGENERATE} --samples 0", "samples = 0 must be at least 1"),
    (f"{_REWRITE} --min-prefix 65", "min_prefix = 65 must be 0 to max_prefix = 64"),
    (f"{_REWRITE} --max-length 5000", "max_length = 5000"),
    (f"{_REWRITE} --output texts.jsonl", "is read from it"),
    (f"{_REWRITE} --output /dev/full", _FULL),
    ("tune --target somewhere", "give --prompts FILE"),
    ("tune --repeats 0", "--repeats = 0 must be at least 1"),
    ("tune --grid 2/1/1 --max-new-tokens 600", "512 positions"),
    ("tune --grid 2/1/1 --batch-size 400", "more prompts"),
    ("tune --output /dev/full", _FULL),
    ("tune --method eagle1", "invalid choice: 'eagle1'"),
    ("tune --method chain --grid 2/1/1", "--grid '2/1/1' must be depth"),
    ("tune --method lookup --calibration a", "choose small-model"),
    ("tune --method lookup --draft-vocabulary 9@a", "lookup does not read"),
    ("benchmark --batch-size 1000000000", f"batch_size = 1000000000{_MEMORY}"),
    ("benchmark --methods small-model", "give --target FOLDER and --draft FOLDER"),
    ("benchmark --suite gpu --target head", "give --random, not --target"),
    ("benchmark --draft head", "give --target with --draft"),
    ("calibrate --output /dev/full", _FULL),
    ("calibrate --target nowhere --prompts one.json", "method eagle2 needs --draft"),
    ("calibrate --depth 0", "--depth = 0 must be at least 1"),
    ("calibrate --max-new-tokens 1", "--max-new-tokens = 1 must be at least 2"),
    (f"export {_HEAD} --output /proc/out", "cannot write /proc/out"),
    ("export --head nowhere --output out", "nowhere is no folder"),
    (f"export --head {assets.TARGET} --output out", "holds a whole model"),
    (f"export {_HEAD} --target {assets.HEAD} --output out", "head, not a target"),
    ("report records --output /proc/out", "cannot write to /proc/out"),
    ("report records --output out", "holds no *.jsonl"),
    ("report records --output one.json", "is no folder; give another name"),
    ("compile_report --only nosuch", "--only 'nosuch': no case begins so"),
    ("compile_report --layers 2", "--layers = 2 must be at least 3"),
]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with what commands read."""
    (tmp_path / "one.json").write_text('["once"]')
    (tmp_path / "rejection.toml").write_text('[pair]\nacceptance = "rejection"\n')
    question = {"question_id": 1, "category": "a", "turns": ["Once upon"]}
    (tmp_path / "questions.jsonl").write_text(json.dumps(question))
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": "Once upon a time"}))
    (tmp_path / "answers").mkdir()
    other = tmp_path / "answers" / "autoregressive-t0-b1.jsonl"
    other.write_text('{"run": {"seed": 0}}\n')
    (tmp_path / "medusa").mkdir()
    (tmp_path / "medusa" / "config.json").write_text('{"medusa_num_heads": 3}')
    (tmp_path / "circle.json").symlink_to("circle.json")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("command", "named"), _CASES)
def test_what_cannot_be_done_is_refused_in_one_line_and_nothing_is_written(
    command: str, named: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, *argv = shlex.split(command)
    files = sorted(os.walk(place))
    assert load_main(script)(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "compiling" not in err, "the refusal came too late"
    assert script == "generate" or "loading" not in err
    # Some say how much of the data they could read before.
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert err.endswith(f"{line}\n") and "Traceback" not in err
    assert all(part in line for part in named.split("|"))
    assert len(line) <= 300
    assert sorted(os.walk(place)) == files
