"""Llama-3-8B's loops through the compiler of an H100; no GPU is needed."""

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


@pytest.mark.parametrize(
    ("kind", "layers", "programs"),
    [
        ("eagle2", 1, ("sampled round",)),
        ("eagle2", 2, ("round", "token")),
        ("dspark", 3, ("sampled round",)),
    ],
)
def test_rounds_change_their_caches_in_place_and_never_wait_for_the_host(
    kind: str, layers: int, programs: tuple[str, ...]
) -> None:
    """But to learn whether any row asks for filters: once per level, and at the end."""
    (case,) = [case for case in CASES if (case.topology, case.kind) == (GPU, kind)]
    for report in compile_case(case.with_layers(layers), programs):
        assert report.problems == []
        assert find_open_loops(report.lines) == []
        conditionals = [line for line in report.lines if " conditional(" in line]
        is_sampled = report.program == "sampled round"
        assert len(conditionals) == (case.tree.levels + 1 if is_sampled else 0)


def test_a_round_of_sixty_nodes_starts_at_most_700_kernels() -> None:
    """Each costs a GPU a few microseconds, whatever it does; all layers cost alike."""
    (case,) = [case for case in CASES if (case.topology, case.kind) == (GPU, "eagle2")]
    few, more = (
        report.kernels
        for layers in (1, 3)
        for report in compile_case(case.with_layers(layers), ("round",))
    )
    assert more > few
    assert few + (case.target.num_layers - 1) * (more - few) / 2 <= 700
