"""Plans of runs: methods, their settings, temperatures and batch sizes."""

import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from eagle_jax.config import from_table, shortest
from eagle_jax.decoding.speculative import AcceptanceRule
from eagle_jax.drafting import TreeDrafter, find_tree_drafter
from eagle_jax.errors import InputError
from eagle_jax.generation.config import GenerateConfig
from eagle_jax.generation.drafts import DraftSource, open_draft_model
from eagle_jax.generation.pairs import PairSource
from eagle_jax.interface import Drafter
from eagle_jax.methods import METHODS, Method, Weights
from eagle_jax.models.transformer import TransformerConfig
from eagle_jax.parsing import parse_json

Models = dict[Weights, DraftSource]
"""The opened draft models by their kind."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunPlan:
    """The plan of a run: one way of decoding all questions.

    Attributes:
        label: The method as it was given, with its settings.
        config: The method and all settings.
    """

    label: str
    config: GenerateConfig

    @property
    def method(self) -> Method:
        """The method that drafts."""
        return self.config.method

    @property
    def acceptance(self) -> AcceptanceRule:
        """The rule of acceptance; plain decoding draws the tokens of "coupled"."""
        return self.config.sampling.rule

    @property
    def model_id(self) -> str:
        """The name of the run and its file: its label, temperature and batch size."""
        name = re.sub(r"[^\w.+=-]+", "-", self.label)
        temperature = shortest(self.config.sampling.temperature)
        return f"{name}-t{temperature}-b{self.config.decoding.batch_size}"


def parse_method(text: str, config: GenerateConfig) -> RunPlan:
    """Reads a method with its settings.

    Args:
        text: The method as `name` or `name:key=value,key=value`, where keys are fields
            of the method's own settings, `acceptance` and `draft_vocabulary`.
        config: The settings that hold where the text names none.

    Raises:
        InputError: If the method or a key is unknown, or a value cannot be used.
    """
    name, _, given = text.partition(":")
    if name not in METHODS:
        known = ", ".join(METHODS)
        raise InputError(f"`methods` {text}: {name!r} is no method; known are {known}")
    config = config.with_method(name)
    known = config.method.reads
    values: dict[str, Any] = {}
    for part in filter(None, given.split(",")):
        key, equals, value = part.partition("=")
        if not equals or key not in known:
            wanted = f"key=value with {', '.join(known)}" if known else "no settings"
            raise InputError(f"`methods` {text}: {part!r} is not known; give {wanted}")
        if key in values:
            raise InputError(f"`methods` {text}: {key} is given twice")
        values[key] = _read_value(value)
    if config.method.is_plain:
        values["acceptance"] = "coupled"
    sections: dict[str, Any] = {}
    for name, settings in vars(config).items():
        mine = {key: value for key, value in values.items() if hasattr(settings, key)}
        if mine:
            # The types are checked alone; sizes must fit with those not given, too.
            typed = from_table(type(settings), mine, f"`methods` {text}")
            chosen = {key: getattr(typed, key) for key in mine}
            sections[name] = dataclasses.replace(settings, **chosen)
    config = dataclasses.replace(config, **sections)
    return RunPlan(label=text, config=config)


def make_runs(
    methods: Sequence[RunPlan],
    temperatures: Sequence[float],
    batch_sizes: Sequence[int],
) -> list[RunPlan]:
    """Returns every method at every temperature and batch size.

    Runs that decode alike are kept once: at temperature 0 there is but one rule of
    acceptance, and without coupled draws there is no noise to share.

    Raises:
        InputError: If a value lies outside its range, or two runs with different
            settings have one name.
    """
    runs: dict[str, RunPlan] = {}
    names: dict[str, RunPlan] = {}
    every = itertools.product(temperatures, batch_sizes, methods)
    for temperature, batch_size, method in every:
        config = method.config.at(temperature)
        run = dataclasses.replace(
            method,
            config=dataclasses.replace(
                config,
                tree=_without_idle_noise(config),
                decoding=dataclasses.replace(config.decoding, batch_size=batch_size),
            ),
        )
        settings = [
            run.method.name,
            run.acceptance,
            temperature,
            batch_size,
            _drafts(run),
        ]
        run = runs.setdefault(json.dumps(settings), run)
        if names.setdefault(run.model_id, run) is not run:
            raise InputError(
                f"`methods` {names[run.model_id].label} and {run.label} would both be "
                f"written to {run.model_id}.jsonl; evaluate them into two folders"
            )
    return list(runs.values())


def _without_idle_noise(config: GenerateConfig) -> Any:
    """Returns the method's settings without those of shared noise if there is none."""
    own, tree = vars(config.tree), config.tree
    if config.sampling.rule == "coupled" or "shared_noise" not in own:
        return tree
    if own.get("kappa") is not None or own.get("sharpness") is not None:
        tree = dataclasses.replace(tree, calibration="none", kappa=None, sharpness=None)
    return dataclasses.replace(tree, shared_noise=True)


