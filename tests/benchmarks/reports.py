"""Reports on programs that nothing compiled."""

import dataclasses
from typing import Any

from eagle_jax.benchmarks.compilation import Report


def a_report(program: str, **changes: Any) -> Report:
    """Returns a report with some figures, but for those that are given."""
    report = Report(
        program=program,
        seconds=0,
        arguments=2**30,
        temporaries=2**29,
        results=0,
        aliased=2**28,
        state=2**28,
        copies=[],
        host_calls=[],
        collectives={},
        moved=0,
        flops=2e9,
        traffic=10**9,
        random_words=0,
        most_collectives=None,
    )
    return dataclasses.replace(report, **changes)
