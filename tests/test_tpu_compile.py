"""The whole generation through the real TPU compiler; no TPU is needed."""

import dataclasses
import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from eagle_jax.config import TreeConfig
from eagle_jax.evaluation.compilation import HBM_GIB, Case, Report, compile_case
from eagle_jax.models import cache as kv
from eagle_jax.models.eagle_head import EagleHeadConfig
from eagle_jax.models.transformer import TransformerConfig
from eagle_jax.parallel import MeshShape
from tests.helpers import SMALL_LAYER

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="the TPU compiler is missing; pip install '.[tpu]' brings it",
)

# Small: the compiler's time is what this costs.
_LAYER = dataclasses.replace(
    SMALL_LAYER,
    hidden_size=512,
    intermediate_size=1024,
    num_heads=8,
    num_kv_heads=4,
    head_dim=128,
)
_CASE = Case(
    name="small",
    target=TransformerConfig(
        layer=_LAYER, num_layers=2, vocab_size=8192, max_positions=8192
    ),
    head=EagleHeadConfig(layer=_LAYER, vocab_size=8192, max_positions=2048),
    topology="v5e:2x2",
    mesh=MeshShape(tensor=4),
    tree=TreeConfig(num_nodes=16, depth=3, width=4),
)


@pytest.fixture(scope="module", autouse=True)
def no_metadata() -> Iterator[None]:
    """Nothing asks for a TPU's metadata: the compiler alone is needed."""
    settings = {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_WORKER_HOSTNAMES": "localhost",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, os.environ.get(name, value))
        yield


@pytest.fixture(scope="module")
def reports() -> dict[str, Report]:
    return {report.program: report for report in compile_case(_CASE)}


def problems(report: Report) -> list[str]:
    """What a program must not do, in words."""
    found = [f"copies a cache: {line}" for line in report.copies]
    found += [f"waits for the host: {line}" for line in report.host_calls]
    if report.program != "prefill" and report.aliased < report.caches:
        found.append(f"aliases {report.aliased} of {report.caches} bytes of caches")
    return found


def test_the_programs_fit_and_copy_no_cache(reports: dict[str, Report]) -> None:
    assert reports.keys() == {"prefill", "round", "token"}
    hbm = HBM_GIB["v5e"] * 2**30
    for report in reports.values():
        assert problems(report) == []
        assert report.arguments + report.temporaries < hbm


def test_a_layer_needs_two_all_reduces(reports: dict[str, Report]) -> None:
    """And the tables, split over the vocabulary, a few more per call."""
    deeper = dataclasses.replace(
        _CASE, target=dataclasses.replace(_CASE.target, num_layers=3)
    )
    more = {report.program: report for report in compile_case(deeper)}
    for program in ("round", "token"):
        before, after = reports[program].collectives, more[program].collectives
        assert after["all-reduce"] - before["all-reduce"] == 2
        assert {**after, "all-reduce": 0} == {**before, "all-reduce": 0}


def _gathering_commit(
    cache: kv.KVCache, entries: Any, path: jax.Array, count: jax.Array
) -> kv.KVCache:
    """Appends, then picks the wanted slots from the whole cache."""

    def write(slots: jax.Array, new: jax.Array) -> jax.Array:
        picked = jnp.take_along_axis(new, path[:, None, :, None], axis=2)
        order = jnp.arange(slots.shape[2])[None] - cache.length[:, None]
        is_new = (order >= 0) & (order < path.shape[1])
        from_new = jnp.take_along_axis(
            picked, jnp.clip(order, 0, path.shape[1] - 1)[:, None, :, None], axis=2
        )
        return jnp.where(is_new[:, None, :, None], from_new, slots[..., ::-1, :])

    layers = jax.tree.map(write, cache.layers, entries)
    return dataclasses.replace(cache, layers=layers, length=cache.length + count)


def test_a_commit_that_gathers_from_the_cache_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv, "commit", _gathering_commit)
    jax.clear_caches()
    reports = {report.program: report for report in compile_case(_CASE)}
    assert problems(reports["round"]) != []
    jax.clear_caches()
