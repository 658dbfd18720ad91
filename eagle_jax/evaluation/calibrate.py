"""How honest a draft's confidences are, and the exponents that make them so.

Every drafted node whose parent was accepted is one trial: it was accepted or not. With
`c` its confidence, acceptance is taken for a Bernoulli trial of probability `c ** s`,
and `s` is fitted by maximum likelihood, one number per cell.

Cells: one per depth, or one per depth and rank. A cell with fewer than `MIN_TRIALS`
trials takes the exponent of its rank at all depths, which matters more than the depth;
a rank or a depth with fewer takes that of all trials together.
"""

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import numpy as np

from eagle_jax.drafting.calibration import Calibration
from eagle_jax.errors import InputError
from eagle_jax.evaluation.metrics import Reliability
from eagle_jax.evaluation.read_runs import read_runs
from eagle_jax.evaluation.runs import Nodes

MIN_TRIALS = 200
"""Trials that a cell needs for an exponent of its own."""

BOUNDS = (1 / 8, 8.0)
"""Smallest and largest exponent: all accepted, or none, would ask for 0 or infinity."""

_HELD_OUT = 5  # Every fifth question is kept out of the fit that is judged.
_BISECTIONS = 50
_ALMOST_CERTAIN = -1e-6  # A certain node that was refused has no likelihood at all.
_IMPOSSIBLE = 1e-30  # Has a finite logarithm.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trials:
    """Drafted nodes whose parents were accepted.

    Attributes:
        depth: `[M]` int, 1 for children of the root.
        rank: `[M]` int, place among the siblings, 0 for the likeliest.
        log_confidence: `[M]` float64, log probability given the parent.
        is_accepted: `[M]` bool.
        question: `[M]` int, number of the question.
    """

    depth: np.ndarray
    rank: np.ndarray
    log_confidence: np.ndarray
    is_accepted: np.ndarray
    question: np.ndarray

    def __len__(self) -> int:
        """Returns `M`."""
        return len(self.depth)

    def where(self, chosen: np.ndarray) -> "Trials":
        """Returns some of the trials."""
        fields = {f.name: getattr(self, f.name)[chosen] for f in _FIELDS}
        return Trials(**fields)


_FIELDS = dataclasses.fields(Trials)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fit:
    """A calibration and what it is worth.

    Attributes:
        calibration: Fitted to all questions.
        ece_before: Expected calibration error of the bare confidences, held-out
            questions.
        ece_after: Likewise with exponents fitted to the other questions.
    """

    calibration: Calibration
    ece_before: float
    ece_after: float


def read_trials(
    folders: Iterable[Path],
    *,
    temperature: float | None = None,
    draft: str | None = None,
) -> Trials:
    """Reads the trials of evaluation records.

    Passed over are runs without nodes or without a draft model, runs with a
    calibration, whose confidences are no longer the draft's own, and runs with
    rejection, whose drafts may be drawn.

    Args:
        folders: Of evaluations.
        temperature: Of the runs to take; needed where several have nodes.
        draft: Likewise, as the records name it.

    Raises:
        InputError: If a folder cannot be read, no run with nodes is left, or runs of
            several drafts or temperatures are.
    """
    runs = [
        run
        for run in read_runs(folders)
        if run.settings.get("draft") is not None
        and run.settings.get("calibration") is None
        and run.settings.get("acceptance") != "rejection"
        and (temperature is None or run.temperature == temperature)
        and (draft is None or run.settings["draft"] == draft)
        and any(answer.nodes for answer in run.answers.values())
    ]
    if not runs:
        raise InputError(
            "no run of these records has drafted nodes of a draft model, without "
            "calibration and rejection; write some with scripts/evaluate.py --nodes"
        )
    for name in ("temperature", "draft"):
        values = sorted({str(run.settings[name]) for run in runs})
        if len(values) > 1:
            raise InputError(
                f"the records have runs of {name} {' and '.join(values)}, which no one "
                f"calibration fits; choose with --{name}"
            )
    keys = sorted({key for run in runs for key in run.answers})
    numbers = {key: number for number, key in enumerate(keys)}
    parts = [
        _trials(answer.nodes, numbers[key])
        for run in runs
        for key, answer in run.answers.items()
        if answer.nodes is not None
    ]
    fields = {
        f.name: np.concatenate([getattr(part, f.name) for part in parts])
        for f in _FIELDS
    }
    trials = Trials(**fields)
    if not len(trials):
        raise InputError("the records have runs with nodes, but nothing was drafted")
    return trials


