"""The check as its users see it; `tests/benchmarks/test_compilation.py` compiles."""

import dataclasses
import importlib.util
import os
from collections.abc import Iterator, Sequence

import jax
import pytest

from eagle_jax.benchmarks.compilation import ENVIRONMENT, Case, Report
from eagle_jax.cli import compile_report

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="the TPU compiler is missing; pip install '.[tpu-compile]' brings it",
)


REPORT = Report(
    program="prefill",
    memory=3 * 2**29,
    temporaries=2**29,
    aliased=0,
    state=0,
    lines=["  %r = f32[2] all-reduce(%x)", "  %g = f32[2] all-gather(%x)"],
    copies=[],
)
BAD = {
    "copies a cache: %c = copy(%x)": {"copies": ["%c = copy(%x)"]},
    "waits for the host: %h = u8[] outfeed(%x)": {"lines": ["%h = u8[] outfeed(%x)"]},
    "changes 0 of 8 bytes in place": {"state": 8},
}


def compiled(case: Case, only: Sequence[str]) -> Iterator[Report]:
    """Refuses training steps, whatever the case."""
    (program,) = only
    if program == "training step, eagle2":
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 33 of 32 GiB\n...")
    yield dataclasses.replace(REPORT, program=program)


@pytest.mark.parametrize("problem", BAD)
def test_what_a_program_must_not_do_is_a_problem(problem: str) -> None:
    assert dataclasses.replace(REPORT, **BAD[problem]).problems == [problem]
    assert REPORT.problems == []


def test_what_a_program_takes_is_a_line_and_one_that_does_not_fit_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compile_report, "compile_case", compiled)
    for name in ("JAX_PLATFORMS", "JAX_ENABLE_COMPILATION_CACHE", *ENVIRONMENT):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    flags = ["--only", "Mixtral", "--layers", "3", "--programs"]
    assert compile_report.main([*flags, "prefill"]) == 0
    line = (
        "Mixtral-8x7B (3 layers) v6e:2x2 data=1,tensor=4 rows=1: prefill | 0 copies of "
        "caches | 0 host calls | 0 open loops | 1 all-gather, 1 all-reduce | 1.50 GiB "
        "per chip, 0.50 of them temporary\n"
    )
    assert capsys.readouterr().out == line
    assert compile_report.main([*flags, "training step, eagle2", "prefill"]) == 1
    printed = capsys.readouterr()
    assert "eagle2: the compiler refuses it: RESOURCE_EXHAUSTED: 33" in printed.err
    assert printed.out == line
