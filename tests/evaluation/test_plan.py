"""The runs of an evaluation."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from eagle_jax.config import TreeConfig
from eagle_jax.drafting import LookupDrafter, SwitchDrafter, TreeDrafter
from eagle_jax.engine.config import PairConfig
from eagle_jax.evaluation.plan import (
    EvaluationConfig,
    make_runs,
    parse_method,
    run_settings,
)
from eagle_jax.methods import METHODS, WEIGHTS, Context, Weights
from eagle_jax.testing import ToyModel
from tests.helpers import refused

CONFIG = PairConfig()
MODEL = ToyModel(vocab_size=24, sharpness=1.0, seed=0)


def names(*methods: str, temperatures: tuple[float, ...]) -> list[str]:
    parsed = [parse_method(text, CONFIG) for text in methods]
    return [run.model_id for run in make_runs(parsed, temperatures, [1])]


def test_a_run_is_named_as_its_method_was_given() -> None:
    methods = {
        "medusa": "medusa",
        "hydra:choices=runs/mine.json": "hydra-choices=runs-mine.json",
        "lookup:depth=3,width=2": "lookup-depth=3-width=2",
        "eagle2+lookup:min_match=9": "eagle2+lookup-min_match=9",
    }
    wanted = [f"{name}-t0-b1" for name in methods.values()]
    assert names(*methods, temperatures=(0.0,)) == wanted
    temperatures = (0.1234567, 0.1234568, 1.0, 1e-7, 0.5)
    wanted = ["0.1234567", "0.1234568", "1", "1e-07", "0.5"]
    assert names("chain", temperatures=temperatures) == [
        f"chain-t{temperature}-b1" for temperature in wanted
    ]


def settings(text: str, temperature: float = 0.0) -> dict[str, Any]:
    """What is on record of a run, but for its label."""
    (plan,) = make_runs([parse_method(text, CONFIG)], [temperature], [1])
    context = Context(
        encode=lambda _: [], vocab_size=24, rule=plan.config.rule, model=MODEL
    )
    drafter = plan.config.method_row.drafter(plan.config.tree, context)
    return run_settings(plan, drafter) | {"label": None}


@pytest.mark.parametrize("weights", WEIGHTS, ids=lambda weights: weights.option)
def test_methods_draft_with_the_weights_of_their_kind(
    weights: Weights, tmp_path: Path
) -> None:
    given = EvaluationConfig(target="T", drafts={weights.option: "W"}, output=tmp_path)
    for method in METHODS.values():
        if method.weights == weights:
            assert given.draft_of(method) == "W"
        elif method.weights is None:
            assert given.draft_of(method) is None
        else:
            option = method.weights.option
            refused(partial(given.draft_of, method), f"needs `{option}`")


def test_settings_of_noise_are_none_where_no_noise_is_shared() -> None:
    """Runs of the same settings are decoded once."""
    for method in ("eagle2", "eagle1", "chain"):
        alone = f"{method}:shared_noise=false"
        assert settings(method) == settings(alone)
        assert settings(method, 1.0) != settings(alone, 1.0)


def test_draft_vocabularies_are_runs_of_their_own() -> None:
    flag = PairConfig(draft_vocabulary="none")
    (run,) = make_runs(
        [parse_method("eagle1:draft_vocabulary=9@a.txt", flag)], [0.0], [1]
    )
    assert run_settings(run, None)["draft_vocabulary"] == "9@a.txt"


@pytest.mark.parametrize(
    ("method", "named"),
    [
        ("eagle3", "'eagle3' is no method; known are autoregressive"),
        ("eagle2:nodes=3", "'nodes=3' is not known; give key=value"),
        ("eagle2:depth", "'depth' is not known; give key=value"),
        ("eagle1:depth=3", "give key=value with choices, shared_noise"),
        ("autoregressive:depth=3", "give no settings"),
        ("chain:depth=1.5", "depth = 1.5 must be int"),
        ("chain:depth=-1", "depth = -1 must be 0 or more"),
        ("eagle2:rerank=1", "rerank = 1 must be bool"),
        ("chain:acceptance=typicle", "must be one of 'coupled'"),
    ],
)
def test_a_method_that_cannot_be_read_is_refused(method: str, named: str) -> None:
    refused(lambda: parse_method(method, CONFIG), f"`methods` {method}", named)


def test_a_record_has_the_settings_of_its_own_method_alone() -> None:
    eagle2, lookup = settings("eagle2:num_nodes=6"), settings("lookup")
    sizes = [(s["num_nodes"], s["depth"]) for s in (eagle2, lookup)]
    assert sizes == [(6, 5), (55, 6)]
    assert lookup["max_ngram"] == 3 and "max_ngram" not in eagle2
    assert "rank_by" in eagle2 and "rank_by" not in lookup


@pytest.mark.parametrize("depth", [1, 4, 20])
def test_a_record_of_the_switch_has_the_size_of_its_tree(depth: int) -> None:
    tree = TreeConfig(num_nodes=9, depth=depth, width=2)
    second = TreeDrafter(model=MODEL, tree=tree)
    switch = SwitchDrafter(first=LookupDrafter(depth=12, max_ngram=8), second=second)
    plan = parse_method("eagle2+lookup", PairConfig(tree=tree))
    found = run_settings(plan, switch)
    sizes = [found[name] for name in ("num_nodes", "depth", "width", "min_match")]
    assert sizes == [9, min(depth, 8), 2, 5]


def test_runs_that_cannot_be_made_are_refused() -> None:
    same = [parse_method(f"eagle2:calibration={name}", CONFIG) for name in ("/", ":")]
    refused(lambda: make_runs(same, [0.0], [1]), "would both be written to")
    refused(lambda: make_runs(same[:1], [-1.0], [1]), "temperature = -1.0 must be")
    refused(lambda: make_runs(same[:1], [0.0], [0]), "batch_size = 0 must be at least")
