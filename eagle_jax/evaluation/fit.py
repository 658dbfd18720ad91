"""Calibration: a pair decodes prompts, and its draft's confidences are fitted.

The fitted model is in `exponents`. Under shared noise confidences depend on `kappa` and
the sharpness too (`drafting.calibration`): each pair of them that is decoded with gets
exponents of its own, and the one is taken whose trees, cut from the decoded ones,
accept most.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from eagle_jax.checkpoints.draft_files import Kind, calibration_part
from eagle_jax.config import SamplingConfig
from eagle_jax.decoding.requests import bucket_prompt
from eagle_jax.drafting import Calibration, TreeDrafter, find_tree_drafter
from eagle_jax.drafting.calibration import Confidence
from eagle_jax.errors import InputError
from eagle_jax.evaluation.exponents import (
    MIN_TRIALS,
    calibration_error,
    fit_exponents,
    tokens_per_root,
)
from eagle_jax.evaluation.nodes import VerifiedTree, tried_in
from eagle_jax.generation.config import GenerateConfig
from eagle_jax.generation.pairs import LoadedPair
from eagle_jax.generation.runner import Runner
from eagle_jax.progress import Progress, show_nothing

Trees = Mapping[int, Sequence[VerifiedTree]]
"""The verified trees of all rounds by the number of their prompt."""

TRIED: dict[Kind, tuple[Confidence, ...]] = {
    "greedy": (Confidence(),),
    "sampled": (
        Confidence(kappa=2.0),
        Confidence(kappa=1.0),
        Confidence(kappa=3.0),
        Confidence(kappa=1.0, sharpness=1.2),
    ),
}
"""The confidences that are decoded with, by kind of text, each in its own program.

The first is the nearest to what is drafted with where there is no calibration.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fit:
    """A fitted confidence, and the figures by which it is judged.

    Errors and tokens per root are of prompts that the judged fit did not see: every
    second one.

    Attributes:
        confidence: The confidence, fitted to all prompts.
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
    rows: int
    num_nodes: int
    ece_before: float
    ece_after: float
    tokens_before: float
    tokens_after: float
    tried: dict[Confidence, float]


def calibrate_pair(
    pair: LoadedPair,
    config: GenerateConfig,
    prompts: Sequence[list[int]],
    progress: Progress = show_nothing,
) -> dict[Kind, Fit]:
    """Fits a draft model's confidences to texts that its target writes now.

    Args:
        pair: The pair, whose draft model grows dynamic trees.
        config: The tree, than which no deeper one can use the calibration, the lengths
            of texts and the size of batches.
        prompts: The ids of at least two prompts, on which the draft was not trained.
            Their texts are written at temperature 0, and at 1 once for each confidence
            that is tried.
        progress: Called to show how far work is, with a label and a total.

    Returns:
        The fits by kind of text.
    """
    grower = find_tree_drafter(pair.drafter)
    assert grower is not None, "its method drafts with a model"
    drafter = TreeDrafter(model=grower.model, tree=config.tree.shape)
    fits: dict[Kind, Fit] = {}
    count = itertools.count(1)
    with progress("decoding", sum(map(len, TRIED.values()))) as done:
        for kind, confidences in TRIED.items():
            sampling = SamplingConfig(temperature=0.0 if kind == "greedy" else 1.0)
            own = dataclasses.replace(config, sampling=sampling)
            observed: dict[Confidence, Trees] = {}
            for confidence in confidences:
                calibration = Calibration(**{kind: confidence})
                tried = dataclasses.replace(drafter, calibration=calibration)
                observed[confidence] = _decode(pair, tried, own, prompts)
                done(next(count))
            fits[kind] = fit(observed, drafter.depth)
    return fits


def fit(observed: Mapping[Confidence, Trees], depth: int) -> Fit:
    """Fits confidences to one kind of text, and judges that on other prompts.

    Args:
        observed: The trees, all of one size, by the confidence, without exponents, that
            they were drafted with; those of at least two prompts each. The first
            stands for drafts without a calibration.
        depth: The depth of the trees, `D`.

    Raises:
        InputError: If there is but one prompt, or nothing was drafted.
    """
    prompts = sorted(set.intersection(*(set(trees) for trees in observed.values())))
    if len(prompts) < 2:
        raise InputError(
            "a fit is judged on prompts that it did not see: give at least 2 that are "
            "continued by more than a token"
        )

    def trees(confidence: Confidence, prompts: Sequence[int]) -> list[VerifiedTree]:
        return [tree for number in prompts for tree in observed[confidence][number]]

    def fitted(confidence: Confidence, prompts: Sequence[int]) -> Confidence:
        trials = tried_in(trees(confidence, prompts))
        if not len(trials):
            raise InputError("there are rounds, but nothing was drafted in them")
        exponents = fit_exponents(trials, depth)
        return dataclasses.replace(confidence, exponents=exponents)

    half, rest = prompts[::2], prompts[1::2]
    before = next(iter(observed))
    nodes = max(len(trees(before, half)[0].parents) // 2, 2)
    on_half = {one: fitted(one, half) for one in observed}
    tried = {
        one: tokens_per_root(trees(one, half), on_half[one], nodes) for one in observed
    }
    best = max(tried, key=lambda one: tried[one])
    unseen, seen_before = trees(best, rest), trees(before, rest)
    return Fit(
        confidence=fitted(best, prompts),
        rows=len(tried_in(trees(best, prompts))),
        num_nodes=nodes,
        ece_before=calibration_error(tried_in(seen_before), Confidence()),
        ece_after=calibration_error(tried_in(unseen), on_half[best]),
        tokens_before=tokens_per_root(seen_before, before, nodes),
        tokens_after=tokens_per_root(unseen, on_half[best], nodes),
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
    if len({exponent for row in found.exponents for exponent in row}) == 1:
        line += (
            "; one exponent for all nodes changes no order: a depth or rank needs "
            f"{MIN_TRIALS} tried nodes for its own, so give more prompts"
        )
    return line


def calibration_file(
    vocab_size: int, fits: Mapping[Kind, Fit], source: Sequence[str]
) -> dict[str, Any]:
    """Returns a calibration file's content, as `checkpoints.draft_files` reads it.

    Its source are lines that say what was decoded.
    """
    parts: dict[str, Any] = {}
    for kind, fitted in fits.items():
        figures = dict(vars(fitted))
        del figures["confidence"], figures["tried"]
        parts[kind] = calibration_part(fitted.confidence) | figures
    return {"vocab_size": vocab_size, **parts, "source": list(source)}


def _decode(
    pair: LoadedPair,
    drafter: TreeDrafter,
    config: GenerateConfig,
    prompts: Sequence[list[int]],
) -> Trees:
    """Decodes prompts to the end of their texts, and returns every tree."""
    longest = max(map(len, prompts), default=1)
    new_tokens = config.decoding.max_new_tokens
    runner = Runner(
        pair=pair,
        drafter=drafter,
        config=config,
        max_length=min(longest + new_tokens, pair.target.config.max_positions),
        prompt_bucket=bucket_prompt(longest),
        batch_size=max(min(config.decoding.batch_size, len(prompts)), 1),
    )
    trees: dict[int, list[VerifiedTree]] = {}
    for start in range(0, len(prompts), runner.batch_size):
        batch = list(prompts[start : start + runner.batch_size])
        seeds = list(range(start, start + len(batch)))
        for _, done in runner.rounds(batch, seeds):
            if done is not None:
                for row, tree in VerifiedTree.of(done).items():
                    trees.setdefault(start + row, []).append(tree)
    return trees
