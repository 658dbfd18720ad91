"""Predicted rounds of published models on machines that are not at hand."""

import dataclasses
import math
from collections.abc import Sequence

import jax

from eagle_jax.benchmarks.cases import MODELS, published_head
from eagle_jax.benchmarks.peaks import Machine
from eagle_jax.benchmarks.roofline import (
    ModelSizes,
    part_seconds,
    round_calls,
    token_calls,
)
from eagle_jax.config import TreeConfig
from eagle_jax.errors import InputError
from eagle_jax.markdown import NOTHING, markdown
from eagle_jax.models import eagle_head, transformer
from eagle_jax.models.transformer import TransformerConfig
from eagle_jax.parallel import MeshShape, check_mesh

PAPER_TAU = {
    "Llama-2-7B": 4.70,
    "Llama-2-13B": 4.75,
    "Llama-3-8B": 4.53,
    "Llama-2-70B": 4.48,
    "Llama-3-70B": 4.16,
}
"""Tokens per round of EAGLE-2 on MT-bench at temperature 0 (arXiv 2406.16858, tables 1
and 2), by model."""

_PAPER_SPEEDUP = {
    "Llama-2-7B": 3.43,
    "Llama-2-13B": 4.21,
    "Llama-3-8B": 3.46,
    "Llama-2-70B": 3.51,
    "Llama-3-70B": 3.29,
}
USABLE = 0.95
"""The share of the memory that weights and caches may fill: what a program needs beside
them is little, but never nothing."""

