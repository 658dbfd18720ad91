"""Files of weights that nothing can be made of, whoever wrote them."""

import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chex
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from eagle_jax.checkpoints import load_target, open_weights, resolve
from eagle_jax.errors import InputError
from eagle_jax.models import transformer
from eagle_jax.models.transformer import TransformerParams
from tests.checkpoints.folders import (
    SINGLE,
    change_config,
    change_weights,
    save_bin,
    store,
    take_weights,
)
from tests.helpers import refused

_QUERY = "model.layers.0.self_attn.q_proj.weight"
_UP = "model.layers.0.mlp.up_proj.weight"
_INDEX, _BIN = "model.safetensors.index.json", "pytorch_model.bin"
_SHARD = "model-00002-of-00002.safetensors"

Change = Callable[[Path], object]


def _tensor(name: str, change: Callable[[np.ndarray], Any]) -> Change:
    """Changes a tensor of a folder, or takes it away."""

    def apply(folder: Path) -> None:
        tensor = change(load_file(folder / SINGLE)[name])
        change_weights(folder, **{name.replace(".", "__"): tensor})

    return apply


def _filled(value: float) -> Change:
    return _tensor(_QUERY, lambda x: np.where(np.arange(32) == 5, np.float32(value), x))


def _cut(size: int) -> Change:
    def apply(folder: Path) -> None:
        (folder / SINGLE).write_bytes((folder / SINGLE).read_bytes()[:size])

    return apply


def _shards(change: Callable[[dict[str, str]], object]) -> Change:
    """Writes shards, and an index that says something else."""

    def apply(folder: Path) -> None:
        store(folder, take_weights(folder), "shards")
        weight_map = json.loads((folder / _INDEX).read_text())["weight_map"]
        change(weight_map)
        (folder / _INDEX).write_text(json.dumps({"weight_map": weight_map}))

    return apply


def _index(text: str) -> Change:
    def apply(folder: Path) -> None:
        (folder / SINGLE).unlink()
        (folder / _INDEX).write_text(text)

    return apply


def _lose_shard(folder: Path) -> None:
    store(folder, take_weights(folder), "shards")
    (folder / _SHARD).unlink()


def _store_twice(folder: Path) -> None:
    whole = take_weights(folder)
    store(folder, whole, "shards")
    for path in folder.glob("model-*.safetensors"):
        save_file(load_file(path) | {_QUERY: whole[_QUERY]}, path)


def _truncated_bin(folder: Path) -> None:
    store(folder, take_weights(folder), "bin")
    os.truncate(folder / _BIN, (folder / _BIN).stat().st_size - 5000)


def _bin_of(content: Any) -> Change:
    def apply(folder: Path) -> None:
        import torch

        (folder / SINGLE).unlink()
        torch.save(content, folder / _BIN)

    return apply


def _bin_with(change: Callable[[Any, Any], Any]) -> Change:
    """One tensor in a torch file is not plain."""

    def apply(folder: Path) -> None:
        import torch

        query = torch.from_numpy(take_weights(folder)[_QUERY])
        torch.save({_QUERY: change(torch, query)}, folder / _BIN)

    return apply


_REFUSED: dict[str, tuple[Change, tuple[str, ...]]] = {
    "a lost tensor": (_tensor(_QUERY, lambda _: None), ("lacks", _QUERY)),
    "no output head": (_tensor("lm_head.weight", lambda _: None), ("lm_head.weight",)),
    "fewer rows": (_tensor(_QUERY, lambda x: x[:16]), (_QUERY, "(16, 32)", "(32, 32)")),
    "turned": (_tensor(_UP, lambda x: x.reshape(32, 48)), (_UP, "(32, 48)")),
    "integers": (_tensor(_QUERY, lambda x: x.astype(np.int8)), (_QUERY, "int8")),
    "NaN": (_filled(np.nan), (_QUERY, "NaN or inf")),
    "infinite": (_filled(-np.inf), (_QUERY, "NaN or inf")),
    "a layer too many": (
        lambda folder: change_weights(folder, model__layers__1__x=np.zeros(2)),
        ("unexpected", "model.layers.1."),
    ),
    "an empty file": (_cut(0), (SINGLE,)),
    "half a header": (_cut(400), (SINGLE,)),
    "a file cut short": (_cut(-100), (SINGLE,)),
    "no weights": (lambda folder: (folder / SINGLE).unlink(), ("no weights", SINGLE)),
    "a lost shard": (_lose_shard, (_SHARD, _INDEX)),
    "too much in an index": (_shards(lambda m: m.update(ghost=_SHARD)), ("ghost",)),
    "a tensor in two shards": (_store_twice, (_QUERY, "another shard")),
    "an index that is none": (_index(""), (_INDEX,)),
    "an empty index": (_index('{"weight_map": {}}'), (_INDEX,)),
    "a shard without a name": (_shards(lambda m: m.update({_QUERY: ""})), (_INDEX,)),
    "a long name": (_shards(lambda m: m.update({_QUERY: "x" * 5000})), (_INDEX,)),
}
_REFUSED_BINS: dict[str, tuple[Change, tuple[str, ...]]] = {
    "cut short": (_truncated_bin, (_BIN,)),
    "a list": (_bin_of(["a", "list"]), (_BIN,)),
    "numbered": (_bin_of({0: None}), (_BIN, "by name")),
    "float8": (_bin_with(lambda torch, x: x.to(torch.float8_e4m3fn)), ("plain",)),
    "meta": (_bin_with(lambda torch, x: x.to("meta")), (_QUERY, "plain tensors")),
    "sparse": (_bin_with(lambda torch, x: x.to_sparse()), (_QUERY, "plain tensors")),
    "complex": (_bin_with(lambda torch, x: x.to(torch.complex64)), ("plain tensors",)),
}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        *(pytest.param(*case, id=name) for name, case in _REFUSED.items()),
        *(
            pytest.param(*case, id=f"bin: {name}", marks=pytest.mark.torch)
            for name, case in _REFUSED_BINS.items()
        ),
    ],
)
def test_what_is_no_targets_weights_is_refused_by_name(
    target: Path, change: Change, named: tuple[str, ...]
) -> None:
    change(target)
    refused(lambda: load_target(target), str(target), *named)