def fit(trials: Trials, *, by: Literal["depth", "rank"]) -> Fit:
    """Fits a calibration and judges it on questions that it did not see.

    Every fifth question, in the order of category and id, is held out of the fit that
    is judged; the calibration returned is fitted to all questions.

    Args:
        trials: Of at least two questions.
        by: "depth" for one exponent per depth, "rank" for one per depth and rank.

    Raises:
        InputError: If there is but one question.
    """
    questions = np.unique(trials.question)
    if len(questions) < 2:
        raise InputError(
            "a fit is judged on questions that it did not see: give records of at "
            "least 2 questions"
        )
    is_held_out = np.isin(trials.question, questions[::_HELD_OUT])
    held_out = trials.where(is_held_out)
    judged = fit_calibration(trials.where(~is_held_out), by=by)
    return Fit(
        calibration=fit_calibration(trials, by=by),
        ece_before=calibration_error(held_out),
        ece_after=calibration_error(held_out, judged),
    )


def fit_calibration(trials: Trials, *, by: Literal["depth", "rank"]) -> Calibration:
    """Returns the exponents of greatest likelihood; see the rules above."""
    overall = fit_exponent(trials.log_confidence, trials.is_accepted)
    depths = range(1, int(trials.depth.max()) + 1)
    if by == "depth":
        levels = (trials.where(trials.depth == depth) for depth in depths)
        return Calibration(
            exponents=tuple((_fit_or(overall, level),) for level in levels)
        )
    ranks = [trials.where(trials.rank == r) for r in range(int(trials.rank.max()) + 1)]
    shared = [_fit_or(overall, of_rank) for of_rank in ranks]
    return Calibration(
        exponents=tuple(
            tuple(
                _fit_or(other, of_rank.where(of_rank.depth == depth))
                for other, of_rank in zip(shared, ranks, strict=True)
            )
            for depth in depths
        )
    )


def fit_exponent(log_confidence: np.ndarray, is_accepted: np.ndarray) -> float:
    """Returns the `s` within `BOUNDS` under which the trials are likeliest.

    The log likelihood, `s * log c` for an accepted node and `log(1 - c ** s)` for a
    refused one, is concave in `s`: its slope is bisected.

    Args:
        log_confidence: `[M]`, not above 0.
        is_accepted: `[M]` bool.
    """
    logs = np.minimum(log_confidence, _ALMOST_CERTAIN)
    accepted, refused = logs[is_accepted].sum(), logs[~is_accepted]

    def slope(exponent: float) -> float:
        with np.errstate(over="ignore"):  # An impossible node: refused, as expected.
            return float(accepted - (refused / np.expm1(-exponent * refused)).sum())

    low, high = BOUNDS
    if slope(low) <= 0:
        return low
    if slope(high) >= 0:
        return high
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(middle) > 0 else (low, middle)
    return (low + high) / 2


def calibration_error(trials: Trials, calibration: Calibration | None = None) -> float:
    """Returns the expected calibration error of confidences, calibrated or bare."""
    exponents = 1.0 if calibration is None else _exponents(trials, calibration)
    predicted = np.exp(trials.log_confidence * exponents)
    error = Reliability.of(predicted, trials.is_accepted).expected_error
    assert error is not None, "there are trials"
    return error


def load_calibration(path: Path) -> Calibration:
    """Reads what scripts/calibrate.py wrote.

    Raises:
        InputError: If the file cannot be read or holds no exponents.
    """
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["exponents"]
        exponents = tuple(tuple(float(entry) for entry in row) for row in rows)
        return Calibration(exponents=exponents)
    except OSError as error:
        raise InputError(f"cannot read the calibration {path}: {error}") from error
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f'{path} must hold a JSON object with "exponents", a list of lists of '
            f"numbers, as scripts/calibrate.py writes it ({error!r})"
        ) from error


def _fit_or(shared: float, trials: Trials) -> float:
    """Returns the cell's own exponent if it has enough trials, or the shared one."""
    if len(trials) < MIN_TRIALS:
        return shared
    return fit_exponent(trials.log_confidence, trials.is_accepted)


def _exponents(trials: Trials, calibration: Calibration) -> np.ndarray:
    """Returns `[M]`, each trial's exponent."""
    table = calibration.exponents
    longest = max(map(len, table))
    padded = np.array([[*row, *[row[-1]] * (longest - len(row))] for row in table])
    depth = np.minimum(trials.depth, len(table)) - 1
    return padded[depth, np.minimum(trials.rank, longest - 1)]


def _trials(nodes: Nodes, question: int) -> Trials:
    return Trials(
        depth=nodes.depth,
        rank=nodes.rank,
        log_confidence=np.log(np.maximum(nodes.confidence, _IMPOSSIBLE)),
        is_accepted=nodes.is_accepted,
        question=np.full(len(nodes.depth), question),
    )
