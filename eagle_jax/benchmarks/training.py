"""The cost of training a head, beside the target's forward that it needs."""

import dataclasses
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.benchmarks.rounds import in_turn
from eagle_jax.heads import HEADS
from eagle_jax.heads.eagle.loss import EagleLoss
from eagle_jax.heads.eagle3.head import Eagle3Settings
from eagle_jax.heads.rows import PackedRows
from eagle_jax.models.transformer import Transformer, TransformerConfig
from eagle_jax.training.config import DataConfig, TrainConfig, new_sizes
from eagle_jax.training.step import StepConfig, init_state, read_target, train_step

TRAININGS: dict[str, TrainConfig] = {
    **{name: TrainConfig(head=head.settings()) for name, head in HEADS.items()},
    "alignment 3": TrainConfig(loss=EagleLoss(alignment=3, top_k_loss=10)),
}
"""The ways of training that are timed, each with heads of the published sizes."""

TIMED = ("forward", "step", "step, cached features")
"""The names of what is timed: the target alone, and a step with and without it."""

_ENOUGH_LAYERS = 7  # For the three layers that published EAGLE-3 heads read.


def training_step(
    name: str, target: TransformerConfig, dtype: str, *, row_length: int
) -> StepConfig:
    """Returns the static settings of a step of one of `TRAININGS`.

    Of a target with fewer than 7 layers an EAGLE-3 head reads the first three; with
    fewer than three it is refused.
    """
    config = TRAININGS[name]
    head = config.head
    if isinstance(head, Eagle3Settings) and target.num_layers < _ENOUGH_LAYERS:
        head = dataclasses.replace(head, feature_layers="0 1 2")
    data = DataConfig(row_length=row_length)
    sizes = new_sizes(target, dataclasses.replace(config, head=head, data=data))
    return StepConfig(
        target=Transformer(config=config.kind.target(target, sizes), dtype=dtype),
        head=sizes,
        loss=config.loss,
        optimizer=config.optimizer,
        steps=10_000,
        dtype=dtype,
    )


def time_training(
    config: StepConfig,
    target_params: Any,
    *,
    batch_size: int,
    row_length: int,
    repeats: int,
) -> dict[str, list[float]]:
    """Times what `TIMED` names, in turn, on arbitrary rows.

    Args:
        config: The static settings of the step.
        target_params: The target's frozen parameters.
        batch_size: The number of rows, `B`.
        row_length: The number of tokens per row, `T`.
        repeats: The number of measurements of each.

    Returns:
        The tokens per second of each measurement, by its name of `TIMED`.
    """
    shape = (batch_size, row_length)
    vocab_size = config.target.config.vocab_size
    tokens = np.random.default_rng(0).integers(vocab_size, size=shape)
    rows = PackedRows(
        tokens=jnp.asarray(tokens, jnp.int32),
        segments=jnp.ones(shape, jnp.int32),
        positions=jnp.broadcast_to(jnp.arange(row_length), shape),
        loss_mask=jnp.ones(shape, bool),
    )
    forward = jax.jit(read_target, static_argnums=0)
    step = jax.jit(train_step, static_argnames=("config",), donate_argnames=("state",))
    features = forward(config, target_params, rows)
    # Compiled, so that no two weights are one array, which cannot be donated.
    state = jax.jit(init_state, static_argnums=(0, 1))(config, 0)

    def run(name: str) -> float:
        nonlocal state
        result: Any
        started = time.perf_counter()
        if name == "forward":
            result = forward(config, target_params, rows)
        else:
            given = features if "cached" in name else None
            state, result = step(state, target_params, rows, given, config=config)
        jax.block_until_ready((result, state))
        return time.perf_counter() - started

    times = in_turn({name: functools.partial(run, name) for name in TIMED}, repeats)
    tokens = batch_size * row_length
    return {name: [tokens / x for x in seconds] for name, seconds in times.items()}
