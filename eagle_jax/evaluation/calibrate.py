"""Calibration: a pair decodes prompts, and its draft's confidences are fitted.

The fitted model is in `exponents`. Under shared noise confidences depend on `kappa` and
the sharpness too (`drafting.calibration`): each pair of them that is decoded with gets
exponents of its own, and the one is taken whose trees, cut from the decoded ones,
accept most.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from eagle_jax.checkpoints.draft_files import Kind, calibration_part
from eagle_jax.checkpoints.hub import CALIBRATION_FILE
from eagle_jax.decoding import speculative
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.requests import Requests, cache_slots, make_requests
from eagle_jax.drafting import Calibration, TreeDrafter
from eagle_jax.drafting.calibration import UNCALIBRATED, Confidence
from eagle_jax.errors import InputError
from eagle_jax.evaluation.exponents import (
    MIN_TRIALS,
    calibration_error,
    fit_exponents,
    tokens_per_root,
    trials_of,
)
from eagle_jax.evaluation.nodes import VerifiedTree
from eagle_jax.files import write_json
from eagle_jax.heads import open_head
from eagle_jax.interface import Params, Target
from eagle_jax.progress import Progress, Report, show_nothing
from eagle_jax.training.trainer import Trained

PLAIN: dict[Kind, Confidence] = {
    "greedy": UNCALIBRATED.greedy,
    "sampled": UNCALIBRATED.sampled,
}
"""The confidences without a calibration, by kind of text."""

TRIED: dict[Kind, tuple[Confidence, ...]] = {
    "greedy": (Confidence(),),
    "sampled": (
        Confidence(kappa=1.0),
        Confidence(kappa=2.0),
        Confidence(kappa=3.0),
        Confidence(kappa=1.0, sharpness=1.2),
    ),
}
"""The confidences that are decoded with, by kind of text, each in its own program."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Observed:
    """The rounds of one kind of text, drafted with one confidence.

    Attributes:
        confidence: The confidence, without exponents.
        depth: The depth of the trees, `D`.
        trees: The verified trees by the number of their prompt.
    """

    confidence: Confidence
    depth: int
    trees: Mapping[int, Sequence[VerifiedTree]]

    def of(self, prompts: Iterable[int]) -> list[VerifiedTree]:
        """Returns the trees of some prompts."""
        return [tree for number in prompts for tree in self.trees.get(number, ())]

    @property
    def prompts(self) -> set[int]:
        """The prompts that have trees."""
        return {number for number, trees in self.trees.items() if trees}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fit:
    """A fitted confidence, and the figures by which it is judged.

    Errors and tokens per root are of prompts that the judged fit did not see: every
    second one.

    Attributes:
        confidence: The confidence, fitted to all prompts.
        is_idle: Whether it changes no tree: `kappa` and the sharpness are those without
            a calibration, and one exponent for all nodes leaves their order as it is.
        rows: The number of tried nodes that it was fitted to.
        num_nodes: The number of nodes of the trees that are compared, half as
            many as were drafted.
        ece_before: The expected calibration error without a calibration.
        ece_after: The expected calibration error with one fitted to the other
            prompts.
        tokens_before: The tokens per root, see `tokens_per_root`, of trees
            that are ranked without a calibration.
        tokens_after: The tokens per root of trees that are ranked with a
            calibration fitted to the other prompts.
        tried: The tokens per root on the prompts of the judged fit, calibrated, by
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


def calibrate_pair(
    target: Target,
    drafter: TreeDrafter,
    params: Params,
    batches: Sequence[Requests],
    progress: Progress = show_nothing,
) -> dict[Kind, Fit]:
    """Fits a draft model's confidences to texts that its target writes now.

    Args:
        target: The target. Static.
        drafter: The drafter of a dynamic tree; deeper trees cannot use the calibration.
            Static.
        params: The parameters of target and draft model.
        batches: The requests, of at least two prompts on which the draft was not
            trained. Their texts are written at temperature 0, and at 1 once for each
            confidence that is tried.
        progress: Called to show how far work is, with a label and a total.

    Returns:
        The fits by kind of text.

    Raises:
        InputError: If there is but one prompt, or nothing was drafted.
    """
    found: dict[Kind, list[Observed]] = {kind: [] for kind in TRIED}
    with progress("decoding", sum(map(len, TRIED.values()))) as done:
        for kind, confidences in TRIED.items():
            for confidence in confidences:
                calibration = Calibration(**{kind: confidence})
                decoder = Decoder(
                    target=target,
                    drafter=dataclasses.replace(drafter, calibration=calibration),
                    acceptance="greedy" if kind == "greedy" else "coupled",
                )
                trees = _decode(decoder, params, batches)
                found[kind].append(
                    Observed(confidence=confidence, depth=drafter.depth, trees=trees)
                )
                done(sum(map(len, found.values())))
    return {kind: fit(observed, PLAIN[kind]) for kind, observed in found.items()}


def calibrate_head(trained: Trained, report: Report) -> None:
    """Writes a calibration of a new head, fitted on its run's held-out prompts.

    Args:
        trained: The finished run.
        report: Called with a line for each fit, or for its failure.
    """
    config, step_config = trained.config, trained.step_config
    target, target_params = step_config.target, trained.pair.params.target
    sharding = trained.pair.sharding
    everywhere = None if sharding is None else sharding.everywhere
    opened = open_head(trained.head, target.config)
    model = opened.head.model(opened.config, step_config.dtype)
    head = opened.load(target_params, step_config.dtype, everywhere)
    prompts = trained.data.prompts
    try:
        requests = make_requests(
            prompts,
            max_new_tokens=config.run.eval_new_tokens,
            max_length=target.config.max_positions,
            stop_tokens=trained.data.stop_tokens,
            seeds=range(len(prompts)),
        )
        fits = calibrate_pair(
            target,
            TreeDrafter(model=model, tree=config.tree.shape),
            Params(target=target_params, drafter=model.join(head, target_params)),
            [requests],
        )
    except InputError as error:
        report(f"warning: no calibration is written: {error}")
        return
    source = ["held-out prompts of eagle-jax train"]
    result = calibration_file(target.config.vocab_size, fits, source)
    write_json(trained.head / CALIBRATION_FILE, result)
    for kind, fitted in fits.items():
        report(f"{kind}: {describe(fitted)}")


def fit(observed: Sequence[Observed], plain: Confidence) -> Fit:
    """Fits confidences to one kind of text, and judges that on other prompts.

    Args:
        observed: The rounds by confidence, of at least two prompts each.
        plain: The confidence without a calibration.

    Raises:
        InputError: If there is but one prompt, or nothing was drafted.
    """
    prompts = sorted(set.intersection(*(o.prompts for o in observed)))
    if len(prompts) < 2:
        raise InputError(
            "a fit is judged on prompts that it did not see: give at least 2 that are "
            "continued by more than a token"
        )
    fitted, judged = prompts[::2], prompts[1::2]
    smallest = min(len(tree.parents) for o in observed for tree in o.of(prompts))
    nodes = max(smallest // 2, 2)
    on_half = {
        o.confidence: fit_confidence(trials_of(o.of(fitted)), o) for o in observed
    }
    tried = {
        o.confidence: tokens_per_root(o.of(fitted), on_half[o.confidence], nodes)
        for o in observed
    }
    best = max(observed, key=lambda o: tried[o.confidence])
    before = min(observed, key=lambda o: _distance(o.confidence, plain))
    rest, trials = trials_of(best.of(judged)), trials_of(best.of(prompts))
    found = fit_confidence(trials, best)
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
        f"(tokens per root {sweep}) | on the other prompts: expected "
        f"calibration error {fitted.ece_before:.4f} before, {fitted.ece_after:.4f} "
        f"after; trees of {fitted.num_nodes} nodes {fitted.tokens_before:.3f} tokens "
        f"per root before, {fitted.tokens_after:.3f} after"
    )
    if fitted.is_idle:
        line += (
            "; it changes no tree, as all nodes have one exponent: a depth or rank "
            f"needs {MIN_TRIALS} tried nodes for its own, so give more prompts"
        )
    return line


def calibration_file(
    vocab_size: int, fits: Mapping[Kind, Fit], source: Sequence[str]
) -> dict[str, Any]:
    """Returns what a calibration holds, as `checkpoints.draft_files` reads it.

    Args:
        vocab_size: The number of tokens the target knows, `V`.
        fits: The fits by kind of text.
        source: Lines that say what was decoded.
    """
    names = ("rows", "num_nodes", "ece_before", "ece_after")
    names = (*names, "tokens_before", "tokens_after")
    parts = {
        kind: calibration_part(fitted.confidence)
        | {name: getattr(fitted, name) for name in names}
        for kind, fitted in fits.items()
    }
    return {"vocab_size": vocab_size, **parts, "source": list(source)}


def fit_confidence(trials: np.ndarray, observed: Observed) -> Confidence:
    """Returns the observed confidence with exponents fitted to trials of its trees."""
    exponents = fit_exponents(trials, observed.depth)
    return dataclasses.replace(observed.confidence, exponents=exponents)


def _distance(one: Confidence, other: Confidence) -> float:
    """Returns the distance of two confidences, by the logarithms of their factors."""
    factors = ((one.kappa, other.kappa), (one.sharpness, other.sharpness))
    return sum(abs(float(np.log(a / b))) for a, b in factors)


def _decode(
    decoder: Decoder, params: Params, batches: Sequence[Requests]
) -> dict[int, list[VerifiedTree]]:
    """Decodes requests to their end, and returns every tree by its prompt's number."""
    temperature = 0.0 if decoder.acceptance == "greedy" else 1.0
    slots = max(cache_slots(requests, decoder.depth) for requests in batches)
    trees: dict[int, list[VerifiedTree]] = {}
    first = 0
    for requests in batches:
        temperatures = jnp.full_like(requests.sampling.temperature, temperature)
        sampling = dataclasses.replace(requests.sampling, temperature=temperatures)
        requests = dataclasses.replace(requests, sampling=sampling)
        state = speculative.prefill(decoder, params, requests, num_slots=slots)
        while bool(state.is_running.any()):
            state, done = speculative.decode_round(decoder, params, state)
            for row, seen in VerifiedTree.of(done).items():
                trees.setdefault(first + row, []).append(seen)
        first += len(temperatures)
    return trees
