"""Calibration of a pair at once: it decodes prompts, and its drafts are fitted."""

from collections.abc import Sequence

from eagle_jax.checkpoints.heads import Kind
from eagle_jax.checkpoints.hub import CALIBRATION_FILE
from eagle_jax.config import TreeConfig
from eagle_jax.decoding import speculative
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.requests import Requests, cache_slots, make_requests
from eagle_jax.drafting import (
    Calibration,
    Confidence,
    DraftModel,
    TreeDrafter,
)
from eagle_jax.errors import InputError
from eagle_jax.evaluation.calibrate import (
    PLAIN,
    By,
    Fit,
    Observed,
    calibration_file,
    describe,
    fit,
)
from eagle_jax.evaluation.nodes import VerifiedTree
from eagle_jax.files import write_json
from eagle_jax.generation.heads import open_heads
from eagle_jax.interface import Params, Target
from eagle_jax.progress import Report
from eagle_jax.training.trainer import Trained

TRIED: dict[Kind, tuple[Confidence, ...]] = {
    "greedy": (Confidence(),),
    "sampled": (
        Confidence(kappa=1.0),
        Confidence(kappa=2.0),
        Confidence(kappa=1.0, sharpness=1.2),
    ),
}
"""The confidences that are decoded with, by kind of text, each in its own program."""


def calibrate_pair(
    target: Target,
    model: DraftModel,
    params: Params,
    prompts: Sequence[Sequence[int]],
    *,
    tree: TreeConfig,
    max_new_tokens: int,
    max_length: int,
    stop_tokens: Sequence[int] = (),
    by: By = "rank",
) -> dict[Kind, Fit]:
    """Fits a draft model's confidences to texts that its target writes now.

    Args:
        target: The target. Static.
        model: The draft model. Static.
        params: The parameters of target and draft model.
        prompts: The prompts' ids, at least two, of texts that the draft was not trained
            on.
        tree: The tree that is drafted; deeper trees cannot use the calibration.
        max_new_tokens: The tokens to generate at most per prompt, at temperature 0 and
            again at temperature 1.
        max_length: The largest number of tokens of prompt and output.
        stop_tokens: The ids that end a text.
        by: The cells of exponents, see `calibrate.fit`.

    Returns:
        The fits by kind of text.

    Raises:
        InputError: If there is but one prompt, or nothing was drafted.
    """
    fits: dict[Kind, Fit] = {}
    for kind, confidences in TRIED.items():
        observed = [
            _observe(
                target,
                TreeDrafter(
                    model=model,
                    tree=tree,
                    calibration=Calibration(**{kind: confidence}),
                ),
                params,
                make_requests(
                    prompts,
                    max_new_tokens=max_new_tokens,
                    max_length=max_length,
                    stop_tokens=stop_tokens,
                    temperature=1.0 if kind == "sampled" else 0.0,
                    seeds=range(len(prompts)),
                ),
                confidence,
            )
            for confidence in confidences
        ]
        fits[kind] = fit(observed, by=by, plain=PLAIN[kind])
    return fits


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
    model, load = open_heads(trained.head, target.config, step_config.dtype, "eagle2")
    _, head = load(
        trained.head, target.config, target_params, step_config.dtype, everywhere
    )
    try:
        fits = calibrate_pair(
            target,
            model,
            Params(target=target_params, drafter=model.join(head, target_params)),
            trained.data.prompts,
            tree=config.tree,
            max_new_tokens=config.run.eval_new_tokens,
            max_length=target.config.max_positions,
            stop_tokens=trained.data.stop_tokens,
        )
    except InputError as error:
        report(f"warning: no calibration is written: {error}")
        return
    source = ["held-out prompts of eagle-jax train"]
    result = calibration_file(target.config.vocab_size, fits, source)
    write_json(trained.head / CALIBRATION_FILE, result)
    for kind, fitted in fits.items():
        report(f"{kind}: {describe(fitted)}")


def _observe(
    target: Target,
    drafter: TreeDrafter,
    params: Params,
    requests: Requests,
    confidence: Confidence,
) -> Observed:
    """Decodes requests to their end, and returns every tree."""
    is_sampled = bool(requests.sampling.temperature.any())
    decoder = Decoder(
        target=target,
        drafter=drafter,
        acceptance="coupled" if is_sampled else "greedy",
    )
    slots = cache_slots(requests, depth=drafter.depth)
    state = speculative.prefill(decoder, params, requests, num_slots=slots)
    trees: dict[int, list[VerifiedTree]] = {}
    while bool(state.is_running.any()):
        state, done = speculative.decode_round(decoder, params, state)
        for row, seen in VerifiedTree.of(done).items():
            trees.setdefault(row, []).append(seen)
    return Observed(confidence=confidence, depth=drafter.depth, trees=trees)
