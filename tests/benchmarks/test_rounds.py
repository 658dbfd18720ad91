"""Timing of rounds beside their bare model calls, and the random pairs for it."""

import json
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
    tiny_pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Too few slots for a prompt and its rounds become enough."""
    file = tmp_path / "rounds.json"
    pair = ["--target", f"{tiny_pair}/target", "--draft", f"{tiny_pair}/head"]
    methods = ["--methods", "lookup", "eagle2"]
    assert benchmark.main([*pair, *methods, *_SMALL.split(), "--json", str(file)]) == 0
    costs = json.loads(file.read_text())["methods"]
    rows = [line.split("│") for line in capsys.readouterr().out.splitlines()]
    shown = [row[1].strip() for row in rows if len(row) > len(FIGURES)]
    assert shown == list(costs) == ["autoregressive", "lookup", "eagle2"]
    assert [cost["num_nodes"] for cost in costs.values()] == [1, 5, 5]
    assert costs["autoregressive"]["figures"]["round / token"] == [1, 1]
    for method, cost in costs.items():
        figures = {name: max(times) for name, times in cost["figures"].items()}
        assert tuple(figures) == FIGURES
        # Only EAGLE's calls are more than the target's.
        alone = figures["bare calls"] == figures["bare verify"]
        assert alone == (method != "eagle2")
        assert min(figures["round"], figures["bare verify"]) > 0


@pytest.mark.parametrize(("method", "heads"), [("medusa", 5), ("hydra", 4)])
def test_random_heads_are_as_many_as_published_ones(method: str, heads: int) -> None:
    source = open_random(tiny.target_config(), settings_of(method=method))
    drafter: Any = source.drafter
    assert drafter.num_nodes == 64
    config = drafter.model.config
    assert config.num_heads == heads
    assert method == "medusa" or config.layer == source.config.layer
    assert source.load().params.drafter.head is not None
