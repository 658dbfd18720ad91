"""Where checkpoints lie, and what tells one from another."""

import os
from pathlib import Path

import pytest

from eagle_jax.checkpoints import (
    convert_pair,
    fingerprint_folder,
    hub,
    resolve,
)
from tests.helpers import refused


def test_what_is_no_checkpoint_is_refused(target: Path, tmp_path: Path) -> None:
    for name in (
        *(str(tmp_path / "nowhere"), str(target / "config.json")),
        "~nobody-of-that-name/model",
    ):
        refused(lambda name=name: resolve(name), name, "is no folder; give")
    (tmp_path / "empty").mkdir()
    refused(lambda: resolve(str(tmp_path / "empty")), "holds no config.json; give")
    assert resolve(str(target)) == target


def test_a_name_that_the_hub_does_not_have_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def offline(*_: object, **__: object) -> str:
        raise OSError("there is no network\nand more lines")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    named = ("nobody/nothing is neither a local folder", "(there is no network)")
    refused(lambda: resolve("nobody/nothing"), *named)


def change(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_every_byte_of_a_small_model_counts(target: Path, tiny_pair: Path) -> None:
    before = fingerprint_folder(target)
    assert before == fingerprint_folder(tiny_pair / "target"), "wherever it lies"
    weights = target / "model.safetensors"
    assert weights.stat().st_size > 1 << 17
    for place in (9, weights.stat().st_size // 3, -1):
        change(weights, place)
        assert fingerprint_folder(target) != before
        change(weights, place)
    assert fingerprint_folder(target) == before


def test_every_part_of_a_large_file_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "_WHOLE_BYTES", 1 << 16)
    for name, size in (("_END_BYTES", 1 << 10), ("_BLOCKS", 8), ("_BLOCK_BYTES", 64)):
        monkeypatch.setattr(hub, name, size)
    size = (1 << 16) + 1
    shards = [tmp_path / f"model-{number}.safetensors" for number in range(2)]
    for shard in shards:
        shard.write_bytes(bytes(size))
    before = fingerprint_folder(tmp_path)
    for shard in shards:
        # A tensor of an eighth of the file, wherever it lies.
        for start in range(0, size, size // 8):
            content = bytearray(size)
            content[start : start + size // 8] = b"\1" * len(
                content[start:][: size // 8]
            )
            shard.write_bytes(content)
            assert fingerprint_folder(tmp_path) != before, start
            shard.write_bytes(bytes(size))
    shards[1].write_bytes(bytes(size + 1))
    assert fingerprint_folder(tmp_path) != before


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "merges.txt"])
def test_settings_and_tokenizer_count(target: Path, name: str) -> None:
    (target / "merges.txt").write_text("a b\n")
    before = fingerprint_folder(target)
    (target / name).write_bytes((target / name).read_bytes() + b"\n")
    assert fingerprint_folder(target) != before


def test_a_calibration_changes_no_weight(target: Path) -> None:
    before = fingerprint_folder(target)
    (target / "calibration.json").write_text("{}")
    assert fingerprint_folder(target) == before


def test_a_converted_pair_is_known_by_its_tensors(
    target: Path, converted: Path, tmp_path: Path
) -> None:
    """Orbax gives its files other names each time."""
    stores = [converted, tmp_path / "again", tmp_path / "other"]
    convert_pair(stores[1], target)
    change(target / "model.safetensors", -4)  # The least bit of a number.
    convert_pair(stores[2], target)
    first, again, other = (fingerprint_folder(store / "target") for store in stores)
    assert first == again != other


def test_the_hubs_links_are_followed(target: Path, tmp_path: Path) -> None:
    linked = tmp_path / "snapshot"
    linked.mkdir()
    for path in target.iterdir():
        os.symlink(path, linked / path.name)
    assert fingerprint_folder(linked) == fingerprint_folder(target)
