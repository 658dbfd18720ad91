"""The fit of exponents to what was accepted."""

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from eagle_jax.drafting.calibration import Calibration
from eagle_jax.evaluation.calibrate import (
    BOUNDS,
    Trials,
    calibration_error,
    fit,
    fit_calibration,
    fit_exponent,
    load_calibration,
    read_trials,
)
from tests.conftest import Main, load_main
from tests.evaluation import synthetic
from tests.helpers import refused

By = Literal["depth", "rank"]


@pytest.fixture(scope="module")
def calibrate() -> Main:
    return load_main("calibrate")


def draw(
    true: dict[tuple[int, int], float], count: int, *, questions: int = 10
) -> Trials:
    """Trials whose acceptance follows these exponents, `count` per depth and rank."""
    rng = np.random.default_rng(0)
    cells = np.repeat(list(true), count, axis=0)
    exponents = np.repeat(list(true.values()), count)
    logs = np.log(rng.uniform(0.02, 0.98, len(cells)))
    return Trials(
        depth=cells[:, 0],
        rank=cells[:, 1],
        log_confidence=logs,
        is_accepted=rng.uniform(size=len(cells)) < np.exp(exponents * logs),
        question=rng.integers(questions, size=len(cells)),
    )


def tried(trials: Trials) -> dict[str, Any]:
    """Trials as the `nodes` of a record."""
    lists = {
        "depth": trials.depth.tolist(),
        "rank": trials.rank.tolist(),
        "log_confidence": trials.log_confidence.tolist(),
        "is_accepted": trials.is_accepted.astype(int).tolist(),
    }
    empty = {"count": [0] * 20, "accepted": [0] * 20, "sum": [0.0] * 20}
    return {"rounds": 1, "tried": lists, "drafted": len(trials), "values": empty}


def write(path: Path, trials: Trials, **run: Any) -> None:
    """Trials as a file of records, one per question."""
    records = [
        synthetic.record(
            int(question), nodes=tried(trials.where(trials.question == question)), **run
        )
        for question in np.unique(trials.question)
    ]
    synthetic.write(path, records)


@pytest.mark.parametrize("true", [0.4, 1.0, 2.5])
def test_the_fit_finds_the_exponent_that_drew_the_data(true: float) -> None:
    trials = draw({(1, 0): true}, 20000)
    found = fit_exponent(trials.log_confidence, trials.is_accepted)
    assert found == pytest.approx(true, rel=0.05)


def test_the_fit_has_the_greatest_likelihood() -> None:
    trials = draw({(1, 0): 1.7}, 300)
    found = fit_exponent(trials.log_confidence, trials.is_accepted)

    def log_likelihood(exponent: float) -> float:
        logs = exponent * trials.log_confidence
        each = np.where(trials.is_accepted, logs, np.log1p(-np.exp(logs)))
        return each.sum()

    near = [log_likelihood(found * factor) for factor in (0.99, 1.01)]
    assert log_likelihood(found) > max(near)


@pytest.mark.parametrize("confidence", [1.0, 0.5, 1e-30])
def test_certain_outcomes_stay_within_the_bounds(confidence: float) -> None:
    logs = np.log(np.full(5, confidence))
    everything, nothing = np.ones(5, bool), np.zeros(5, bool)
    assert fit_exponent(logs, everything) == BOUNDS[0]
    assert BOUNDS[0] <= fit_exponent(logs, nothing) <= BOUNDS[1]
    if confidence == 0.5:
        assert fit_exponent(logs, nothing) == BOUNDS[1]


def test_every_cell_has_its_own_exponent() -> None:
    true = {(1, 0): 0.5, (1, 1): 2.0, (2, 0): 3.0, (2, 1): 1.0}
    trials = draw(true, 20000)
    table = fit_calibration(trials, by="rank").exponents
    for (depth, rank), exponent in true.items():
        assert table[depth - 1][rank] == pytest.approx(exponent, rel=0.1)
    for depth, row in enumerate(fit_calibration(trials, by="depth").exponents, 1):
        own = [true[depth, rank] for rank in range(2)]
        assert len(row) == 1
        assert min(own) < row[0] < max(own)


def join(*parts: Trials) -> Trials:
    names = [field.name for field in dataclasses.fields(Trials)]
    return Trials(
        **{n: np.concatenate([getattr(part, n) for part in parts]) for n in names}
    )


def test_cells_with_few_trials_share_a_fit() -> None:
    trials = join(
        draw({(1, 0): 2.0, (1, 1): 1.0}, 1000),
        draw({(3, 1): 0.3}, 50),  # Few of a rank with many.
        draw({(3, 2): 0.3}, 50),  # Few of a rank with few.
    )
    of_rank = [
        fit_exponent(part.log_confidence, part.is_accepted)
        for part in (trials.where(trials.rank == rank) for rank in (0, 1))
    ]
    overall = fit_exponent(trials.log_confidence, trials.is_accepted)
    table = fit_calibration(trials, by="rank").exponents
    assert table[1] == table[2] == (*of_rank, overall)
    assert table[0][0] == of_rank[0]
    assert table[0][1] != of_rank[1]
    by_depth = fit_calibration(trials, by="depth").exponents
    assert by_depth[1] == by_depth[2] == (overall,) != by_depth[0]


