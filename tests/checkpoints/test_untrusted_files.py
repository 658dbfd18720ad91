"""What files of weights may lead to, whoever wrote them."""

import functools
import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import chex
import pytest
from safetensors.numpy import save_file

from eagle_jax.checkpoints import load_target
from eagle_jax.checkpoints.weights import TensorFiles
from eagle_jax.errors import InputError
from eagle_jax.models import transformer
from eagle_jax.models.transformer import TransformerParams
from tests.checkpoints.folders import (
    change_config,
    save_bin,
    take_weights,
    write_shards,
)
from tests.helpers import refused

_QUERY = "model.layers.1.self_attn.q_proj.weight"


def test_shards_outside_the_folder_are_not_opened(target: Path, tmp_path: Path) -> None:
    index = write_shards(target, take_weights(target), save_file, "safetensors")
    shard = target / "model-00001-of-00002.safetensors"
    outside = tmp_path / "outside.safetensors"
    shutil.move(shard, outside)
    (target / "link.safetensors").symlink_to(outside)
    (target / "inner").mkdir()
    for name in (
        "../outside.safetensors",
        "inner/../../outside.safetensors",
        str(outside),
        "link.safetensors",
    ):
        content = json.loads(index.read_text())
        moved = {
            tensor: name if file in (shard.name, "moved") else file
            for tensor, file in content["weight_map"].items()
        }
        changed = tmp_path / "changed"
        shutil.rmtree(changed, ignore_errors=True)
        shutil.copytree(target, changed, symlinks=True)
        (changed / index.name).write_text(json.dumps({"weight_map": moved}))
        refused(
            functools.partial(TensorFiles, changed), repr(name), "outside", index.name
        )


def test_shards_may_be_links_into_the_hubs_cache(
    target: Path, tmp_path: Path, expected: TransformerParams
) -> None:
    write_shards(target, take_weights(target), save_file, "safetensors")
    snapshot = tmp_path / "models--owner--name" / "snapshots" / "0123abcd"
    blobs = tmp_path / "models--owner--name" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(target.iterdir())):
        shutil.move(path, blobs / str(number))
        (snapshot / path.name).symlink_to(Path("../../blobs") / str(number))
    chex.assert_trees_all_equal(load_target(snapshot)[1], expected)


@pytest.mark.parametrize("name", ["", "a\0b", "x" * 5000, "sub"])
def test_shards_that_are_no_files_are_refused(target: Path, name: str) -> None:
    (target / "sub").mkdir()
    index = write_shards(target, take_weights(target), save_file, "safetensors")
    index.write_text(json.dumps({"weight_map": {_QUERY: name}}))
    refused(lambda: TensorFiles(target), index.name)


def test_layers_that_the_files_lack_are_not_planned(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_config(target, num_hidden_layers=10_000)
    monkeypatch.setattr(transformer, "init_params", None)
    refused(lambda: load_target(target), "num_hidden_layers = 10,000", "2 layers")


def test_experts_that_the_files_lack_are_not_planned(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixtral = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    change_config(target, **mixtral, num_local_experts=65_536)
    monkeypatch.setattr(transformer, "init_params", None)
    refused(lambda: load_target(target), "num_local_experts = 65,536", "0 experts")


@pytest.mark.torch
def test_torch_files_of_older_formats_and_of_parameters_are_read(
    target: Path, expected: TransformerParams
) -> None:
    import torch

    tensors = {k: torch.from_numpy(v) for k, v in take_weights(target).items()}
    old = {"_use_new_zipfile_serialization": False}
    torch.save(tensors, target / "pytorch_model.bin", **old)
    chex.assert_trees_all_equal(load_target(target)[1], expected)
    parameters = {k: torch.nn.Parameter(v) for k, v in tensors.items()}
    torch.save(parameters, target / "pytorch_model.bin")
    chex.assert_trees_all_equal(load_target(target)[1], expected)


@pytest.mark.torch
def test_torch_tensors_that_are_not_plain_are_refused(target: Path) -> None:
    import torch

    tensors = {k: torch.from_numpy(v) for k, v in take_weights(target).items()}
    plain = tensors[_QUERY]
    path = target / "pytorch_model.bin"
    for other in (
        plain.to(torch.float8_e4m3fn),
        plain.to("meta"),
        plain.to_sparse(),
        plain.to(torch.complex64),
    ):
        torch.save(tensors | {_QUERY: other}, path)
        refused(lambda: load_target(target), _QUERY, "plain tensors")
    torch.save({0: plain}, path)
    refused(lambda: load_target(target), "by name")


@pytest.mark.torch
@pytest.mark.parametrize("kind", ["deflated", "overlapping"])
def test_a_torch_file_that_holds_more_than_its_size_is_refused_unread(
    target: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    path = target / "pytorch_model.bin"
    save_bin(take_weights(target), path)
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    method = zipfile.ZIP_DEFLATED if kind == "deflated" else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
            if kind == "overlapping":
                archive.filelist += archive.filelist[-1:]
    monkeypatch.setattr(torch, "load", None)
    refused(lambda: load_target(target), "compressed", "larger than the file")


@pytest.mark.torch
@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("what", [print, json.JSONDecoder])
def test_what_a_pickle_would_run_is_refused_without_advice_to_run_it(
    target: Path, what: Any, is_zip: bool
) -> None:
    import torch

    take_weights(target)
    path = target / "pytorch_model.bin"
    torch.save({_QUERY: what}, path, _use_new_zipfile_serialization=is_zip)
    with pytest.raises(InputError, match=rf"holds \S*{what.__name__} ") as caught:
        load_target(target)
    assert "weights_only" not in str(caught.value)


@pytest.mark.torch
def test_a_flipped_bit_in_a_torch_file_is_refused_or_harmless(target: Path) -> None:
    save_bin(take_weights(target), target / "pytorch_model.bin")
    path = target / "pytorch_model.bin"
    content = bytearray(path.read_bytes())
    for place in range(0, len(content), len(content) // 97):
        content[place] ^= 0x10
        path.write_bytes(content)
        try:
            load_target(target)
        except InputError as error:
            assert str(target) in str(error)
        content[place] ^= 0x10
