"""The fit of confidences to what was accepted."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle_jax.checkpoints.heads import Kind, load_calibration
from eagle_jax.drafting.calibration import UNCALIBRATED, Confidence
from eagle_jax.evaluation.calibrate import Fit, Observed, describe, fit, read_observed
from eagle_jax.evaluation.exponents import (
    BOUNDS,
    MIN_TRIALS,
    By,
    calibration_error,
    fit_exponent,
    fit_exponents,
    tokens_per_root,
    trials_of,
)
from eagle_jax.evaluation.nodes import TRIED, Nodes, VerifiedTree
from tests.conftest import Main, load_main
from tests.evaluation import synthetic
from tests.helpers import refused

VOCABULARY = 24


@pytest.fixture(scope="module")
def calibrate() -> Main:
    return load_main("calibrate")


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
    """Two children of the root, each with a child of its own; the first is node 1."""
    return VerifiedTree(
        parents=np.array([-1, 0, 0, 1, 2]),
        log_values=np.log([1.0, first, second, first * deeper, second * deeper]),
        is_node=np.ones(5, bool),
        accepted=[[], [1], [2], [1, 3], [2, 4]][accepted],
    )


def overconfident(questions: int, rounds: int, kappa: float = 1.0) -> Observed:
    """First children say 0.6 and are right once in four, second ones say 0.3."""
    rng = np.random.default_rng(1)
    fates = rng.choice(5, size=(questions, rounds), p=[0.15, 0.2, 0.25, 0.05, 0.35])
    trees = {
        question: [two_branches(0.6, 0.3, fate) for fate in row]
        for question, row in enumerate(fates.tolist())
    }
    return Observed(confidence=Confidence(kappa=kappa), depth=2, trees=trees)


def write(path: Path, observed: Observed, **run: Any) -> None:
    """Trees as a file of records, one per question."""
    records = [
        synthetic.record(
            int(question), nodes=Nodes.of(trees), vocab_size=VOCABULARY, **run
        )
        for question, trees in observed.trees.items()
    ]
    synthetic.write(path, records)


@pytest.mark.parametrize("true", [0.4, 1.0, 2.5])
def test_the_fit_finds_the_exponent_that_drew_the_data(true: float) -> None:
    trials = draw({(1, 0): true}, 20000)
    found = fit_exponent(trials)
    assert found == pytest.approx(true, rel=0.05)


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
    table = fit_exponents(trials, by="rank", depth=2)
    for (depth, rank), exponent in true.items():
        assert table[depth - 1][rank] == pytest.approx(exponent, rel=0.1)
    for depth, row in enumerate(fit_exponents(trials, by="depth", depth=2), 1):
        own = [true[depth, rank] for rank in range(2)]
        assert len(row) == 1
        assert min(own) < row[0] < max(own)


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
    table = fit_exponents(trials, by="rank", depth=4)
    # The drafted depth counts, also where nothing was tried.
    assert table[1] == table[2] == table[3] == (*of_rank, overall)
    assert table[0][0] == of_rank[0]
    assert table[0][1] != of_rank[1]
    by_depth = fit_exponents(trials, by="depth", depth=3)
    assert by_depth[1] == by_depth[2] == (overall,) != by_depth[0]


def fit_of(*observed: Observed, by: By = "rank", num_nodes: int = 3) -> Fit:
    return fit(observed, by=by, plain=Confidence(), num_nodes=num_nodes)


def test_held_out_confidences_become_honest() -> None:
    fitted = fit_of(overconfident(8, 200))
    assert fitted.ece_before > 0.2
    assert fitted.ece_after < 0.05


def test_calibrated_trees_accept_more_on_questions_that_were_not_seen() -> None:
    # Three nodes: as drafted the first child and its own, where the second is right.
    fitted = fit_of(overconfident(8, 200))
    assert fitted.tokens_after > fitted.tokens_before + 0.05


def test_the_judged_fit_does_not_see_every_second_question() -> None:
    observed = overconfident(8, 40)
    turned = {
        question: [
            two_branches(0.6, 0.3, 1) if question % 2 else tree for tree in trees
        ]
        for question, trees in observed.trees.items()
    }
    mixed = dataclasses.replace(observed, trees=turned)
    fitted, untouched = fit_of(mixed), fit_of(observed)
    assert fitted.tried == untouched.tried
    assert fitted.confidence != untouched.confidence  # Fitted to all questions.
    judged = [tree for question in (1, 3, 5, 7) for tree in turned[question]]
    assert fitted.tokens_before == tokens_per_root(judged, Confidence(), 3)
    assert fitted.ece_before == calibration_error(trials_of(judged))


def test_the_kappa_is_taken_whose_trees_accept_most() -> None:
    poor, good = overconfident(8, 100, 2.0), overconfident(8, 100, 0.5)
    accepted = {
        question: [two_branches(0.6, 0.3, 3) for _ in trees]
        for question, trees in good.trees.items()
    }
    fitted = fit_of(poor, dataclasses.replace(good, trees=accepted))
    assert fitted.confidence.kappa == 0.5
    assert fitted.tried[good.confidence] == 3.0 > fitted.tried[poor.confidence]


@pytest.mark.parametrize(
    ("num_nodes", "exponents", "tokens"),
    [
        (2, ((1.0,),), 1.0),  # The first child alone, and the second is right.
        (3, ((1.0,),), 2.0),
        (4, ((1.0,),), 2.0),
        (5, ((1.0,),), 3.0),
        (2, ((2.0, 0.5),), 2.0),  # The second child is worth more.
        (3, ((2.0, 0.5),), 2.0),
        (4, ((2.0, 0.5),), 3.0),
    ],
)
def test_smaller_trees_are_cut_by_calibrated_values(
    num_nodes: int, exponents: tuple[tuple[float, ...], ...], tokens: float
) -> None:
    tree = two_branches(0.5, 0.4, 4, deeper=0.6)
    confidence = Confidence(exponents=exponents)
    assert tokens_per_root([tree], confidence, num_nodes) == tokens


def test_the_error_takes_each_trials_own_exponent() -> None:
    trials = trials_from(
        depth=[1, 2, 5],
        rank=[0, 1, 3],
        log_confidence=np.log([0.5, 0.5, 0.5]),
        is_accepted=[True, False, False],
    )
    confidence = Confidence(exponents=((1.0,), (2.0, 3.0)))
    # 0.5 missed by 0.5; 0.125 twice, missed by 0.125.
    error = calibration_error(trials, confidence)
    assert error == pytest.approx((0.5 + 0.125 + 0.125) / 3)


def read_back(file: Path, kind: Kind) -> Confidence:
    read = load_calibration(file, vocab_size=VOCABULARY, depth=2, kind=kind)
    return getattr(read, kind)


def test_greedy_and_sampled_text_are_fitted_apart(
    calibrate: Main, tmp_path: Path
) -> None:
    sampled = {"temperature": 1.0, "shared_noise": True}
    write(tmp_path / "run" / "a.jsonl", overconfident(4, 50), depth=2)
    others = overconfident(4, 60, 2.0)
    write(tmp_path / "run" / "b.jsonl", others, kappa=2.0, depth=2, **sampled)
    file = tmp_path / "out.json"
    assert calibrate([str(tmp_path / "run"), "--output", str(file)]) == 0
    result = json.loads(file.read_text())
    assert set(result) == {"vocab_size", "greedy", "sampled", "source"}
    assert result["source"] == [str(tmp_path / "run")]
    # Records hold six digits of a log probability.
    parts: dict[Kind, Observed] = {
        "greedy": overconfident(4, 50),
        "sampled": others,
    }
    for kind, observed in parts.items():
        found, expected = read_back(file, kind), fit_of(observed).confidence
        assert found.kappa == expected.kappa == observed.confidence.kappa
        np.testing.assert_allclose(found.exponents, expected.exponents, rtol=1e-4)


def test_only_the_drafts_own_confidences_are_read(tmp_path: Path) -> None:
    observed = overconfident(2, 5)
    write(tmp_path / "a.jsonl", observed)
    write(tmp_path / "b.jsonl", observed, calibration="file.json")
    write(tmp_path / "c.jsonl", observed, draft=None, method="lookup")
    write(tmp_path / "f.jsonl", observed, method="eagle2+lookup")
    write(tmp_path / "d.jsonl", observed, acceptance="rejection")
    write(tmp_path / "e.jsonl", observed, temperature=1.0, shared_noise=False)
    for temperature in (0.7, 1.0):
        name = f"t{temperature}.jsonl"
        sampled = {"temperature": temperature, "shared_noise": True}
        sampled |= {"kappa": 3.0, "sharpness": 1.25}
        write(tmp_path / name, observed, **sampled)
    for temperature, count in ((None, 10), (0.7, 5)):
        vocab_size, found = read_observed([tmp_path], temperature=temperature)
        assert vocab_size == VOCABULARY
        assert [len(trees) for trees in found["greedy"][0].trees.values()] == [5, 5]
        (sampled_runs,) = found["sampled"]
        assert sampled_runs.confidence == Confidence(kappa=3.0, sharpness=1.25)
        assert {len(trees) for trees in sampled_runs.trees.values()} == {count}


@pytest.mark.parametrize(
    "name",
    ["draft", "draft_fingerprint", "target", "target_fingerprint", "vocab_size"],
)
def test_records_of_no_single_calibration_are_refused(
    tmp_path: Path, name: str
) -> None:
    observed = overconfident(2, 5)
    write(tmp_path / "a.jsonl", observed)
    records = [json.loads(x) for x in (tmp_path / "a.jsonl").read_text().splitlines()]
    for record in records:
        record["run"][name] = "another"
    synthetic.write(tmp_path / "b.jsonl", records)
    refused(lambda: read_observed([tmp_path]), name, "another")


def test_a_fit_that_changes_no_tree_says_so() -> None:
    """Cells with few trials share one exponent, which leaves every order as it is."""
    few, many = fit_of(overconfident(2, 20)), fit_of(overconfident(8, 200))
    assert few.rows < MIN_TRIALS < many.rows
    assert few.tokens_after == few.tokens_before
    assert "changes no tree" in describe(few)
    assert "changes no tree" not in describe(many)
    other = fit([overconfident(2, 20, 2.0)], by="rank", plain=Confidence(), num_nodes=3)
    assert "changes no tree" not in describe(other), "kappa does"


def test_text_that_stays_uncalibrated_is_named(
    calibrate: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "run" / "a.jsonl", overconfident(8, 200), depth=2)
    file = tmp_path / "out.json"
    assert calibrate([str(tmp_path / "run"), "--output", str(file)]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: ") and "no records of sampled text" in line


def test_one_question_is_refused() -> None:
    refused(lambda: fit_of(overconfident(1, 5)), "2 questions")


def test_records_without_trees_are_refused(calibrate: Main, tmp_path: Path) -> None:
    synthetic.write(tmp_path / "a.jsonl", [synthetic.record(1)])
    refused(lambda: read_observed([tmp_path]), "--nodes")
    flags = [str(tmp_path), "--output", str(tmp_path / "out.json")]
    assert calibrate(flags) == 2
    assert not (tmp_path / "out.json").exists()


PART = {"kappa": 2.0, "sharpness": 1.5, "exponents": [[1.0], [0.5]]}


@pytest.mark.parametrize(
    "content",
    [
        [],
        {},
        {"vocab_size": VOCABULARY, "greedy": {"kappa": 1}},
        {"vocab_size": VOCABULARY, "greedy": {"exponents": [[1]]}},
        {"vocab_size": VOCABULARY, "greedy": PART | {"kappa": 0}},
        {"vocab_size": VOCABULARY, "greedy": PART | {"sharpness": -1}},
        {"vocab_size": VOCABULARY, "greedy": PART | {"kappa": float("nan")}},
        {"vocab_size": VOCABULARY, "greedy": PART | {"exponents": [[0]]}},
        {"vocab_size": VOCABULARY, "greedy": PART | {"exponents": [["x"]]}},
        {"vocab_size": VOCABULARY, "greedy": PART | {"exponents": []}},
        {"vocab_size": VOCABULARY + 1, "greedy": PART},
        {"vocab_size": VOCABULARY, "sampled": PART},
    ],
    ids=str,
)
def test_a_calibration_that_does_not_fit_is_refused(
    tmp_path: Path, content: Any
) -> None:
    file = tmp_path / "calibration.json"
    file.write_text(json.dumps(content))
    refused(lambda: read_back(file, "greedy"), str(file))


def test_a_calibration_for_fewer_levels_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    file.write_text(json.dumps({"vocab_size": VOCABULARY, "greedy": PART}))
    sizes = {"vocab_size": VOCABULARY, "kind": "greedy"}
    read = load_calibration(file, depth=2, **sizes)
    assert read.greedy == Confidence(
        kappa=2.0, sharpness=1.5, exponents=((1.0,), (0.5,))
    )
    assert read.sampled == UNCALIBRATED.sampled
    refused(lambda: load_calibration(file, depth=3, **sizes), "depth = 3", "2 levels")
    missing = tmp_path / "none.json"
    refused(lambda: load_calibration(missing, depth=2, **sizes), "none.json")