@pytest.mark.parametrize("by", ["depth", "rank"])
def test_held_out_confidences_become_honest(by: By) -> None:
    fitted = fit(draw({(1, 0): 3.0, (2, 0): 2.0}, 10000), by=by)
    assert fitted.ece_before > 0.1
    assert fitted.ece_after < 0.03


def test_the_judged_fit_does_not_see_the_held_out_questions() -> None:
    trials = draw({(1, 0): 1.0}, 4000, questions=5)
    is_first = trials.question == 0
    # The held-out question says the opposite of the others.
    turned = np.where(is_first, ~trials.is_accepted, trials.is_accepted)
    fields = {name: getattr(trials, name) for name in ("depth", "rank", "question")}
    mixed = Trials(**fields, log_confidence=trials.log_confidence, is_accepted=turned)
    others = fit_calibration(trials.where(~is_first), by="depth")
    held_out = mixed.where(is_first)
    found = fit(mixed, by="depth")
    assert found.ece_after == calibration_error(held_out, others)
    assert found.ece_before == calibration_error(held_out)
    assert found.calibration == fit_calibration(mixed, by="depth")


def test_the_error_takes_each_trials_own_exponent() -> None:
    trials = Trials(
        depth=np.array([1, 2, 5]),
        rank=np.array([0, 1, 3]),
        log_confidence=np.log([0.5, 0.5, 0.5]),
        is_accepted=np.array([True, False, False]),
        question=np.zeros(3, int),
    )
    calibration = Calibration(exponents=((1.0,), (2.0, 3.0)))
    # 0.5 missed by 0.5; 0.125 twice, missed by 0.125.
    error = calibration_error(trials, calibration)
    assert error == pytest.approx((0.5 + 0.125 + 0.125) / 3)


def test_a_written_calibration_is_read_back(calibrate: Main, tmp_path: Path) -> None:
    trials = draw({(1, 0): 2.0, (1, 1): 0.5, (2, 0): 2.0}, 400)
    write(tmp_path / "run" / "eagle2.jsonl", trials)
    file = tmp_path / "out.json"
    flags = [str(tmp_path / "run"), "--output", str(file), "--by", "rank"]
    assert calibrate(flags) == 0
    result = json.loads(file.read_text())
    assert set(result) == {"exponents", "rows", "ece_before", "ece_after", "source"}
    assert result["rows"] == len(trials)
    assert result["source"] == [str(tmp_path / "run")]
    table = load_calibration(file).exponents
    assert [list(row) for row in table] == result["exponents"]
    np.testing.assert_allclose(table, fit(trials, by="rank").calibration.exponents)


def test_only_the_drafts_own_confidences_are_read(tmp_path: Path) -> None:
    trials = draw({(1, 0): 1.0}, 50)
    write(tmp_path / "a.jsonl", trials)
    write(tmp_path / "b.jsonl", trials, calibration="file.json")
    write(tmp_path / "c.jsonl", trials, draft=None, method="lookup")
    write(tmp_path / "d.jsonl", trials, acceptance="rejection")
    write(tmp_path / "e.jsonl", trials, temperature=1.0)
    assert len(read_trials([tmp_path], temperature=0.0)) == len(trials)
    assert len(read_trials([tmp_path], temperature=1.0)) == len(trials)


def test_records_of_no_single_calibration_are_refused(tmp_path: Path) -> None:
    trials = draw({(1, 0): 1.0}, 20, questions=2)
    write(tmp_path / "a.jsonl", trials)
    write(tmp_path / "b.jsonl", trials, temperature=1.0)
    refused(lambda: read_trials([tmp_path]), "--temperature", "0.0 and 1.0")
    write(tmp_path / "b.jsonl", trials, draft="another")
    refused(lambda: read_trials([tmp_path]), "--draft", "another and toy-head")
    chosen = read_trials([tmp_path], draft="another")
    assert len(chosen) == len(trials)
    single = chosen.where(chosen.question == 0)
    refused(lambda: fit(single, by="depth"), "2 questions")


def test_records_without_nodes_are_refused(calibrate: Main, tmp_path: Path) -> None:
    synthetic.write(tmp_path / "a.jsonl", [synthetic.record(1)])
    refused(lambda: read_trials([tmp_path]), "--nodes")
    flags = [str(tmp_path), "--output", str(tmp_path / "out.json")]
    assert calibrate(flags) == 2
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"exponents": [[0]]}', '{"exponents": [["x"]]}']
)
def test_a_broken_calibration_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "calibration.json"
    file.write_text(text)
    refused(lambda: load_calibration(file), str(file), "exponents")
    refused(lambda: load_calibration(tmp_path / "none.json"), "none.json")
