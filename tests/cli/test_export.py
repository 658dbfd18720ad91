"""The command that exports a head, from flags to exit codes."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from eagle_jax.checkpoints import Export, target_config
from eagle_jax.checkpoints.load import shapes_of
from eagle_jax.heads import export_head
from eagle_jax.heads.medusa import model as medusa_heads
from tests import tiny
from tests.conftest import Main, load_main

_TABLE = "embed_tokens.weight"
_EXPORTED = ["config.json", "model.safetensors", "pytorch_model.bin"]


@pytest.fixture(scope="module")
def export() -> Main:
    """`main` of `scripts/export.py`."""
    return load_main("export")


@pytest.fixture
def pair(tiny_pair: Path, tmp_path: Path) -> Path:
    """A copy of the tiny pair to change at will."""
    return Path(shutil.copytree(tiny_pair, tmp_path / "source"))


def _check_refusal(capsys: pytest.CaptureFixture[str], *named: str) -> None:
    """Checks that the last command said in one line that names all of these."""
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    errors = [line for line in err.splitlines() if line.startswith("error:")]
    assert errors == err.splitlines()[-1:]
    for name in named:
        assert name in errors[0]


def _change_weights(folder: Path, **tensors: Any) -> None:
    path = folder / "model.safetensors"
    save_file(load_file(path) | tensors, path)


@pytest.mark.torch
def test_export_writes_the_head_that_it_was_given(
    export: Main, pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = pair / "head"
    calibration = source / "calibration.json"
    calibration.write_text('{"vocab_size": 1}')
    output = tmp_path / "exported"
    argv = ["--head", str(source), "--output", str(output)]
    assert export([*argv, "--target", str(pair / "target")]) == 0
    out, _ = capsys.readouterr()
    assert out == (
        f"wrote {output}: {', '.join(['calibration.json', *_EXPORTED])}; float32, "
        "every weight read back bit for bit\n"
    )
    assert (output / "calibration.json").read_text() == calibration.read_text()
    expected = load_file(pair / "head" / "model.safetensors")
    written = load_file(output / "model.safetensors")
    assert written.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(written[name], tensor)


def _export_table(export: Main, pair: Path, output: Path, *flags: str) -> Any:
    """Exports the head and returns its table, `None` where it has none."""
    argv = ["--head", str(pair / "head"), "--output", str(output), "--overwrite"]
    assert export([*argv, *flags]) == 0
    return load_file(output / "model.safetensors").get(_TABLE)


def test_export_includes_the_table_as_asked(
    export: Main, pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, target = tmp_path / "exported", ["--target", str(pair / "target")]
    theirs = load_file(pair / "target" / "model.safetensors")[
        "model.embed_tokens.weight"
    ]
    for flags in ([], target, ["--embedding", "keep"], ["--embedding", "include"]):
        np.testing.assert_array_equal(
            _export_table(export, pair, output, *flags), theirs
        )
    assert _export_table(export, pair, output, *target, "--embedding", "omit") is None

    shutil.rmtree(pair / "head")
    shutil.copytree(output, pair / "head")
    assert _export_table(export, pair, output) is None
    assert _export_table(export, pair, output, "--embedding", "omit") is None
    assert _export_table(export, pair, output, *target, "--embedding", "keep") is None
    np.testing.assert_array_equal(_export_table(export, pair, output, *target), theirs)
    narrow = _export_table(export, pair, output, *target, "--dtype", "float16")
    np.testing.assert_array_equal(narrow, theirs.astype(np.float16))


def test_export_never_loses_a_table_that_is_the_heads_own(
    export: Main, pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--head", str(pair / "head"), "--output", str(tmp_path / "exported")]
    omit = ["--embedding", "omit"]
    assert export([*argv, *omit]) == 2
    _check_refusal(capsys, "--embedding omit needs --target")
    own = load_file(pair / "head" / "model.safetensors")[_TABLE] + 1
    _change_weights(pair / "head", **{_TABLE: own})
    target = ["--target", str(pair / "target")]
    assert export([*argv, *target, *omit]) == 2
    _check_refusal(capsys, "would change the head", str(pair / "target"))
    table = _export_table(export, pair, tmp_path / "exported", *target)
    np.testing.assert_array_equal(table, own)


def test_export_refuses_what_it_cannot_use(
    export: Main, pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "exported"
    argv = ["--head", str(pair / "head"), "--output", str(output)]
    assert export(["--head", str(pair), "--output", str(output)]) == 2
    _check_refusal(capsys, str(pair), "config.json")
    assert export([*argv[:2], "--output", str(pair / "head"), "--overwrite"]) == 2
    _check_refusal(capsys, str(pair / "head"), "is read from it")
    assert export([*argv[:2], "--output", str(pair / "target"), "--overwrite"]) == 2
    _check_refusal(capsys, str(pair / "target"), "holds something else")
    _change_weights(pair / "head", **{"fc.bias": np.full(32, 1e30, np.float32)})
    assert export([*argv, "--dtype", "float16"]) == 2
    _check_refusal(capsys, "fc.bias", "float16 cannot hold")
    (pair / "head" / "model.safetensors").unlink()
    assert export(argv) == 2
    _check_refusal(capsys, str(pair / "head"), "holds no weights")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_export_warns_where_torch_is_missing(
    export: Main,
    pair: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    output = tmp_path / "exported"
    assert export(["--head", str(pair / "head"), "--output", str(output)]) == 0
    out, err = capsys.readouterr()
    assert "warning: torch is not installed" in err
    assert "pytorch_model.bin" not in out
    assert sorted(path.name for path in output.iterdir()) == _EXPORTED[:2]


@pytest.fixture
def medusa(pair: Path, tmp_path: Path) -> Path:
    """Medusa heads in float32 for the tiny target."""
    heads = tiny.medusa(target_config(pair / "target").vocab_size)
    weights = tiny.random_like(shapes_of(medusa_heads.init_params, heads.config))
    folder = tmp_path / "medusa"
    export_head(folder, heads.config, weights, Export(base_model="some/model"))
    return folder


@pytest.mark.torch
def test_export_writes_heads_of_medusa_in_another_dtype(
    export: Main,
    pair: Path,
    medusa: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output, target = tmp_path / "exported", ["--target", str(pair / "target")]
    argv = ["--head", str(medusa), "--output", str(output), *target]
    assert export([*argv, "--dtype", "bfloat16"]) == 0
    out, _ = capsys.readouterr()
    files = "config.json, medusa_lm_head.pt, medusa_lm_head.safetensors"
    assert out == (
        f"wrote {output}: {files}; bfloat16, every weight read back bit for bit\n"
    )
    fields = json.loads((output / "config.json").read_text())
    assert fields["base_model_name_or_path"] == "some/model"
    before, after = (
        load_file(folder / "medusa_lm_head.safetensors") for folder in (medusa, output)
    )
    for name, tensor in before.items():
        np.testing.assert_array_equal(after[name], tensor.astype("bfloat16"))


def test_heads_of_medusa_have_no_table(
    export: Main,
    pair: Path,
    medusa: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output, target = str(tmp_path / "new"), ["--target", str(pair / "target")]
    argv = ["--head", str(medusa), "--output", output]
    assert export([*argv, *target, "--embedding", "include"]) == 2
    _check_refusal(capsys, "--embedding", str(medusa), "no embedding table")
    assert not Path(output).exists()
