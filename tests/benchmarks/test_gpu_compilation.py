"""Llama-2-7B's loops through the compiler of an H100; no GPU is needed."""

import jax
import pytest

from eagle_jax.benchmarks.cases import CASES
from eagle_jax.benchmarks.compilation import GPU, compile_case, has_compiler
from eagle_jax.testing.programs import find_open_loops

pytestmark = [
    pytest.mark.usefixtures("optimised"),
    pytest.mark.skipif(
        not has_compiler("gpu-compile") or jax.config.values["jax_platforms"] != "cpu",
        reason="needs JAX_PLATFORMS=cpu and pip install '.[gpu-compile]'",
    ),
]


@pytest.mark.parametrize("layers", [1, 2])
def test_loops_change_their_caches_in_place_and_never_call_the_host(
    layers: int,
) -> None:
    (case,) = [case for case in CASES if case.topology == GPU]
    for report in compile_case(case.with_layers(layers), ("round", "token")):
        assert report.problems == []
        # The cache's blocks in each layer of the target; in a round also in the head's
        # layer, once over the accepted tokens and once per level below them, and the
        # walk that accepts nodes.
        in_round = case.tree.levels + 1 if report.program == "round" else 0
        assert len(find_open_loops(report.lines)) <= layers + in_round
