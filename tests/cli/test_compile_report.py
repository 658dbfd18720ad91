"""The check as its users see it; `tests/benchmarks/test_compilation.py` compiles."""

import importlib.util
import os
from collections.abc import Iterator, Sequence

import jax
import pytest

from eagle_jax.benchmarks.compilation import ENVIRONMENT, Case, Report
from eagle_jax.cli import compile_report
from tests.conftest import Main

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="the TPU compiler is missing; pip install '.[tpu-compile]' brings it",
)


def compiled(case: Case, only: Sequence[str]) -> Iterator[Report]:
    """Refuses training steps; of all else, only "prefill" does what it should."""
    for program in only:
        if program == "training step, eagle2":
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 33 of 32 GiB\n...")
        lines = ["  %r = f32[2] all-reduce(%x)", "  %g = f32[2] all-gather(%x)"]
        lines += ["  %h = u8[] outfeed(%x)"] * (program == "sampled round")
        yield Report(
            program=program,
            memory=3 * 2**29,
            temporaries=2**29,
            aliased=0,
            state=8 if program == "token" else 0,
            lines=lines,
            copies=["%c = copy(%x)"] if program == "round" else [],
        )


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Main:
    monkeypatch.setattr(compile_report, "compile_case", compiled)
    for name in ("JAX_PLATFORMS", "JAX_ENABLE_COMPILATION_CACHE", *ENVIRONMENT):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    return compile_report.main


def test_what_a_program_takes_stands_in_one_line(
    main: Main, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--only", "Mixtral", "--layers", "3", "--programs", "prefill"]
    assert main(flags) == 0
    assert capsys.readouterr().out == (
        "Mixtral-8x7B (3 layers) v6e:2x2 data=1,tensor=4 rows=1: prefill | 0 copies of "
        "caches | 0 host calls | 0 open loops | 1 all-gather, 1 all-reduce | 1.50 GiB "
        "per chip, 0.50 of them temporary\n"
    )


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("round", "round: copies a cache: %c = copy(%x)"),
        ("sampled round", "sampled round: waits for the host: %h = u8[] outfeed(%x)"),
        ("token", "token: changes 0 of 8 bytes in place"),
        ("training step, eagle2", "the compiler refuses it: RESOURCE_EXHAUSTED: 33"),
    ],
)
def test_a_program_that_does_what_it_must_not_fails_and_the_rest_goes_on(
    main: Main, capsys: pytest.CaptureFixture[str], program: str, said: str
) -> None:
    assert main(["--only", "Mixtral", "--programs", program, "prefill"]) == 1
    printed = capsys.readouterr()
    assert said in printed.err
    assert "rows=1: prefill | " in printed.out
