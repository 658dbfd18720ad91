"""The suite for GPUs, small and on a CPU."""

import dataclasses
import json

from eagle_jax.benchmarks.suite import CASES, run_suite
from tests import tiny


def test_every_kind_of_case_has_its_times_and_texts_are_compared() -> None:
    chain = dataclasses.replace(CASES[1], slots=520)
    sampled = dataclasses.replace(
        chain, temperature=1.0, rows=2, draft_quantization="int8", vocabulary=64
    )
    kinds = (chain, sampled)
    sizes = tiny.target_config(vocab_size=300, max_positions=600)
    *found, texts = run_suite(sizes, kinds, iterations=2)
    for case, result in zip(kinds, found, strict=True):
        assert json.loads(json.dumps(result))["rows"] == case.rows
        assert result["round / token"] == result["round"] / result["token"]
        assert min(result["token"], result["round"], result["drafts"]) > 0
    assert texts == {"texts": 6, "as the CPU's": 6}
