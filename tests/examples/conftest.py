"""A small target, trained from scratch on a small library."""

from pathlib import Path

import pytest

from examples.embedded_pair import pretrain as command
from tests.conftest import Main

CONFIG = """
[model]
vocab_size = 300
hidden_size = 16
intermediate_size = 24
num_layers = 2
num_heads = 2
max_positions = 64

[run]
steps = 4
batch_size = 8
row_length = 16
eval_every = 2
eval_rows = 2
"""


@pytest.fixture(scope="session")
def pretrain() -> Main:
    return command.main


@pytest.fixture(scope="session")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("library")
    body = "".join(f"def function_{i}(x):\n    return x + {i}\n\n\n" for i in range(40))
    for name in ("heapq", "one", "two", "test_heapq"):
        (folder / f"{name}.py").write_text(f'"""{name}."""\n\n\n{body}')
    (folder / "config.toml").write_text(CONFIG)
    return ["--library", str(folder), "--config", f"{folder}/config.toml"]


@pytest.fixture(scope="session")
def run(
    pretrain: Main, flags: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    output = tmp_path_factory.mktemp("runs") / "run"
    assert pretrain([*flags, "--output", str(output)]) == 0
    return output
