"""The fit of confidences to what was accepted."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle_jax.checkpoints.draft_files import Kind, load_calibration
from eagle_jax.config import TreeConfig
from eagle_jax.drafting.calibration import UNCALIBRATED, Confidence
from eagle_jax.engine.config import PairConfig
from eagle_jax.engine.pair import Pair
from eagle_jax.engine.request import Request
from eagle_jax.evaluation import fit
from eagle_jax.evaluation.fit import (
    BOUNDS,
    MIN_TRIALS,
    Fit,
    describe,
    fit_exponent,
    fit_exponents,
    tokens_per_root,
)
from eagle_jax.evaluation.nodes import TRIED, VerifiedTree
from tests import tiny
from tests.helpers import refused

VOCABULARY = 24


def trials_from(**columns: Any) -> np.ndarray:
    trials = np.zeros(len(columns["depth"]), TRIED)
    for name, column in columns.items():
        trials[name] = column
    return trials


def draw(true: dict[tuple[int, int], float], count: int) -> np.ndarray:
    """Trials whose acceptance follows these exponents, `count` per depth and rank."""
    rng = np.random.default_rng(0)
    cells = np.repeat(list(true), count, axis=0)
    exponents = np.repeat(list(true.values()), count)
    logs = np.log(rng.uniform(0.02, 0.98, len(cells)))
    return trials_from(
        depth=cells[:, 0],
        rank=cells[:, 1],
        log_confidence=logs,
        is_accepted=rng.uniform(size=len(cells)) < np.exp(exponents * logs),
    )


def two_branches(
    first: float, second: float, accepted: int, deeper: float = 0.5
) -> VerifiedTree:
    """Two children of the root, each with a child of its own, and padding."""
    values = [1.0, first, second, first * deeper, second * deeper]
    return VerifiedTree(
        parents=np.array([-1, 0, 0, 1, 2, 0]),
        log_values=np.append(np.log(values), -np.inf),
        accepted=[[], [1], [2], [1, 3], [2, 4]][accepted],
    )


def overconfident(rounds: int) -> list[VerifiedTree]:
    """First children say 0.6 and are right once in four, second ones say 0.3."""
    rng = np.random.default_rng(1)
    fates = rng.choice(5, size=rounds, p=[0.15, 0.2, 0.25, 0.05, 0.35])
    return [two_branches(0.6, 0.3, fate) for fate in fates.tolist()]


def test_the_fit_has_the_greatest_likelihood() -> None:
    trials = draw({(1, 0): 1.7}, 300)
    found = fit_exponent(trials)

    def log_likelihood(exponent: float) -> float:
        logs = exponent * trials["log_confidence"]
        each = np.where(trials["is_accepted"], logs, np.log1p(-np.exp(logs)))
        return each.sum()

    near = [log_likelihood(found * factor) for factor in (0.99, 1.01)]
    assert log_likelihood(found) > max(near)


@pytest.mark.parametrize("confidence", [1.0, 0.5, 1e-30])
def test_certain_outcomes_stay_within_the_bounds(confidence: float) -> None:
    nothing = trials_from(depth=[1] * 5, log_confidence=np.log(confidence))
    everything = trials_from(depth=[1] * 5, log_confidence=np.log(confidence))
    everything["is_accepted"] = True
    assert fit_exponent(everything) == BOUNDS[0]
    assert BOUNDS[0] <= fit_exponent(nothing) <= BOUNDS[1]
    if confidence == 0.5:
        assert fit_exponent(nothing) == BOUNDS[1]


def test_every_cell_has_its_own_exponent() -> None:
    true = {(1, 0): 0.5, (1, 1): 2.0, (2, 0): 3.0, (2, 1): 1.0}
    trials = draw(true, 20000)
    table = fit_exponents(trials, depth=2)
    for (depth, rank), exponent in true.items():
        assert table[depth - 1][rank] == pytest.approx(exponent, rel=0.1)


def test_cells_with_few_trials_share_a_fit() -> None:
    parts = [
        draw({(1, 0): 2.0, (1, 1): 1.0}, 1000),
        draw({(3, 1): 0.3}, 50),  # Few of a rank with many.
        draw({(3, 2): 0.3}, 50),  # Few of a rank with few.
    ]
    trials = np.concatenate(parts)
    of_rank = [
        fit_exponent(part)
        for part in (trials[trials["rank"] == rank] for rank in (0, 1))
    ]
    overall = fit_exponent(trials)
    table = fit_exponents(trials, depth=4)
    # The drafted depth counts, also where nothing was tried.
    assert table[1] == table[2] == table[3] == (*of_rank, overall)
    assert table[0][0] == of_rank[0]
    assert table[0][1] != of_rank[1]


def fit_of(trees: list[VerifiedTree]) -> Fit:
    """A fit that is chosen by trees of three nodes."""
    return fit.fit({Confidence(): trees}, depth=2)


def test_calibrated_trees_accept_more() -> None:
    # Three nodes: as drafted the first child and its own, where the second is right.
    fitted = fit_of(overconfident(1600))
    assert fitted.tried[fitted.confidence] > fitted.tokens_before + 0.05
    # Cells with few trials share one exponent, which leaves every order as it is.
    few = fit_of(overconfident(40))
    assert few.rows < MIN_TRIALS < fitted.rows
    assert few.tried[few.confidence] == few.tokens_before
    assert "changes no order" in describe(few)
    assert "changes no order" not in describe(fitted)


def test_the_kappa_is_taken_whose_trees_accept_most() -> None:
    poor, good = overconfident(800), [two_branches(0.6, 0.3, 3)] * 800
    low, high = Confidence(kappa=0.5), Confidence(kappa=2.0)
    fitted = fit.fit({high: poor, low: good}, depth=2)
    assert fitted.confidence.kappa == 0.5
    assert max(fitted.tried.values()) == fitted.tried[fitted.confidence] == 3.0


def test_smaller_trees_are_cut_by_calibrated_values() -> None:
    trees = [two_branches(0.5, 0.4, 4, deeper=0.6)]
    plain, mended = Confidence(), Confidence(exponents=((2.0, 0.5),))
    # The first child alone, and the second is right; or the second is worth more.
    for confidence, tokens in ((plain, [1, 2, 2, 3]), (mended, [2, 2, 3, 3])):
        found = [tokens_per_root(trees, confidence, size) for size in (2, 3, 4, 5)]
        assert found == tokens


def test_a_fit_does_not_depend_on_how_prompts_are_batched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last batch of two is filled with a row of which no tree is seen."""
    one_each = {kind: (Confidence(),) for kind in fit.CONFIDENCES}
    monkeypatch.setattr(fit, "CONFIDENCES", one_each)
    tree = TreeConfig(num_nodes=6, depth=2, width=3)
    target, drafter, params = tiny.pair(tiny.TARGET, tiny.HEAD, tree)
    pair = Pair.of(target, params, drafter=drafter, max_positions=512)
    prompts = [[1, 2, 3], [4], [5, 6]]

    def fits(size: int) -> dict[Kind, Fit]:
        request = Request(max_new_tokens=20)
        config = PairConfig(tree=tree, batch_size=size, request=request)
        return fit.calibrate_pair(pair, config, prompts)

    together, apart = fits(3), fits(2)
    for kind in fit.CONFIDENCES:
        assert together[kind].rows == apart[kind].rows > 0
        assert together[kind].tokens_before == apart[kind].tokens_before
        np.testing.assert_allclose(
            together[kind].confidence.exponents,
            apart[kind].confidence.exponents,
            rtol=1e-4,
        )
    assert together["greedy"].rows != together["sampled"].rows


