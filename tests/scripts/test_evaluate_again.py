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
