"""An optimizer step of a head, and its measure on held-out rows, as pure functions."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

from eagle_jax.heads import Head
from eagle_jax.heads.head import combine, partition
from eagle_jax.heads.levels import tie_weights
from eagle_jax.heads.loss import Batch, Metrics, Unembed, target_features
from eagle_jax.heads.rows import PackedRows
from eagle_jax.models.transformer import Tables, Transformer, unembed, unembed_with
from eagle_jax.parallel import PairSharding
from eagle_jax.prng import make_key, own_keys
from eagle_jax.training.config import OptimizerConfig, TrainConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepConfig:
    """The static settings of a step.

    Attributes:
        target: The `Target` whose features are learnt.
        head: The head.
        loss: The settings of its loss.
        optimizer: The settings of the optimizer.
        steps: The number of steps of the whole run, where the learning rate ends.
        dtype: The type of the arithmetic; master weights are float32.
        tables: A function from the target's parameters to the embedding and the output
            head that the head borrows; a Transformer's hold both themselves.
        unembed: The target's function from an output head and hidden states to logits.
    """

    target: Any
    head: Head
    loss: Any
    optimizer: OptimizerConfig
    steps: int
    dtype: str = "float32"
    tables: Callable[[Any], Tables] = lambda params: params
    unembed: Unembed = unembed

    @classmethod
    def of(cls, config: TrainConfig, target: Transformer, head: Head) -> "StepConfig":
        """Returns the settings of a run, computed in the target's type."""
        return cls(
            target=target,
            head=head,
            loss=config.loss,
            optimizer=config.optimizer,
            steps=config.run.steps,
            dtype=target.dtype,
            unembed=unembed_with(target.config.logit_cap),
        )


@struct.dataclass(kw_only=True)
class TrainState:
    """The arrays that a run changes.

    Attributes:
        step: `[]` int32, the number of steps done.
        params: The head's parameters, float32.
        opt_state: The optimizer's state.
        key: The PRNG key of the noise; it never changes, steps fold their number into
            it.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    key: jax.Array


def make_optimizer(config: OptimizerConfig, steps: int) -> Any:
    """Returns clipped AdamW (betas 0.9, 0.95), linear warm-up and linear decay."""
    warmup = min(config.warmup_steps, steps - 1)
    rate = config.learning_rate
    schedule = optax.join_schedules(
        [
            optax.linear_schedule(0.0 if warmup else rate, rate, max(warmup, 1)),
            optax.linear_schedule(rate, 0.0, steps - warmup),
        ],
        [warmup],
    )
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=config.weight_decay)
    return optax.chain(optax.clip_by_global_norm(config.clip), adamw)


def init_state(
    config: StepConfig,
    seed: int,
    target_params: Any = None,
    *,
    vocabulary: jax.Array | None = None,
    params: Any = None,
) -> TrainState:
    """Returns a run's first state, random weights included.

    Args:
        config: The static settings of a step.
        seed: The seed of the weights and the noise.
        target_params: The target's parameters, whose output head heads begin with that
            have one of their own; `None` for random ones.
        vocabulary: `[W]` int32, the tokens that an EAGLE-3 head knows, from
            `rows.known_tokens`.
        params: The weights to begin with, float32; `None` for random ones.
    """
    key = make_key(seed)
    if params is None:
        params = config.head.init(jax.random.fold_in(key, 0))
        if target_params is not None:
            tables = config.tables(target_params)
            params = config.head.init_from_target(params, tables, vocabulary)
    optimizer = make_optimizer(config.optimizer, config.steps)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.init(partition(params)[0]),
        key=jax.random.key_data(jax.random.fold_in(key, 1)),
    )


def state_shapes(config: StepConfig, sharding: PairSharding) -> TrainState:
    """Returns a `TrainState` of the shapes of a run's state, with their shardings."""
    shapes = jax.eval_shape(lambda: init_state(config, 0))
    head, everywhere = sharding.drafter_shardings(shapes.params), sharding.everywhere
    opt_state = optax.tree_map_params(
        make_optimizer(config.optimizer, config.steps),
        lambda _, sharding: sharding,
        shapes.opt_state,
        partition(head)[0],
        transform_non_params=lambda _: everywhere,
    )
    there: Any = {"step": everywhere, "key": everywhere}
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        shapes,
        TrainState(params=head, opt_state=opt_state, **there),
    )


def train_step(
    state: TrainState,
    target_params: Any,
    rows: PackedRows,
    features: jax.Array | None,
    *,
    config: StepConfig,
) -> tuple[TrainState, Metrics]:
    """Takes one step; jit it with `config` static and `state` donated.

    Args:
        state: The run's state.
        target_params: The target's frozen parameters.
        rows: The packed rows, `[B, T]` fields.
        features: What `read_target` returns, if it was computed before, otherwise
            `None`.
        config: The static settings of a step. Static.

    Returns:
        The next state, and the loss before the step.
    """
    if features is None:
        features = read_target(config, target_params, rows)
    key = jax.random.fold_in(own_keys(state.key), state.step)

    learnt, rest = partition(state.params)

    def loss(params: Any) -> tuple[jax.Array, Metrics]:
        params = combine(params, rest)
        return _loss(params, target_params, features, rows, key, config)

    gradients, metrics = jax.grad(loss, has_aux=True)(learnt)
    optimizer = make_optimizer(config.optimizer, config.steps)
    updates, opt_state = optimizer.update(gradients, state.opt_state, learnt)
    params = combine(optax.apply_updates(learnt, updates), rest)
    changed = {"step": state.step + 1, "params": params, "opt_state": opt_state}
    return dataclasses.replace(state, **changed), metrics


def read_target(config: StepConfig, target_params: Any, rows: PackedRows) -> jax.Array:
    """Returns what heads of a kind learn from, `[B, T, F]` or `[B, T, F + E]`."""
    with_hidden = config.loss.reads_hidden
    return target_features(config.target, target_params, rows, with_hidden=with_hidden)


def eval_step(
    params: Any,
    target_params: Any,
    rows: PackedRows,
    features: jax.Array,
    *,
    config: StepConfig,
) -> Metrics:
    """Measures the head on rows of known features, without noise and a step."""
    return _loss(params, target_params, features, rows, None, config)[1]


def as_type(params: Any, dtype: str) -> Any:
    """Returns heads whose weights have a type; token offsets stay integers."""
    learnt, rest = partition(params)
    return combine(jax.tree.map(lambda x: x.astype(dtype), learnt), rest)


def _loss(
    params: Any,
    target_params: Any,
    features: jax.Array,
    rows: PackedRows,
    key: jax.Array | None,
    config: StepConfig,
) -> tuple[jax.Array, Metrics]:
    """Returns the loss of the head in the arithmetic's type, and its parts."""
    batch = Batch(
        rows=rows,
        features=features,
        tables=config.tables(target_params),
        key=key,
        unembed=config.unembed,
    )
    params = as_type(tie_weights(params), config.dtype)
    return config.head.loss(params, batch, config.loss)
