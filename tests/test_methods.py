"""Which calibration, and which static tree, a drafter takes."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from eagle_jax.config import ChainConfig, StaticConfig, TreeConfig
from eagle_jax.decoding.speculative import AcceptanceRule
from eagle_jax.drafting import (
    Calibration,
    Confidence,
    LookupConfig,
    LookupDrafter,
    RecyclingConfig,
    RecyclingDrafter,
    SwitchConfig,
)
from eagle_jax.drafting.calibration import UNCALIBRATED
from eagle_jax.engine.config import PairConfig
from eagle_jax.methods import METHODS, Context, find_method
from eagle_jax.testing import ToyModel
from eagle_jax.tree import EAGLE1_TREE, RECYCLING_TREE, Topology
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


def made(method: str, settings: Any, **given: Any) -> Any:
    context = Context(
        vocab_size=24, encode=lambda text: [*map(ord, text)], model=MODEL, **given
    )
    return METHODS[method].drafter(settings, context)


def chosen(folder: Path | None, rule: AcceptanceRule = "coupled", **tree: Any) -> Any:
    sizes: dict[str, Any] = {"num_nodes": 6, "depth": 2, "width": 3}
    config = TreeConfig(**(sizes | tree))
    return made("eagle2", config, rule=rule, folder=folder).calibration


@pytest.mark.parametrize("rule", ["greedy", "coupled", "rejection"])
def test_a_heads_own_calibration_is_used_unasked(
    head: Path, rule: AcceptanceRule
) -> None:
    assert chosen(head, rule) == Calibration(greedy=OWN, sampled=OWN)
    assert chosen(head.parent, rule) == chosen(None, rule) == UNCALIBRATED


def test_what_is_given_goes_before_the_heads_own(head: Path, other: Path) -> None:
    assert chosen(head, calibration=str(other)).sampled == OTHER
    assert chosen(head, calibration="none") == UNCALIBRATED


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
    for method, kind in (
        ("eagle2", TreeConfig),
        ("eagle1", StaticConfig),
        ("chain", ChainConfig),
        ("small-model", TreeConfig),
    ):
        for shared in (True, False):
            assert made(method, kind(shared_noise=shared)).shares_noise == shared


@pytest.mark.parametrize(
    ("choices", "tree"), [(None, RECYCLING_TREE), ("eagle1_25", EAGLE1_TREE)]
)
def test_recycling_fills_its_own_tree_or_the_one_that_is_named(
    choices: str | None, tree: Topology
) -> None:
    drafter = made("recycling", RecyclingConfig(choices=choices))
    assert drafter == RecyclingDrafter(vocab_size=24, tree=tree)


@pytest.mark.parametrize("longest", [1, 64])
def test_lookup_seeks_matches_as_long_as_told(longest: int) -> None:
    chain = LookupConfig(num_nodes=5, depth=4, width=1, max_ngram=longest)
    drafter = made("lookup", chain)
    assert drafter == LookupDrafter(depth=4, num_matches=1, max_ngram=longest)


@pytest.mark.parametrize(
    ("num_nodes", "min_match", "copied", "longest"),
    [(2, 1, 1, 16), (10, 5, 9, 16), (60, 20, 16, 20)],
)
def test_the_switch_copies_no_more_than_a_verification_holds(
    num_nodes: int, min_match: int, copied: int, longest: int
) -> None:
    tree = SwitchConfig(num_nodes=num_nodes, depth=2, width=2, min_match=min_match)
    drafter = made("eagle2+lookup", tree)
    assert (drafter.num_nodes, drafter.first.depth) == (num_nodes, copied)
    assert (drafter.first.max_ngram, drafter.min_match) == (longest, min_match)
    assert drafter.second == made("eagle2", tree.shape)
    deepest = dataclasses.replace(tree, depth=0)
    refused(lambda: made("eagle2+lookup", deepest), "depth of the tree = 0")


def test_no_method_has_settings_of_another() -> None:
    for name, method in METHODS.items():
        assert method.name == name
        assert not (method.trials and method.is_plain)
        assert all(type(settings) is method.settings for settings in method.trials)
    refused(lambda: find_method("eagle3"), "'eagle3' is no method; known are")


def test_another_method_keeps_the_settings_that_it_reads() -> None:
    tree = TreeConfig(num_nodes=8, depth=7, width=1, calibration="none")
    config = PairConfig(tree=tree)
    assert config.with_method("chain").tree == ChainConfig(depth=7)
    lookup = LookupConfig(num_nodes=8, depth=7, width=1)
    assert config.with_method("lookup").tree == lookup
    assert config.with_method("eagle2") == config
    refused(lambda: PairConfig(tree=lookup), "LookupConfig is not of method eagle2")


def test_a_files_tree_is_of_the_method_that_it_names() -> None:
    def read(table: dict[str, Any], method: str | None = None) -> PairConfig:
        return PairConfig.from_table(table, "a.toml", method)

    assert read({"tree": {"depth": 2}}).tree == TreeConfig(depth=2)
    named = {"pair": {"method": "chain"}, "tree": {"depth": 2}}
    assert read(named, "lookup").tree == ChainConfig(depth=2)
    # Where it names none, it is of the one that is asked for, if that has its keys.
    assert read({"tree": {"depth": 2}}, "chain").tree == ChainConfig(depth=2)
    assert read({"tree": {"num_nodes": 2}}, "chain").tree == TreeConfig(num_nodes=2)
    refused(lambda: read(named | {"tree": {"width": 2}}), "unknown key 'width'")
    refused(lambda: read({"pair": {"method": "x"}}), "a.toml", "'x' is no method")
