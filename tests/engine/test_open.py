"""Pairs from folders: what is refused before any weight is read."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest

from eagle_jax import assets
from eagle_jax.checkpoints import draft_files
from eagle_jax.config import TreeConfig
from eagle_jax.engine import Pair
from eagle_jax.engine.open import open_pair
from eagle_jax.methods import find_method
from eagle_jax.parallel import MeshShape, shard_pair
from tests.helpers import refused, settings_of

TREE = TreeConfig(num_nodes=4, depth=2, width=2)


@pytest.fixture
def pair(tiny_pair: Path, tmp_path: Path) -> Path:
    """A copy of the tiny pair to break."""
    return Path(shutil.copytree(tiny_pair, tmp_path / "pair"))


def opened(pair: Path, draft: str = "head", **settings: Any) -> Pair:
    names = (str(pair / "target"), str(pair / draft))
    return open_pair(*names, settings_of(TREE, **settings))


@pytest.mark.parametrize("half", ["target", "head"])
def test_truncated_weights_are_refused_when_a_pair_is_opened(
    pair: Path, half: str
) -> None:
    path = pair / half / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    refused(lambda: opened(pair), str(path), "no complete safetensors file")


def test_a_small_model_with_other_tokens_is_refused(pair: Path) -> None:
    shutil.rmtree(pair / "head")
    (pair / "head").symlink_to(assets.SMALL)
    named = "the small model has 2048 tokens"
    refused(lambda: opened(pair, method="small-model"), named)


@pytest.mark.parametrize("method", ["eagle2", "eagle2+lookup"])
def test_a_target_with_too_few_layers_for_an_eagle3_head_is_refused(
    tiny_pair: Path, eagle3_pair: Path, method: str
) -> None:
    names = (str(tiny_pair / "target"), str(eagle3_pair / "head"))
    refused(
        lambda: open_pair(*names, settings_of(TREE, method=method)).load(),
        "1 layers",
        "at least 7",
    )


def test_a_calibration_is_read_once_however_many_calls_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read, seen = draft_files.read_json, list[Path]()
    monkeypatch.setattr(
        draft_files, "read_json", lambda path: seen.append(path) or read(path)
    )
    names = str(assets.TARGET), str(assets.HEAD)
    pair = open_pair(*names, settings_of(TREE))
    config = pair.config.with_(tree=TREE)

    def again() -> Pair:
        return dataclasses.replace(pair, config=config)

    made = [again().drafter_for("greedy") for _ in range(3)]
    count = len(seen)
    assert count and made[0] is made[2]
    for _ in range(2):  # Sampled text asks for another part of it.
        again().drafter_for("coupled")
    assert len(seen) == count + 1


def test_weights_are_read_once_for_each_placement(tiny_pair: Path) -> None:
    names = str(tiny_pair / "target"), str(tiny_pair / "head")
    pair = open_pair(*names, settings_of(TREE))
    sampled = dataclasses.replace(pair, config=pair.config.with_(temperature=1.0))
    assert sampled.params is pair.params
    placement = shard_pair(MeshShape(), pair.sizes, batch_size=1)
    placed = dataclasses.replace(pair, placement=placement)
    assert pair.sharding is None and placed.sharding is not None


@pytest.mark.parametrize("method", ["eagle2", "eagle2+lookup", "chain", "small-model"])
def test_a_method_without_its_weights_is_refused(method: str) -> None:
    refused(
        lambda: find_method(method).check_draft(None), f"method {method} needs `draft`"
    )
    for plain in ("lookup", "recycling"):
        find_method(plain).check_draft(None)
