"""What the tests of checkpoints share."""

from pathlib import Path

import pytest

from eagle_jax.checkpoints import convert_pair


@pytest.fixture(scope="session")
def converted(tiny_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny pair, converted; copy before changing."""
    output = tmp_path_factory.mktemp("converted") / "pair"
    convert_pair(output, tiny_pair / "target", tiny_pair / "head")
    return output