def test_values_that_the_dtype_cannot_hold_are_refused(target: Path) -> None:
    _tensor(_UP, lambda x: x + np.float32(1e6))(target)
    refused(lambda: load_target(target, "float16"), _UP, "float16 cannot hold")
    _tensor(_UP, lambda x: x.astype(np.float64))(target)
    refused(lambda: load_target(target, None), "float64", "`dtype`")


def test_sizes_that_the_groups_do_not_divide_are_refused(target: Path) -> None:
    change_config(target, intermediate_size=172)
    named = ("do not divide intermediate_size = 172", "`quantization` int8")
    # Said from the settings alone: the weights do not even fit them.
    refused(lambda: load_target(target, bits=4), *named)
    refused(lambda: load_target(target, bits=8), "(48, 32)", "(172, 32)")


def test_a_file_that_becomes_shorter_is_refused(target: Path) -> None:
    files = open_weights(target)
    os.truncate(target / SINGLE, (target / SINGLE).stat().st_size // 2)
    with pytest.raises(InputError, match=r"cannot read (model|lm_head)\S+"):
        for name in sorted(files.names()):
            files.read(name)


def test_shards_outside_the_folder_are_not_opened(target: Path, tmp_path: Path) -> None:
    store(target, take_weights(target), "shards")
    outside = tmp_path / "outside.safetensors"
    shutil.move(target / _SHARD, outside)
    (target / "link.safetensors").symlink_to(outside)
    (target / "circle.safetensors").symlink_to(target / "circle.safetensors")
    (target / "inner").mkdir()
    listed = (target / _INDEX).read_text()
    for name, said in {
        "../outside.safetensors": "outside its folder",
        "inner/../../outside.safetensors": "outside its folder",
        str(outside): "outside its folder",
        "link.safetensors": "outside its folder",
        "circle.safetensors": "",
        "inner": "is missing",
    }.items():
        (target / _INDEX).write_text(listed.replace(_SHARD, name))
        refused(lambda: open_weights(target), repr(name), said, _INDEX)


def test_shards_may_be_links_into_the_hubs_cache(
    target: Path, tmp_path: Path, expected: TransformerParams
) -> None:
    store(target, take_weights(target), "shards")
    snapshot = tmp_path / "models--owner--name" / "snapshots" / "0123abcd"
    blobs = tmp_path / "models--owner--name" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(target.iterdir())):
        shutil.move(path, blobs / str(number))
        (snapshot / path.name).symlink_to(Path("../../blobs") / str(number))
    chex.assert_trees_all_equal(load_target(snapshot)[1], expected)


def test_layers_that_the_files_lack_are_not_planned(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_config(target, num_hidden_layers=10_000)
    monkeypatch.setattr(transformer, "init_params", None)
    refused(lambda: load_target(target), "num_hidden_layers = 10,000")


class _Trap:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.torch
@pytest.mark.parametrize("how", ["zip", "older", "plain"])
def test_a_pickle_with_code_is_refused_and_not_executed(
    target: Path, tmp_path: Path, how: str
) -> None:
    import torch

    (target / SINGLE).unlink()
    path, sprung = target / _BIN, tmp_path / "sprung"
    payload = {"model.norm.weight": _Trap(sprung)}
    if how == "plain":
        path.write_bytes(pickle.dumps(payload))
    else:
        torch.save(payload, path, _use_new_zipfile_serialization=how == "zip")
    message = refused(lambda: load_target(target), str(path))
    # torch advises to run what the file holds.
    assert "weights_only" not in message
    assert how == "plain" or "mkdir" in message
    assert not sprung.exists()
    pickle.loads(pickle.dumps(payload))
    assert sprung.exists(), "the trap itself works"


@pytest.mark.torch
@pytest.mark.parametrize("kind", ["deflated", "overlapping"])
def test_a_torch_file_that_holds_more_than_its_size_is_refused_unread(
    target: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    save_bin(take_weights(target), target / _BIN)
    with zipfile.ZipFile(target / _BIN) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    method = zipfile.ZIP_DEFLATED if kind == "deflated" else zipfile.ZIP_STORED
    with zipfile.ZipFile(target / _BIN, "w", method) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
            if kind == "overlapping":
                archive.filelist += archive.filelist[-1:]
    monkeypatch.setattr(torch, "load", None)
    refused(lambda: load_target(target), "compressed", "larger than the file")


def test_what_is_no_checkpoint_is_refused(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(name: str, **_: object) -> str:
        if name == "owner/gated":
            raise GatedRepoError.__new__(GatedRepoError)
        raise OSError("there is no network\nand more lines")

    from huggingface_hub.errors import GatedRepoError

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    (tmp_path / "empty").mkdir()
    for name, said in {
        str(tmp_path / "nowhere"): "is no folder; give",
        str(target / "config.json"): "is no folder; give",
        "~nobody-of-that-name/model": "is no folder; give",
        "a" * 300: "is no folder; give",
        str(tmp_path / "empty"): "holds no config.json; give",
        "nobody/nothing": "(there is no network)",
        "owner/gated": "accept its terms at https://huggingface.co/owner/gated",
    }.items():
        refused(lambda name=name: resolve(name), name[:99], said)
    assert resolve(str(target)) == target
