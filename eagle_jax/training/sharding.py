"""Shardings of a run's state: the optimizer's moments as the head's weights."""

from typing import Any

import jax
import optax

from eagle_jax.heads.head import partition
from eagle_jax.parallel import PairSharding
from eagle_jax.training.step import StepConfig, TrainState, init_state, make_optimizer


def state_shardings(config: StepConfig, sharding: PairSharding) -> TrainState:
    """Returns a `TrainState` of the shardings of a run's state.

    Args:
        config: The static settings of a step.
        sharding: The shardings of target and head.
    """
    shapes = jax.eval_shape(lambda: init_state(config, 0))
    head = sharding.drafter_shardings(shapes.params)
    optimizer: Any = make_optimizer(config.optimizer, config.steps)
    opt_state = optax.tree_map_params(
        optimizer,
        lambda _, sharding: sharding,
        shapes.opt_state,
        partition(head)[0],
        transform_non_params=lambda _: sharding.everywhere,
    )
    everywhere: Any = sharding.everywhere
    return TrainState(step=everywhere, params=head, opt_state=opt_state, key=everywhere)


def state_shapes(config: StepConfig, shardings: TrainState) -> TrainState:
    """Returns a `TrainState` of shapes with the shardings of `state_shardings`."""
    return jax.tree.map(
        lambda x, there: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there),
        jax.eval_shape(lambda: init_state(config, 0)),
        shardings,
    )
