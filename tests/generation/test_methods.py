"""Which calibration, and which static tree, a drafter takes."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from eagle_jax.config import Method, TreeConfig
from eagle_jax.decoding.speculative import AcceptanceRule
from eagle_jax.drafting import Calibration, Confidence, LookupDrafter, RecyclingDrafter
from eagle_jax.drafting.calibration import UNCALIBRATED
from eagle_jax.generation.methods import (
    switch_drafter,
    tree_drafter,
    weightless_drafter,
)
from eagle_jax.tree import EAGLE1_TREE, RECYCLING_TREE, Topology
from tests.drafting.toy_model import ToyModel
from tests.helpers import refused

MODEL = ToyModel(vocab_size=24, sharpness=1.0, seed=0)
OWN = Confidence(kappa=2.0, exponents=((0.5,), (0.25,)))
OTHER = Confidence(kappa=3.0, exponents=((4.0,), (2.0,)))


def part(confidence: Confidence) -> dict[str, Any]:
    return dataclasses.asdict(confidence)


@pytest.fixture
def head(tmp_path: Path) -> Path:
    """The folder of a head with a calibration, of both kinds of text."""
    content = {"vocab_size": 24, "greedy": part(OWN), "sampled": part(OWN)}
    (tmp_path / "calibration.json").write_text(json.dumps(content))
    return tmp_path


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A calibration elsewhere, of sampled text alone."""
    path = tmp_path / "other.json"
    path.write_text(json.dumps({"vocab_size": 24, "sampled": part(OTHER)}))
    return path


def chosen(folder: Path | None, rule: AcceptanceRule = "coupled", **tree: Any) -> Any:
    sizes: dict[str, Any] = {"num_nodes": 6, "depth": 2, "width": 3}
    config = TreeConfig(**(sizes | tree))
    drafter = tree_drafter("eagle2", MODEL, config, rule=rule, folder=folder)
    return drafter.calibration


@pytest.mark.parametrize("rule", ["greedy", "coupled", "rejection"])
def test_a_heads_own_calibration_is_used_unasked(
    head: Path, rule: AcceptanceRule
) -> None:
    assert chosen(head, rule) == Calibration(greedy=OWN, sampled=OWN)
    assert chosen(head.parent, rule) == chosen(None, rule) == UNCALIBRATED


def test_what_is_given_goes_before_the_heads_own(head: Path, other: Path) -> None:
    assert chosen(head, calibration=str(other)).sampled == OTHER
    assert chosen(head, calibration="none") == UNCALIBRATED
    plain = UNCALIBRATED.sampled
    factors: list[dict[str, Any]] = [{"kappa": 0.5}, {"sharpness": 2.0}]
    factors.append(factors[0] | factors[1])
    for given in factors:
        expected = Calibration(sampled=dataclasses.replace(plain, **given))
        assert chosen(head, **given) == expected


@pytest.mark.parametrize(
    ("changed", "tree"),
    [
        ({"vocab_size": 25}, {}),
        ({}, {"depth": 3}),
        ({"sampled": None}, {}),
        ({"sampled": {"kappa": -1, "sharpness": 1, "exponents": [[1], [1]]}}, {}),
    ],
    ids=["vocabulary", "depth", "broken", "kappa"],
)
def test_an_own_calibration_that_does_not_fit_is_left_out_aloud(
    head: Path,
    changed: dict[str, Any],
    tree: dict[str, Any],
) -> None:
    path = head / "calibration.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with pytest.warns(UserWarning, match=f"not calibrated: .*{path}"):
        assert chosen(head, **tree) == UNCALIBRATED
    # Asked for, it is refused.
    refused(lambda: chosen(head, calibration=str(path), **tree), str(path))


def test_a_calibration_of_the_other_kind_of_text_is_refused(other: Path) -> None:
    refused(lambda: chosen(None, "greedy", calibration=str(other)), "greedy text")
    refused(lambda: chosen(None, "rejection", calibration=str(other)), "greedy text")
    refused(lambda: chosen(None, calibration="none.json"), "cannot read none.json")


def test_noise_is_shared_unless_it_is_forbidden() -> None:
    methods: tuple[Method, ...] = ("eagle2", "eagle1", "chain", "small-model")
    for method in methods:
        for shared in (True, False):
            tree = TreeConfig(shared_noise=shared)
            assert tree_drafter(method, MODEL, tree).shares_noise == shared


@pytest.mark.parametrize(
    ("choices", "tree"), [(None, RECYCLING_TREE), ("eagle1_25", EAGLE1_TREE)]
)
def test_recycling_fills_its_own_tree_or_the_one_that_is_named(
    choices: str | None, tree: Topology
) -> None:
    drafter = weightless_drafter("recycling", TreeConfig(choices=choices), 24)
    assert drafter == RecyclingDrafter(vocab_size=24, tree=tree)


@pytest.mark.parametrize("longest", [1, 64])
def test_lookup_seeks_matches_as_long_as_told(longest: int) -> None:
    chain = TreeConfig(num_nodes=5, depth=4, width=1, max_ngram=longest)
    drafter = weightless_drafter("lookup", chain, 24)
    assert drafter == LookupDrafter(depth=4, num_matches=1, max_ngram=longest)


@pytest.mark.parametrize(
    ("num_nodes", "min_match", "copied", "longest"),
    [(2, 1, 1, 16), (10, 5, 9, 16), (60, 20, 16, 20)],
)
def test_the_switch_copies_no_more_than_a_verification_holds(
    num_nodes: int, min_match: int, copied: int, longest: int
) -> None:
    tree = TreeConfig(num_nodes=num_nodes, depth=2, width=2, min_match=min_match)
    drafter = switch_drafter(MODEL, tree)
    assert (drafter.num_nodes, drafter.first.depth) == (num_nodes, copied)
    assert (drafter.first.max_ngram, drafter.min_match) == (longest, min_match)
    assert drafter.second == tree_drafter("eagle2", MODEL, tree)
    deepest = dataclasses.replace(tree, depth=0)
    refused(lambda: switch_drafter(MODEL, deepest), "depth of the tree = 0")
