"""Quantized targets from the command line."""

import json
from pathlib import Path
from typing import Any

import pytest

from eagle_jax.generation import devices, pairs
from tests.conftest import Main, load_main

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module", params=["int8", "int4"])
def quantization(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def stored(
    tiny_pair: Path, tmp_path_factory: pytest.TempPathFactory, quantization: str
) -> Path:
    """The tiny pair as `scripts/convert.py` quantizes it."""
    output = tmp_path_factory.mktemp("quantized") / "pair"
    flags = ["--output", str(output), "--quantization", quantization]
    assert load_main("convert")(_folders(tiny_pair) + flags) == 0
    return output


def _folders(pair: Path) -> list[str]:
    return ["--target", str(pair / "target"), "--draft", str(pair / "head")]


def _results(main: Main, folder: Path, flags: list[str]) -> Any:
    file = folder / "out.json"
    tree = ["--num-nodes", "4", "--depth", "2", "--width", "2"]
    flags = [*flags, *tree, "--prompt", "the", "--max-new-tokens", "12"]
    assert main([*flags, "--json", str(file)]) == 0
    return json.loads(file.read_text())


def _refused(
    main: Main, capsys: pytest.CaptureFixture[str], flags: list[str], *named: str
) -> None:
    """Runs what is refused in one line, before weights are read or made."""
    assert main(flags) == 2
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err and "compiling" not in err
    (line,) = [line for line in err.splitlines() if line.startswith("error:")]
    for name in named:
        assert name in line, line


def test_a_stored_target_generates_what_one_quantized_at_load_does(
    main: Main, tiny_pair: Path, stored: Path, tmp_path: Path, quantization: str
) -> None:
    flags = [*_folders(tiny_pair), "--quantization", quantization, "--compare"]
    at_load = _results(main, tmp_path, flags)
    from_store = _results(main, tmp_path, _folders(stored))
    assert at_load["totals"]["identical"] is True
    assert from_store["runs"][0] == at_load["runs"][0]
    assert from_store["target_bytes"] == at_load["target_bytes"]
    # Embedding, output head and norms; matrices; the scales of their columns.
    matrices = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48)
    columns = 2 * (2 * 32 + 2 * 16 + 2 * 48 + 32)
    groups, per_byte = (1, 1) if quantization == "int8" else (2, 2)
    assert at_load["target_bytes"] == (
        4 * (2 * 300 * 32 + 5 * 32) + matrices // per_byte + 4 * groups * columns
    )


def test_a_stored_target_keeps_its_integers(
    main: Main, stored: Path, quantization: str, capsys: pytest.CaptureFixture[str]
) -> None:
    other = "int4" if quantization == "int8" else "int8"
    flags = [*_folders(stored), "--quantization", other]
    named = (f"holds {quantization} weights", f"no {other} weights", "--quantization")
    _refused(main, capsys, flags, *named)


def test_sizes_that_cannot_be_grouped_are_refused(
    main: Main, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--random", "tiny", "--quantization", "int4"]
    _refused(main, capsys, flags, "down_proj.weight has 172 inputs", "int8")


def test_a_device_without_the_product_is_refused(
    main: Main,
    tiny_pair: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: Any) -> None:
        raise NotImplementedError("s8 operands are not supported\nsecond line")

    monkeypatch.setattr(devices, "linear", fail)
    monkeypatch.setattr(pairs.checkpoints, "load_target", None)
    flags = [*_folders(tiny_pair), "--quantization", "int8", "--dtype", "float16"]
    named = ("cannot multiply float16 with int8", "s8 operands", "--dtype")
    _refused(main, capsys, flags, *named)
