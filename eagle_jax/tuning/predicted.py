"""The costs of a round's parts on a machine that is not at hand, by arithmetic."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from eagle_jax.benchmarks.peaks import Machine
from eagle_jax.benchmarks.roofline import ModelSizes, call_work, part_seconds
from eagle_jax.config import TreeConfig
from eagle_jax.drafting import SmallModel, TreeDrafter
from eagle_jax.drafting.eagle import Eagle3DrafterParams, FeatureHead
from eagle_jax.drafting.small_model import NarrowParams
from eagle_jax.errors import InputError
from eagle_jax.interface import Params, Target
from eagle_jax.models.transformer import Transformer
from eagle_jax.tuning.costs import StepCosts

_DTYPE = "bfloat16"  # That is what published peaks are for.


def predict_steps(
    target: Target,
    drafter: TreeDrafter,
    params: Params,
    machine: Machine,
    trees: Sequence[TreeConfig],
    *,
    num_slots: int,
    batch_size: int,
) -> StepCosts:
    """Returns predicted costs, for weights and caches in bfloat16.

    They are floors, see `eagle_jax.benchmarks.roofline`: nothing is run or compiled.

    Args:
        target: The target.
        drafter: What drafts, with an EAGLE head or a small model.
        params: The parameters of both; only their shapes are read.
        machine: The machine.
        trees: The trees whose rounds are to be predicted.
        num_slots: The number of cache slots, `S`.
        batch_size: The number of requests, `B`.

    Raises:
        InputError: If target or draft model are of another kind.
    """
    sizes = _target_sizes(target, params.target)
    draft = _draft_sizes(drafter, params.drafter)
    path = max(tree.levels for tree in trees) + 1
    widths = sorted({tree.width for tree in trees})

    def seconds(model: ModelSizes, rows: int, scored: int) -> float:
        call = call_work(
            model, machine, rows=rows, scored=scored, slots=num_slots, batch=batch_size
        )
        return sum(part_seconds([call], machine).values())

    return StepCosts(
        token=seconds(sizes, 1, 1),
        verify={n: seconds(sizes, n, n) for n in {tree.num_nodes for tree in trees}},
        read={width: seconds(draft, path, 1) for width in widths},
        step={width: seconds(draft, width, width) for width in widths},
    )


def _target_sizes(target: Any, params: Any) -> ModelSizes:
    if not isinstance(target, Transformer):
        raise InputError(
            f"costs are predicted for this package's decoder, not for "
            f"{type(target).__name__}; measure them"
        )
    table = params.embedding if params.output_head is None else params.output_head
    return ModelSizes.of(target.config.layer, params.layers, table, dtype=_DTYPE)


def _draft_sizes(drafter: TreeDrafter, params: Any) -> ModelSizes:
    model = drafter.model
    if isinstance(model, SmallModel):
        is_narrow = isinstance(params, NarrowParams)
        return _target_sizes(model.target, params.model if is_narrow else params)
    if not isinstance(model, FeatureHead):
        raise InputError(
            "costs are predicted for EAGLE heads and small models, not for "
            f"{type(model).__name__}; measure them"
        )
    if isinstance(params, Eagle3DrafterParams):
        head = dataclasses.replace(params.head, output_head=None)
        table = params.head.output_head
    else:
        head, table = params.head, params.output_head
    table = params.embedding if table is None else table
    return ModelSizes.of(model.config.layer, head, table, dtype=_DTYPE)
