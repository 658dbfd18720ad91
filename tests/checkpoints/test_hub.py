"""What tells one checkpoint from another."""

import os
import shutil
from pathlib import Path

import pytest

from eagle_jax.checkpoints import convert_pair, fingerprint_folder, hub


@pytest.fixture
def folder(tiny_pair: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_pair / "target", tmp_path / "copy"))


def change(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_every_byte_of_a_small_model_counts(folder: Path, tiny_pair: Path) -> None:
    before = fingerprint_folder(folder)
    assert before == fingerprint_folder(tiny_pair / "target"), "wherever it lies"
    weights = folder / "model.safetensors"
    assert weights.stat().st_size > 1 << 17
    for place in (9, weights.stat().st_size // 3, -1):
        change(weights, place)
        assert fingerprint_folder(folder) != before
        change(weights, place)
    assert fingerprint_folder(folder) == before


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
def test_settings_and_tokenizer_count(folder: Path, name: str) -> None:
    (folder / "merges.txt").write_text("a b\n")
    before = fingerprint_folder(folder)
    (folder / name).write_bytes((folder / name).read_bytes() + b"\n")
    assert fingerprint_folder(folder) != before


def test_a_calibration_changes_no_weight(folder: Path) -> None:
    before = fingerprint_folder(folder)
    (folder / "calibration.json").write_text("{}")
    assert fingerprint_folder(folder) == before


def test_a_converted_pair_is_known_by_its_tensors(
    folder: Path, converted: Path, tmp_path: Path
) -> None:
    """Orbax gives its files other names each time."""
    stores = [converted, tmp_path / "again", tmp_path / "other"]
    convert_pair(stores[1], folder)
    change(folder / "model.safetensors", -4)  # The least bit of a number.
    convert_pair(stores[2], folder)
    first, again, other = (fingerprint_folder(store / "target") for store in stores)
    assert first == again != other


def test_the_hubs_links_are_followed(folder: Path, tmp_path: Path) -> None:
    linked = tmp_path / "snapshot"
    linked.mkdir()
    for path in folder.iterdir():
        os.symlink(path, linked / path.name)
    assert fingerprint_folder(linked) == fingerprint_folder(folder)
