"""Plans of an evaluation: its models, and the runs of methods that answer."""

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle_jax.config import DRAWS, shortest
from eagle_jax.drafting import find_tree_drafter
from eagle_jax.engine.config import AutoTree, PairConfig
from eagle_jax.errors import InputError
from eagle_jax.evaluation.questions import Template
from eagle_jax.interface import Drafter
from eagle_jax.methods import EAGLE, Method
from eagle_jax.parsing import parse_json


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunPlan:
    """The plan of a run: one way of decoding all questions.

    Attributes:
        label: The method as it was given, with its settings.
        config: The method and all settings.
    """

    label: str
    config: PairConfig

    @property
    def model_id(self) -> str:
        """The name of the run and its file: its label, temperature and batch size."""
        name = re.sub(r"[^\w.+=-]+", "-", self.label)
        temperature = shortest(self.config.request.temperature)
        return f"{name}-t{temperature}-b{self.config.batch_size}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """The models that answer the questions, and the folder of their answers.

    Attributes:
        target: A Hugging Face folder or hub name.
        drafts: The folders or hub names of what runs draft with, by `Weights.option`,
            such as `draft` for an EAGLE head.
        output: The folder of the records, a file per run, see `runs`; it need
            not exist.
        template: The form in which turns become prompts.
        with_nodes: Whether to record the drafted nodes.
    """

    target: str
    drafts: Mapping[str, str]
    output: Path
    template: Template = "none"
    with_nodes: bool = False

    def draft_of(self, method: Method) -> str | None:
        """Returns the weights that a method drafts with, if any; they must be given."""
        weights = method.weights
        if weights is None:
            return None
        if weights.option not in self.drafts:
            raise InputError(
                f"method {method.name} needs `{weights.option}`, {weights.description}"
            )
        return self.drafts[weights.option]

    def path(self, plan: RunPlan) -> Path:
        """Returns the file of a run's records."""
        return self.output / f"{plan.model_id}.jsonl"


def parse_method(text: str, config: PairConfig) -> RunPlan:
    """Reads a method with its settings.

    Args:
        text: The method as `name` or `name:key=value,key=value`, where keys are fields
            of the method's own settings, `acceptance`, `draft_vocabulary` and
            `draft_quantization`; `tree` may be "auto". Without it every round drafts
            the largest tree.
        config: The settings that hold where the text names none.
    """
    name, _, given = text.partition(":")
    values: dict[str, Any] = {}
    try:
        config = config.with_method(name)
        known = config.method_row.reads
        if "draft_vocabulary" not in known:
            config = dataclasses.replace(
                config, draft_vocabulary=None, draft_quantization="none"
            )
        if config.method_row.is_plain:
            values["acceptance"] = "coupled"
        for part in filter(None, given.split(",")):
            key, equals, value = part.partition("=")
            if part != "tree=auto" and (not equals or key not in known):
                form = f"key=value with {', '.join(known)}" if known else "no settings"
                raise InputError(f"{part!r} is not known; give {form}")
            values[key] = _read_value(value)
        config = config.with_(**values)
    except InputError as error:
        raise InputError(f"`methods` {text}: {error}") from error
    return RunPlan(label=text, config=config if "tree" in values else config.fixed)


def make_runs(
    methods: Sequence[RunPlan],
    temperatures: Sequence[float],
    batch_sizes: Sequence[int],
) -> list[RunPlan]:
    """Returns every method at every temperature and batch size."""
    runs: dict[str, RunPlan] = {}
    every = itertools.product(temperatures, batch_sizes, methods)
    for temperature, batch_size, method in every:
        config = method.config.with_(temperature=temperature, batch_size=batch_size)
        run = dataclasses.replace(method, config=config)
        other = runs.setdefault(run.model_id, run)
        if other.label != run.label:
            raise InputError(
                f"`methods` {other.label} and {run.label} would both be written to "
                f"{run.model_id}.jsonl; evaluate them into two folders"
            )
    return list(runs.values())


def run_settings(plan: RunPlan, drafter: Drafter | None) -> dict[str, Any]:
    """Returns the settings of a run's method, as JSON can hold them.

    The run's drafter has its own numbers of nodes and levels.
    """
    config, grower = plan.config, find_tree_drafter(drafter)
    # The switch's copies may be longer than its tree is deep.
    sized = grower or drafter
    every = vars(config.own) | {name: getattr(config, name) for name in EAGLE.shared}
    settings = {
        "method": config.method,
        "label": plan.label,
        **{name: getattr(config.request, name) for name in (*DRAWS, "seed")},
        "acceptance": config.rule,
        "batch_size": config.batch_size,
        **{name: every[name] for name in config.method_row.reads if name in every},
        "num_nodes": getattr(sized, "num_nodes", 1),  # The root alone.
        "depth": getattr(sized, "depth", 0),
        "max_new_tokens": config.request.max_new_tokens,
        "ignore_eos": config.request.ignore_eos,
    }
    if isinstance(config.tree, AutoTree):
        settings["tree"] = "auto"
    if grower is None:
        return settings
    is_sampled = config.rule == "coupled"
    is_shared = is_sampled and grower.shares_noise
    calibration = grower.calibration
    used = calibration.sampled if is_shared else calibration.greedy
    name = getattr(config.own, "calibration", None) or "the draft's own"
    return settings | {
        "shared_noise": is_shared if is_sampled else None,
        "calibration": None if used.is_plain else name,
    }


def _read_value(text: str) -> Any:
    """Returns a number or a truth value if the text is one, the text itself if not."""
    try:
        value = parse_json(text, text)
    except InputError:
        return text
    return text if value is None else value