_HEADER = (
    *("model", "machine", "context", "tree", "token ms", "round ms", "round / token"),
    *("most of a round", "tokens/round", "speedup"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Predicted:
    """The predicted costs of a token and of a round.

    Attributes:
        token: The seconds of a token of plain decoding.
        round: The seconds of a round by part, see `roofline.PARTS`.
    """

    token: float
    round: dict[str, float]

    @property
    def ratio(self) -> float:
        """The round over the token: how many tokens a round must give to pay."""
        return sum(self.round.values()) / self.token

    @property
    def bound(self) -> str:
        """The part that takes most of a round, with its share."""
        part = max(self.round, key=lambda name: self.round[name])
        return f"{part} {self.round[part] / sum(self.round.values()):.0%}"


def predict_round(
    target: ModelSizes,
    draft: ModelSizes,
    machine: Machine,
    tree: TreeConfig,
    *,
    slots: int,
    batch: int = 1,
) -> Predicted:
    """Returns the predicted costs of a token and of a round.

    Args:
        target: The target.
        draft: The model that drafts.
        machine: The machine.
        tree: The tree.
        slots: The slots of all caches, `S`.
        batch: The number of requests, `B`.
    """
    context = {"slots": slots, "batch": batch}
    token = part_seconds(token_calls(target, machine, **context), machine)
    calls = round_calls(target, draft, machine, tree, **context)
    return Predicted(token=sum(token.values()), round=part_seconds(calls, machine))


def check_split(config: TransformerConfig, machine: Machine) -> None:
    """Refuses a target whose sizes a machine's chips do not divide.

    Args:
        config: The target's sizes.
        machine: The machine.

    Raises:
        InputError: If they do not; it names the size and what divides it.
    """
    mesh = MeshShape(tensor=machine.num_chips)
    check_mesh(mesh, config, batch_size=1, num_devices=mesh.num_devices)


def lacking_gib(
    models: Sequence[ModelSizes], machine: Machine, *, slots: int
) -> int | None:
    """Returns the GiB that models and their caches need, if there are too few.

    Args:
        models: The models of a pair.
        machine: The machine.
        slots: The slots of all requests' caches together.

    Returns:
        The GiB, rounded up; `None` where they fit.
    """
    needed = sum(model.gib(slots, machine) for model in models)
    fits = needed <= USABLE * machine.chip.memory_gib
    return None if fits else math.ceil(needed * machine.num_chips)


def published_sizes(
    model: str, draft_vocabulary: int | None = None
) -> tuple[ModelSizes, ModelSizes]:
    """Returns the sizes of a published model and of its EAGLE head, in bfloat16.

    Args:
        model: The model's name, of `cases.MODELS`.
        draft_vocabulary: The most tokens that the head drafts, `W`; `None` for all.
    """
    config, dtype = MODELS[model], "bfloat16"
    head, key = published_head(config), jax.random.key(0)
    weights = jax.eval_shape(lambda: transformer.init_params(key, config, dtype))
    drafts = jax.eval_shape(lambda: eagle_head.init_params(key, head, dtype))
    table = weights.output_head
    assert table is not None, "published models have output heads"
    width, size = table.shape
    drafted = min(draft_vocabulary or size, size)
    columns = jax.ShapeDtypeStruct((width, drafted), table.dtype)
    tables = weights.embedding, table
    # The head's own tables are the target's, but for a part of the columns.
    own = columns if drafted < size else ()
    return (
        ModelSizes.of(config.layer, weights.layers, table, dtype=dtype, tables=tables),
        ModelSizes.of(head.layer, drafts, columns, dtype=dtype, tables=own),
    )


def prediction_table(
    machines: Sequence[Machine],
    contexts: Sequence[int],
    trees: Sequence[TreeConfig],
    *,
    tokens_per_round: float | None = None,
    draft_vocabulary: int | None = None,
) -> str:
    """Returns a markdown table of predictions for the models of `PAPER_TAU`.

    Args:
        machines: The machines; a model that one cannot hold or split has no figures
            there.
        contexts: The numbers of cache slots, `S`.
        trees: The trees that are drafted.
        tokens_per_round: The tokens that a round gives; `None` for `PAPER_TAU`.
        draft_vocabulary: See `published_sizes`.
    """
    rows = []
    for model, paper in PAPER_TAU.items():
        target, draft = published_sizes(model, draft_vocabulary)
        published = paper / _PAPER_SPEEDUP[model]
        row = [model, "the paper's GPU", NOTHING, NOTHING, NOTHING, NOTHING]
        rows.append([*row, f"{published:.2f}", NOTHING, f"{paper:.2f}"])
        rows[-1].append(f"{_PAPER_SPEEDUP[model]:.2f}")
        tau = tokens_per_round or paper
        for machine in machines:
            for slots in contexts:
                misfit = _misfit(model, (target, draft), machine, slots)
                for tree in trees:
                    shown = f"{tree.num_nodes}/{tree.depth}/{tree.width}"
                    row = [model, str(machine), f"{slots:,}", shown]
                    if misfit is None:
                        row += _row(target, draft, machine, tree, slots, tau)
                    else:
                        row += [NOTHING, NOTHING, NOTHING, misfit, NOTHING, NOTHING]
                    rows.append(row)
    return markdown(_HEADER, rows)


def _misfit(
    model: str, sizes: Sequence[ModelSizes], machine: Machine, slots: int
) -> str | None:
    """Returns why a machine cannot run a published model, `None` if it can."""
    try:
        check_split(MODELS[model], machine)
    except InputError:
        return f"{machine.num_chips} chips do not divide it"
    needed = lacking_gib(sizes, machine, slots=slots)
    return None if needed is None else f"needs {needed} GiB"


def _row(
    target: ModelSizes,
    draft: ModelSizes,
    machine: Machine,
    tree: TreeConfig,
    slots: int,
    tau: float,
) -> list[str]:
    found = predict_round(target, draft, machine, tree, slots=slots)
    return [
        f"{1e3 * found.token:.2f}",
        f"{1e3 * found.token * found.ratio:.2f}",
        f"{found.ratio:.2f}",
        found.bound,
        f"{tau:.2f}",
        f"{tau / found.ratio:.2f}",
    ]
