"""The costs of a round's parts on a machine that is not at hand, by arithmetic."""

from collections.abc import Sequence

from eagle_jax.benchmarks.pair_sizes import draft_sizes, target_sizes
from eagle_jax.benchmarks.peaks import Machine
from eagle_jax.benchmarks.predictions import USABLE, check_split, lacking_gib
from eagle_jax.benchmarks.roofline import ModelSizes, call_work, part_seconds
from eagle_jax.checkpoints.load import target_shapes
from eagle_jax.config import TreeConfig
from eagle_jax.drafting import TreeDrafter
from eagle_jax.errors import InputError
from eagle_jax.interface import Params, Target
from eagle_jax.models.transformer import Transformer, TransformerConfig
from eagle_jax.tuning.costs import StepCosts

_DTYPE = "bfloat16"  # That is what published peaks are for.


def check_target(
    config: TransformerConfig,
    bits: int | None,
    machine: Machine,
    *,
    num_slots: int,
    batch_size: int,
) -> None:
    """Refuses a target that a machine cannot hold or split, before it is read.

    Args:
        config: The target's sizes.
        bits: The bits of its layers' matrices, 8 or 4; `None` if they are not
            quantized.
        machine: The machine.
        num_slots: The least number of cache slots, `S`.
        batch_size: The number of requests, `B`.

    Raises:
        InputError: If the chips do not divide it, or have too little memory.
    """
    check_split(config, machine)
    target = Transformer(config=config, dtype=_DTYPE)
    sizes = target_sizes(target, target_shapes(config, bits), dtype=_DTYPE)
    _check_memory((sizes,), machine, batch_size, num_slots)


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

    They are near floors (`eagle_jax.benchmarks.roofline`): nothing is run or compiled.

    Args:
        target: The target.
        drafter: What drafts, with an EAGLE head or a small model.
        params: The parameters of both; only their shapes are read.
        machine: The machine.
        trees: The trees whose rounds are to be predicted.
        num_slots: The number of cache slots, `S`.
        batch_size: The number of requests, `B`.

    Raises:
        InputError: If target or draft model are of another kind or do not fit, or the
            chips do not divide the target.
    """
    sizes = target_sizes(target, params.target, dtype=_DTYPE)
    assert isinstance(target, Transformer), "the sizes of others are refused"
    check_split(target.config, machine)
    draft = draft_sizes(drafter.model, params.drafter, dtype=_DTYPE)
    _check_memory((sizes, draft), machine, batch_size, num_slots)
    path = max(tree.levels for tree in trees) + 1
    widths = sorted({tree.width for tree in trees})

    def seconds(
        model: ModelSizes, rows: int, scored: int, *, follows: bool = False
    ) -> float:
        context = {"slots": num_slots, "batch": batch_size}
        call = call_work(
            model, machine, rows=rows, scored=scored, follows=follows, **context
        )
        return sum(part_seconds([call], machine).values())

    return StepCosts(
        token=seconds(sizes, 1, 1),
        verify={n: seconds(sizes, n, n) for n in {tree.num_nodes for tree in trees}},
        read={width: seconds(draft, path, 1) for width in widths},
        step={width: seconds(draft, width, width, follows=True) for width in widths},
    )


def _check_memory(
    models: Sequence[ModelSizes], machine: Machine, batch_size: int, num_slots: int
) -> None:
    needed = lacking_gib(models, machine, slots=batch_size * num_slots)
    if needed is not None:
        raise InputError(
            f"{machine} has {machine.gib:g} GiB, of which {USABLE:.0%} can be used, "
            f"and weights with caches of {batch_size} x {num_slots} slots need "
            f"{needed}; name a larger machine, or shorten the texts"
        )
