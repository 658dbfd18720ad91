"""The command that exports a head, from flags to exit codes."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import chex
import numpy as np
import pytest
from safetensors.numpy import load_file

from eagle_jax.checkpoints import Export, load_target, target_config
from eagle_jax.checkpoints.load import shapes_of
from eagle_jax.heads import export_head
from tests import tiny
from tests.checkpoints.folders import change_weights
from tests.conftest import Main, load_main
from tests.heads.samples import load_head

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
    """Checks that the last command ended with a line that names all of these."""
    out, err = capsys.readouterr()
    line = err.splitlines()[-1]
    assert out == "" and line.startswith("error:")
    for name in named:
        assert name in line


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
        f"wrote {output}: {', '.join(['calibration.json', *_EXPORTED])}; "
        "weights in float32\n"
    )
    assert (output / "calibration.json").read_text() == calibration.read_text()
    expected = load_file(source / "model.safetensors")
    chex.assert_trees_all_equal(load_file(output / "model.safetensors"), expected)


def _export_table(export: Main, pair: Path, output: Path, *flags: str) -> Any:
    """Exports the head and returns its table, `None` where it has none."""
    argv = ["--head", str(pair / "head"), "--output", str(output), "--overwrite"]
    assert export([*argv, *flags]) == 0
    return load_file(output / "model.safetensors").get(_TABLE)


def test_export_includes_the_table_that_published_heads_have(
    export: Main, pair: Path, eagle3_pair: Path, tmp_path: Path
) -> None:
    output, target = tmp_path / "exported", ["--target", str(pair / "target")]
    theirs = load_file(pair / "target" / "model.safetensors")[
        "model.embed_tokens.weight"
    ]
    for flags in ([], target):
        table = _export_table(export, pair, output, *flags)
        np.testing.assert_array_equal(table, theirs)
    change_weights(pair / "head", embed_tokens__weight=None)
    assert _export_table(export, pair, output) is None
    np.testing.assert_array_equal(_export_table(export, pair, output, *target), theirs)
    narrow = _export_table(export, pair, output, *target, "--dtype", "float16")
    np.testing.assert_array_equal(narrow, theirs.astype(np.float16))
    target = ["--target", str(eagle3_pair / "target")]  # Published ones have none.
    assert _export_table(export, eagle3_pair, output, *target) is None


def test_export_never_loses_a_table_that_is_the_heads_own(
    export: Main, pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head, target = str(pair / "head"), ["--target", str(pair / "target")]
    own = load_file(pair / "head" / "model.safetensors")[_TABLE] + 1
    change_weights(pair / "head", embed_tokens__weight=own)
    assert export(["--head", head, "--output", head, "--overwrite"]) == 2
    _check_refusal(capsys, head, "is read from it")
    table = _export_table(export, pair, tmp_path / "exported", *target)
    np.testing.assert_array_equal(table, own)


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


def test_heads_of_medusa_keep_their_target(
    export: Main, pair: Path, tmp_path: Path
) -> None:
    medusa, output, target = tmp_path / "medusa", tmp_path / "new", pair / "target"
    heads = tiny.medusa(target_config(target).vocab_size)
    weights = tiny.random_like(shapes_of(heads.init))
    export_head(medusa, heads, weights, Export(base_model="some/model"))
    argv = ["--head", str(medusa), "--output", str(output), "--target", str(target)]
    assert export([*argv, "--dtype", "bfloat16"]) == 0
    fields = json.loads((output / "config.json").read_text())
    assert fields["base_model_name_or_path"] == "some/model"


def test_the_names_of_an_eagle_3_heads_layer_can_be_chosen(
    export: Main,
    eagle3_pair: Path,
    tiny_pair: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    head, output = eagle3_pair / "head", tmp_path / "exported"
    argv = ["--output", str(output), "--prefix"]
    assert export(["--head", str(tiny_pair / "head"), *argv, "midlayer"]) == 2
    _check_refusal(capsys, "--prefix", "EAGLE-3")
    assert export(["--head", str(head), *argv, "layers.0"]) == 0
    target = load_target(eagle3_pair / "target")
    chex.assert_trees_all_equal(load_head(output, *target), load_head(head, *target))
    stored = load_file(output / "model.safetensors")
    assert "layers.0.hidden_norm.weight" in stored and "d2t" in stored
