"""Timing of rounds beside their bare model calls, and the random pairs for it."""

from pathlib import Path
from typing import Any

import pytest

from eagle_jax.benchmarks.random_pairs import open_random
from eagle_jax.benchmarks.rounds import FIGURES
from eagle_jax.cli import benchmark
from tests import tiny
from tests.helpers import settings_of

_SMALL = (
    "--num-nodes 5 --depth 2 --width 2 --prompt-length 4 --slots 1 --iterations 3 "
    "--repeats 2"
)


def test_every_method_is_a_row_below_plain_decoding(
    tiny_pair: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Too few slots for a prompt and its rounds become enough."""
    pair = ["--target", f"{tiny_pair}/target", "--draft", f"{tiny_pair}/head"]
    methods = ["--methods", "lookup", "eagle2"]
    assert benchmark.main([*pair, *methods, *_SMALL.split()]) == 0
    lines = [line.split("│") for line in capsys.readouterr().out.splitlines()]
    rows = [[cell.strip() for cell in line[1:-1]] for line in lines if len(line) > 2]
    names, nodes, *figures = zip(*rows, strict=True)
    assert names == ("autoregressive", "lookup", "eagle2")
    assert nodes == ("1", "5", "5")
    assert len(figures) == len(FIGURES) and figures[-1][0] == "1.00"
    assert min(float(figure) for column in figures for figure in column) > 0


@pytest.mark.parametrize(("method", "heads"), [("medusa", 5), ("hydra", 4)])
def test_random_heads_are_as_many_as_published_ones(method: str, heads: int) -> None:
    pair = open_random(tiny.target_config(), settings_of(method=method))
    drafter: Any = pair.drafter
    assert drafter.num_nodes == 64
    config = drafter.model.config
    assert config.num_heads == heads
    assert method == "medusa" or config.layer == pair.sizes.layer
    assert pair.params.drafter.head is not None
