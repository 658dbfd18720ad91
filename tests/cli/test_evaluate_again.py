"""The same evaluation, run again or asked in another way."""

import json
import shutil
from pathlib import Path

import pytest

from tests.conftest import Main, load_main

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def evaluate_main() -> Main:
    return load_main("evaluate")


@pytest.mark.parametrize("half", ["target", "head"])
def test_records_of_other_weights_under_the_same_path_are_refused(
    evaluate_main: Main,
    tiny_pair: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    half: str,
) -> None:
    pair = Path(shutil.copytree(tiny_pair, tmp_path / "pair"))
    (tmp_path / "one.json").write_text(json.dumps(["ten"]))
    flags = ["--target", f"{pair}/target", "--draft", f"{pair}/head"]
    flags += ["--max-new-tokens", "2", "--methods", "chain:depth=1"]
    flags += ["--output", f"{tmp_path}/out", "--questions"]
    assert evaluate_main([*flags, f"{tmp_path}/one.json"]) == 0
    assert evaluate_main([*flags, f"{tmp_path}/one.json"]) == 0, "nothing has changed"
    (path,) = (tmp_path / "out").iterdir()
    before = path.read_bytes()
    weights = pair / half / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-4] ^= 1
    weights.write_bytes(content)
    assert evaluate_main([*flags, f"{tmp_path}/one.json"]) == 2
    name = {"target": "target", "head": "draft"}[half]
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"was written with {name}_fingerprint = " in error
    assert path.read_bytes() == before


def test_two_turns_with_the_same_cut_prompt_draw_other_noise(
    evaluate_main: Main, tiny_pair: Path, tmp_path: Path
) -> None:
    turns = ["1!2?3%4&5=6+7-8*9"] * 2
    question = {"question_id": 1, "category": "qa", "turns": turns}
    (tmp_path / "two.jsonl").write_text(json.dumps(question) + "\n")
    flags = ["--target", f"{tiny_pair}/target", "--questions", f"{tmp_path}/two.jsonl"]
    flags += ["--methods", "autoregressive", "--temperatures", "1"]
    flags += ["--max-length", "16", "--max-new-tokens", "8", "--output"]
    assert evaluate_main([*flags, f"{tmp_path}/out"]) == 0
    (path,) = (tmp_path / "out").iterdir()
    first, second = json.loads(path.read_text())["choices"][0]["token_ids"]
    assert first != second
