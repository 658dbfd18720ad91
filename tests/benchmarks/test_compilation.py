"""Generation and training through the real TPU compiler; no TPU is needed."""

import dataclasses
import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies

from eagle_jax.benchmarks.compilation import (
    ENVIRONMENT,
    PROGRAMS,
    STEPS,
    Case,
    Report,
    compile_case,
)
from eagle_jax.config import TreeConfig
from eagle_jax.heads.eagle3 import Eagle3Settings
from eagle_jax.heads.eagle3.loss import Eagle3Loss
from eagle_jax.models import cache as kv
from eagle_jax.parallel import MeshShape, make_mesh
from eagle_jax.testing.programs import count_collectives
from eagle_jax.training.config import TrainConfig
from tests import tiny
from tests.instructions import moved_bytes, random_words

pytestmark = [
    pytest.mark.usefixtures("optimised"),
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="the TPU compiler is missing; pip install '.[tpu-compile]' brings it",
    ),
]

# Small: the compiler's time is what this costs. But the vocabulary is what most shows.
_VOCABULARY = 32768
_SIZES = {
    "vocab_size": _VOCABULARY,
    **{"hidden_size": 256, "intermediate_size": 512},
    **{"num_heads": 4, "num_kv_heads": 4, "head_dim": 128},
}
_CASE = Case(
    name="small",
    target=tiny.target_config(num_layers=3, max_positions=8192, **_SIZES),
    topology="v5e:2x2",
    mesh=MeshShape(tensor=4),
    tree=TreeConfig(num_nodes=8, depth=2, width=4),
    prompt_length=64,
    row_length=64,
)


# Steps of other heads are those of an EAGLE-3 head with less.
_PROGRAMS = (*PROGRAMS[:4], "training step, eagle3")


@pytest.fixture(scope="module", autouse=True)
def no_metadata() -> Iterator[None]:
    """Nothing asks for a TPU's metadata: the compiler alone is needed."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, os.environ.get(name, value))
        # What is compiled for a chip that is not there cannot be read back.
        name = "jax_persistent_cache_min_compile_time_secs"
        before = getattr(jax.config, name)
        jax.config.update(name, 1e9)
        yield
        jax.config.update(name, before)


@pytest.fixture(scope="module")
def reports() -> dict[str, Report]:
    with pytest.MonkeyPatch.context() as patch:
        few = TrainConfig(head=Eagle3Settings(), loss=Eagle3Loss(alignment=2))
        # Levels are alike, and take long.
        patch.setitem(STEPS, "training step, eagle3", few)
        return {report.program: report for report in compile_case(_CASE, _PROGRAMS)}


def most_collectives(case: Case, program: str) -> int:
    """How many collectives a loop needs at most where each row's work is split.

    `docs/compile.md` derives the rule. A round runs the target once and the head `D`
    times, and takes one more argmax per node that it accepts; noise needs none.
    """
    lookup, argmax, total = 1, 2, 1
    filters = 5 if program == "sampled round" else 0
    target = lookup + 2 * case.target.num_layers + argmax + filters
    if filters:
        target += argmax + lookup
    head = lookup + 2 + argmax + total + filters
    return target + (0 if program == "token" else head * case.tree.levels)


def test_the_programs_fit_and_copy_no_cache(reports: dict[str, Report]) -> None:
    """The compiler refuses what does not fit."""
    assert tuple(reports) == _PROGRAMS
    for report in reports.values():
        assert report.problems == []


def test_a_layer_needs_two_all_reduces(reports: dict[str, Report]) -> None:
    """And the tables, split over the vocabulary, a few more per call."""
    deeper = dataclasses.replace(
        _CASE, target=dataclasses.replace(_CASE.target, num_layers=4)
    )
    for more in compile_case(deeper, ("round", "token")):
        pair = (reports[more.program], more)
        before, after = (count_collectives(report.lines) for report in pair)
        assert after["all-reduce"] - before["all-reduce"] == 2
        assert {**after, "all-reduce": 0} == {**before, "all-reduce": 0}
        assert sum(after.values()) <= most_collectives(deeper, more.program)


@pytest.mark.parametrize("program", _PROGRAMS[4:])
def test_training_moves_nothing_but_sums(
    reports: dict[str, Report], program: str
) -> None:
    assert count_collectives(reports[program].lines).keys() == {"all-reduce"}


def test_no_loop_moves_a_vocabulary_of_logits(reports: dict[str, Report]) -> None:
    """The most likely tokens are found where the parts of the vocabulary lie."""
    token, drafted, sampled = (
        moved_bytes(reports[loop].lines) for loop in ("token", "round", "sampled round")
    )
    assert 0 < token < drafted < 4 * _VOCABULARY  # One row of logits.
    assert 0 < sampled < 4 * _VOCABULARY


def test_each_device_makes_its_own_part_of_the_noise(
    reports: dict[str, Report],
) -> None:
    """It needs no collective; the filters do, and stay within the rule."""
    sampled = reports["sampled round"].lines
    positions = _CASE.tree.levels + 1
    assert random_words(sampled) == positions * _VOCABULARY // _CASE.mesh.tensor
    assert random_words(reports["round"].lines) == 0
    most = most_collectives(_CASE, "sampled round")
    assert sum(count_collectives(sampled).values()) <= most


@pytest.mark.parametrize(
    ("topology", "shape"),
    [
        ("v5e:2x2", MeshShape(data=2, tensor=2)),
        ("v6e:4x4", MeshShape(tensor=16)),
        ("v6e:4x4", MeshShape(data=2, tensor=8)),
        ("v5p:2x2x2", MeshShape(tensor=8)),
    ],
    ids=str,
)
def test_every_topology_holds_the_mesh(topology: str, shape: MeshShape) -> None:
    """Also where key/value heads are fewer than chips and cut across its axes."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    mesh = make_mesh(shape, _CASE.target.layer.num_kv_heads, devices.devices)
    kv = min(_CASE.target.layer.num_kv_heads, shape.tensor)
    assert mesh.devices.shape == (shape.data, kv, shape.tensor // kv)
    assert len(set(mesh.devices.flat)) == shape.num_devices


_COMMIT = kv.commit


def _broken_commit(
    cache: kv.KVCache, entries: Any, path: jax.Array, count: jax.Array
) -> kv.KVCache:
    """Tells the host how much is written, and picks all slots from the whole cache."""
    jax.debug.callback(lambda _: None, count)
    after = _COMMIT(cache, entries, path, count)
    num_slots = cache.layers[0].keys.shape[2]
    order = (jnp.arange(num_slots) + count[0]) % num_slots
    layers = jax.tree.map(lambda slots: jnp.take(slots, order, axis=2), after.layers)
    return dataclasses.replace(after, layers=layers)


def test_a_broken_commit_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one chip: what each device of a mesh runs has no way to call the host."""
    monkeypatch.setattr(kv, "commit", _broken_commit)
    jax.clear_caches()
    alone = dataclasses.replace(_CASE, topology="v5e:1x1", mesh=MeshShape())
    (report,) = compile_case(alone, ("round",))
    found = report.problems
    assert any(problem.startswith("copies a cache") for problem in found)
    assert any(problem.startswith("waits for the host") for problem in found)
    jax.clear_caches()