def test_what_cannot_be_fitted_is_refused() -> None:
    root = VerifiedTree(parents=np.array([-1]), log_values=np.zeros(1), accepted=[])
    for trees in ([], [root]):
        refused(lambda trees=trees: fit_of(trees), "nothing was drafted")


PART = {"kappa": 2.0, "sharpness": 1.5, "exponents": [[1.0], [0.5]]}


@pytest.mark.parametrize(
    "content",
    [
        [],
        {"vocab_size": VOCABULARY, "greedy": {"exponents": [[1]]}},
        {"vocab_size": VOCABULARY, "greedy": PART | {"kappa": 0}},
        {"vocab_size": VOCABULARY, "greedy": PART | {"exponents": [["x"]]}},
        {"vocab_size": VOCABULARY + 1, "greedy": PART},
        {"vocab_size": VOCABULARY, "sampled": PART},
        {"vocab_size": VOCABULARY, "greedy": PART | {"exponents": [[1.0]]}},
    ],
    ids=str,
)
def test_a_calibration_that_does_not_fit_is_refused(
    tmp_path: Path, content: Any
) -> None:
    file = tmp_path / "calibration.json"
    file.write_text(json.dumps({"vocab_size": VOCABULARY, "greedy": PART}))
    wanted = {"vocab_size": VOCABULARY, "depth": 2, "kind": "greedy"}
    read = load_calibration(file, **wanted)
    assert vars(read.greedy) == PART | {"exponents": ((1.0,), (0.5,))}
    assert read.sampled == UNCALIBRATED.sampled
    file.write_text(json.dumps(content))
    refused(lambda: load_calibration(file, **wanted), str(file))
