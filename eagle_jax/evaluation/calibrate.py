"""Calibration: fits a draft's confidences to what the target accepted, and judges it.

The fitted model is in `exponents`. Under shared noise confidences depend on `kappa` and
the sharpness too (`drafting.calibration`): each pair of them that was decoded with gets
exponents of its own, and the one is taken whose trees, cut from the recorded ones,
accept most.
"""

import dataclasses
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eagle_jax.checkpoints.heads import Kind, calibration_part
from eagle_jax.drafting.calibration import UNCALIBRATED, Confidence
from eagle_jax.errors import InputError
from eagle_jax.evaluation.exponents import (
    MIN_TRIALS,
    By,
    calibration_error,
    fit_exponents,
    tokens_per_root,
    trials_of,
)
from eagle_jax.evaluation.nodes import VerifiedTree
from eagle_jax.evaluation.read_runs import read_runs
from eagle_jax.evaluation.runs import Run

PLAIN: dict[Kind, Confidence] = {
    "greedy": UNCALIBRATED.greedy,
    "sampled": UNCALIBRATED.sampled,
}
"""The confidences without a calibration, by kind of text."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Observed:
    """The rounds of one kind of text, drafted with one confidence.

    Attributes:
        confidence: The confidence, without exponents.
        depth: The depth of the trees, `D`.
        trees: The verified trees by question.
    """

    confidence: Confidence
    depth: int
    trees: Mapping[Any, Sequence[VerifiedTree]]

    def of(self, questions: Iterable[Hashable]) -> list[VerifiedTree]:
        """Returns the trees of some questions."""
        return [tree for key in questions for tree in self.trees.get(key, ())]

    @property
    def questions(self) -> set[Hashable]:
        """The questions that have trees."""
        return {key for key, trees in self.trees.items() if trees}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fit:
    """A fitted confidence, and the figures by which it is judged.

    Errors and tokens per root are of questions that the judged fit did not see: every
    second one, in the order of category and id.

    Attributes:
        confidence: The confidence, fitted to all questions.
        is_idle: Whether it changes no tree: `kappa` and the sharpness are those without
            a calibration, and one exponent for all nodes leaves their order as it is.
        rows: The number of tried nodes that it was fitted to.
        num_nodes: The number of nodes of the trees that are compared, cut from the
            recorded ones.
        ece_before: The expected calibration error without a calibration.
        ece_after: The expected calibration error with one fitted to the other
            questions.
        tokens_before: The tokens per recorded root, see `tokens_per_root`, of trees
            that are ranked without a calibration.
        tokens_after: The tokens per recorded root of trees that are ranked with a
            calibration fitted to the other questions.
        tried: The tokens per root on the questions of the judged fit, calibrated, by
            confidence.
    """

    confidence: Confidence
    is_idle: bool
    rows: int
    num_nodes: int
    ece_before: float
    ece_after: float
    tokens_before: float
    tokens_after: float
    tried: dict[Confidence, float]


def read_observed(
    folders: Iterable[Path],
    *,
    temperature: float | None = None,
    draft: str | None = None,
) -> tuple[int, dict[Kind, list[Observed]]]:
    """Reads the rounds of evaluation records.

    Passed over are runs without trees or without a draft model, runs that also copy
    earlier text, which has no confidences of the draft's, runs with a
    calibration, whose confidences are no longer the draft's own, runs with rejection,
    whose drafts may be drawn, and sampled runs that share no noise.

    Args:
        folders: The folders of evaluations.
        temperature: The temperature of the sampled runs to take; `None` for all.
        draft: The draft model of the runs to take, as the records name it; `None` for
            the only one.

    Returns:
        The number of tokens the target knows, `V`, and the rounds by kind of text, one
        entry per confidence.

    Raises:
        InputError: If a folder cannot be read, or no run with trees is left, or runs of
            several targets or drafts.
    """
    runs = [
        run
        for run in read_runs(folders)
        if run.settings.get("draft") is not None
        and run.method != "eagle2+lookup"
        and run.settings.get("calibration") is None
        and run.settings.get("acceptance") != "rejection"
        and (run.temperature == 0 or run.settings.get("shared_noise"))
        and (temperature is None or run.temperature in (0, temperature))
        and (draft is None or run.settings["draft"] == draft)
        and any(a.nodes and a.nodes.trees for a in run.answers.values())
    ]
    if not runs:
        raise InputError(
            "no run of these records has drafted trees of a draft model, without "
            "calibration and rejection; write some with eagle-jax evaluate --nodes "
            "and methods such as eagle2:calibration=none or eagle2:kappa=1.5"
        )
    models = ("draft", "draft_fingerprint", "target", "target_fingerprint")
    for name in (*models, "vocab_size"):
        values = sorted({str(run.settings.get(name)) for run in runs})
        if len(values) > 1:
            advice = "; choose with `draft`" if name == "draft" else ""
            raise InputError(
                f"the records have runs of {name} {' and '.join(values)}, which no one "
                f"calibration fits{advice}"
            )
    vocab_size = runs[0].settings.get("vocab_size")
    if not isinstance(vocab_size, int):
        raise InputError(
            "the records do not say how many tokens the target knows (run.vocab_size); "
            "write them again with eagle-jax evaluate --nodes"
        )
    found: dict[Kind, list[Observed]] = {}
    for kind in ("greedy", "sampled"):
        of_kind = [run for run in runs if (run.temperature > 0) == (kind == "sampled")]
        if of_kind:
            found[kind] = _by_confidence(of_kind, kind)
    return vocab_size, found


def fit(
    observed: Sequence[Observed],
    *,
    by: By,
    plain: Confidence,
    num_nodes: int | None = None,
) -> Fit:
    """Fits confidences to one kind of text, and judges that on other questions.

    Args:
        observed: The rounds by confidence, of at least two questions each.
        by: The cells of exponents: "depth" for one per depth, "rank" for one per depth
            and rank.
        plain: The confidence without a calibration.
        num_nodes: The number of nodes of the trees that are compared; `None` for half
            of the recorded ones.

    Raises:
        InputError: If there is but one question, or nothing was drafted.
    """
    questions = sorted(set.intersection(*(o.questions for o in observed)), key=str)
    if len(questions) < 2:
        raise InputError(
            "a fit is judged on questions that it did not see: give records of at "
            "least 2 questions"
        )
    fitted, judged = questions[::2], questions[1::2]
    smallest = min(len(tree.parents) for o in observed for tree in o.of(questions))
    nodes = max(smallest // 2, 2) if num_nodes is None else num_nodes
    on_half = {
        o.confidence: fit_confidence(trials_of(o.of(fitted)), o, by=by)
        for o in observed
    }
    tried = {
        o.confidence: tokens_per_root(o.of(fitted), on_half[o.confidence], nodes)
        for o in observed
    }
    best = max(observed, key=lambda o: tried[o.confidence])
    before = min(observed, key=lambda o: _distance(o.confidence, plain))
    rest, trials = trials_of(best.of(judged)), trials_of(best.of(questions))
    found = fit_confidence(trials, best, by=by)
    is_one = len({exponent for row in found.exponents for exponent in row}) == 1
    return Fit(
        confidence=found,
        is_idle=is_one and _distance(found, plain) == 0,
        rows=len(trials),
        num_nodes=nodes,
        ece_before=calibration_error(trials_of(before.of(judged))),
        ece_after=calibration_error(rest, on_half[best.confidence]),
        tokens_before=tokens_per_root(before.of(judged), before.confidence, nodes),
        tokens_after=tokens_per_root(best.of(judged), on_half[best.confidence], nodes),
        tried=tried,
    )


def describe(fitted: Fit) -> str:
    """Returns the figures of a fit in one line."""
    found = fitted.confidence
    sweep = ", ".join(
        f"{tried.kappa:g}/{tried.sharpness:g}: {tau:.3f}"
        for tried, tau in fitted.tried.items()
    )
    line = (
        f"{fitted.rows:,} nodes | kappa/sharpness {found.kappa:g}/{found.sharpness:g} "
        f"(tokens per recorded root {sweep}) | on the other questions: expected "
        f"calibration error {fitted.ece_before:.4f} before, {fitted.ece_after:.4f} "
        f"after; trees of {fitted.num_nodes} nodes {fitted.tokens_before:.3f} tokens "
        f"per root before, {fitted.tokens_after:.3f} after"
    )
    if fitted.is_idle:
        line += (
            "; it changes no tree, as all nodes have one exponent: a depth or rank "
            f"needs {MIN_TRIALS} tried nodes for its own, so record more questions"
        )
    return line


def calibration_file(
    vocab_size: int, fits: Mapping[Kind, Fit], source: Sequence[str]
) -> dict[str, Any]:
    """Returns the content of a calibration file, as `checkpoints.heads` reads it.

    Args:
        vocab_size: The number of tokens the target knows, `V`.
        fits: The fits by kind of text.
        source: Lines that name where the records come from.
    """
    names = ("rows", "num_nodes", "ece_before", "ece_after")
    names = (*names, "tokens_before", "tokens_after")
    parts = {
        kind: calibration_part(fitted.confidence)
        | {name: getattr(fitted, name) for name in names}
        for kind, fitted in fits.items()
    }
    return {"vocab_size": vocab_size, **parts, "source": list(source)}


def fit_confidence(trials: np.ndarray, observed: Observed, *, by: By) -> Confidence:
    """Returns the observed confidence with exponents fitted to trials of its trees."""
    exponents = fit_exponents(trials, by=by, depth=observed.depth)
    return dataclasses.replace(observed.confidence, exponents=exponents)


def _by_confidence(runs: Sequence[Run], kind: Kind) -> list[Observed]:
    """Returns the trees of runs of one kind, those of one confidence together."""
    plain = PLAIN[kind]
    trees: dict[Confidence, dict[Hashable, list[VerifiedTree]]] = {}
    depths: dict[Confidence, int] = {}
    for run in runs:
        confidence = Confidence(
            kappa=float(run.settings.get("kappa") or plain.kappa),
            sharpness=float(run.settings.get("sharpness") or plain.sharpness),
        )
        depth = int(run.settings.get("depth") or 1)
        depths[confidence] = max(depths.get(confidence, 1), depth)
        questions = trees.setdefault(confidence, {})
        for key, answer in run.answers.items():
            if answer.nodes is not None:
                questions.setdefault(key, []).extend(answer.nodes.trees)
    return [
        Observed(confidence=confidence, depth=depths[confidence], trees=found)
        for confidence, found in trees.items()
    ]


def _distance(one: Confidence, other: Confidence) -> float:
    """Returns the distance of two confidences, by the logarithms of their factors."""
    factors = ((one.kappa, other.kappa), (one.sharpness, other.sharpness))
    return sum(abs(float(np.log(a / b))) for a, b in factors)