def run_settings(plan: RunPlan, drafter: Drafter | None) -> dict[str, Any]:
    """Returns the settings of a run's method, as JSON can hold them.

    Args:
        plan: The run's plan.
        drafter: The run's drafter, which has its own numbers of nodes and levels.
    """
    config, grower = plan.config, find_tree_drafter(drafter)
    # The switch's copies may be longer than its tree is deep.
    sized = grower or drafter
    settings = {
        "method": plan.method.name,
        "label": plan.label,
        "temperature": config.sampling.temperature,
        "top_p": config.sampling.top_p,
        "top_k": config.sampling.top_k,
        "min_p": config.sampling.min_p,
        "seed": config.sampling.seed,
        "acceptance": plan.acceptance,
        "batch_size": config.decoding.batch_size,
        **_drafts(plan),
        "num_nodes": getattr(sized, "num_nodes", 1),  # The root alone.
        "depth": getattr(sized, "depth", 0),
        "max_new_tokens": config.decoding.max_new_tokens,
        "ignore_eos": config.decoding.ignore_eos,
    }
    return settings if grower is None else settings | _confidence(plan, grower)


def _confidence(plan: RunPlan, drafter: TreeDrafter) -> dict[str, Any]:
    """Returns the settings of confidences that a drafter goes by."""
    is_sampled = plan.acceptance == "coupled"
    is_shared = is_sampled and drafter.shares_noise
    calibration = drafter.calibration
    used = calibration.sampled if is_shared else calibration.greedy
    name = getattr(plan.config.tree, "calibration", None) or "the draft's own"
    is_scaled = is_shared or not used.is_plain
    return {
        "shared_noise": is_shared if is_sampled else None,
        "calibration": None if used.is_plain else name,
        "kappa": used.kappa if is_scaled else None,
        "sharpness": used.sharpness if is_scaled else None,
    }


def open_models(
    runs: Sequence[RunPlan],
    target: TransformerConfig,
    *,
    draft_of: Callable[[Weights], str | None],
    dtype: str,
) -> Models:
    """Opens the draft models that some runs need, each once; reads no weights.

    Args:
        runs: The plans of the runs.
        target: The target's sizes.
        draft_of: The function from a kind of weights to their folder or hub name,
            `None` for none.
        dtype: The type of the weights; not "auto".

    Raises:
        InputError: If a model is missing or does not fit the target.
    """
    models: Models = {}
    for run in runs:
        weights = run.method.weights
        if weights is None or weights in models:
            continue
        if (name := draft_of(weights)) is not None:
            models[weights] = open_draft_model(
                name, target, dtype=dtype, weights=weights
            )
    return models


def open_run(plan: RunPlan, models: Models, target: PairSource) -> PairSource:
    """Returns the target with a run's drafter and draft model; reads no weights.

    Args:
        plan: The run's plan.
        models: The models that `open_models` returned.
        target: The target, opened.

    Raises:
        InputError: If the tree names a calibration that cannot be read, or the tokens
            that are drafted cannot be used.
    """
    method, config = plan.method, plan.config
    reads = "draft_vocabulary" in method.reads
    draft = None if method.weights is None else models[method.weights]
    own = dataclasses.replace(target, method=method, draft=draft)
    own = own.with_vocabulary(config.decoding.draft_vocabulary if reads else None)
    return own.with_settings(config.tree, plan.acceptance)


def _read_value(text: str) -> Any:
    """Returns a number or a truth value if the text is one, the text itself if not."""
    try:
        return parse_json(text, text)
    except InputError:
        return text


def _drafts(plan: RunPlan) -> dict[str, Any]:
    """Returns those settings of drafts that a method reads."""
    every = vars(plan.config.tree) | vars(plan.config.decoding)
    names = [name for name in plan.method.reads if name != "acceptance"]
    return {name: every[name] for name in names}
