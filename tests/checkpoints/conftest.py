"""What the tests of checkpoints share."""

import shutil
from pathlib import Path

import pytest

from eagle_jax.checkpoints import load_target
from eagle_jax.models.transformer import TransformerParams


@pytest.fixture
def target(tiny_pair: Path, tmp_path: Path) -> Path:
    """A copy of the tiny target to change at will."""
    return Path(shutil.copytree(tiny_pair / "target", tmp_path / "target"))


@pytest.fixture
def head(tiny_pair: Path, tmp_path: Path) -> Path:
    """A copy of the tiny head to change at will."""
    return Path(shutil.copytree(tiny_pair / "head", tmp_path / "head"))


@pytest.fixture(scope="module")
def expected(tiny_pair: Path) -> TransformerParams:
    """The tiny target's weights, as the single safetensors file gives them."""
    return load_target(tiny_pair / "target")[1]
