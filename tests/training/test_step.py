"""One optimizer step: rates, clipping, dtypes, donation, compilation."""

import dataclasses
import functools
import math
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.config import TreeConfig
from eagle_jax.heads.eagle import EagleHead, EagleLoss
from eagle_jax.heads.eagle3 import Eagle3HeadConfig
from eagle_jax.heads.eagle3.loss import Eagle3Loss
from eagle_jax.heads.loss import target_features
from eagle_jax.heads.medusa import MedusaConfig, MedusaHeads
from eagle_jax.heads.rows import PackedRows
from eagle_jax.heads.settings import LevelLoss
from eagle_jax.models import transformer
from eagle_jax.models.transformer import Transformer
from eagle_jax.parallel import WHOLE, MeshShape, PairSharding, make_mesh, shard_pair
from eagle_jax.training.config import OptimizerConfig, RunConfig, TrainConfig
from eagle_jax.training.data import TrainingData
from eagle_jax.training.encode import EncodedExample
from eagle_jax.training.evaluate import Evaluation, make_evaluation
from eagle_jax.training.loop import log_row
from eagle_jax.training.packing import pack
from eagle_jax.training.step import (
    StepConfig,
    eval_step,
    init_state,
    make_optimizer,
    read_target,
    train_step,
)
from tests import tiny

CONFIG = StepConfig(
    target=Transformer(config=tiny.target_config(num_layers=1)),
    head=EagleHead(config=tiny.HEAD),
    loss=EagleLoss(),
    optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=2),
    steps=20,
)


@pytest.fixture(scope="module")
def target_params() -> Any:
    return transformer.init_params(jax.random.key(0), CONFIG.target.config)


@pytest.fixture(scope="module")
def rows() -> PackedRows:
    tokens = np.random.default_rng(0).integers(64, size=(4, 16)).astype(np.int32)
    mask = np.ones(16, bool)
    return pack([EncodedExample(tokens=t, loss_mask=mask) for t in tokens], 16)


STEP = jax.jit(train_step, static_argnames=("config",))


def step_of(config: StepConfig):
    return lambda state, *rest: STEP(state, *rest, None, config=config)


def test_the_loss_falls_and_everything_compiles_once(
    rows: PackedRows, target_params: Any
) -> None:
    traced = chex.assert_max_traces(train_step, 1)
    step = jax.jit(traced, static_argnames=("config",), donate_argnames=("state",))
    state, losses = init_state(CONFIG, 0), []
    before = state
    for _ in range(CONFIG.steps):
        before = state
        state, metrics = step(state, target_params, rows, None, config=CONFIG)
        losses.append(float(metrics.loss))
    assert losses[-1] < losses[0]
    assert int(state.step) == CONFIG.steps
    assert before.params.fc.is_deleted()  # Donated: no second copy of the state.


def test_bfloat16_computes_but_float32_remembers(
    rows: PackedRows, target_params: Any
) -> None:
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), target_params)
    target = Transformer(config=CONFIG.target.config, dtype="bfloat16")
    config = dataclasses.replace(CONFIG, dtype="bfloat16", target=target)
    state, metrics = step_of(config)(init_state(config, 0), half, rows)
    chex.assert_type(jax.tree.leaves(state.params), jnp.float32)
    _, exact = step_of(CONFIG)(init_state(CONFIG, 0), target_params, rows)
    np.testing.assert_allclose(float(metrics.loss), float(exact.loss), rtol=0.02)
    assert float(metrics.loss) != float(exact.loss)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_leaves_the_tokens_that_a_head_knows_alone(
    rows: PackedRows, dtype: str
) -> None:
    target = Transformer(
        config=tiny.target_config(num_layers=3, feature_layers=(0, 1, 2)), dtype=dtype
    )
    sizes = tiny.sizes(vocab_size=64)
    own = Eagle3HeadConfig(**sizes, draft_vocab_size=9, feature_size=96)
    head = tiny.head_of(own)
    config = dataclasses.replace(
        CONFIG, target=target, head=head, dtype=dtype, loss=Eagle3Loss(alignment=2)
    )
    weights = transformer.init_params(jax.random.key(0), target.config, dtype)
    known = np.array([3, 8, 9, 20, 21, 40, 41, 42, 63])
    state = init_state(config, 0, weights, vocabulary=jnp.asarray(known))
    before = np.asarray(state.params.output_head)
    np.testing.assert_array_equal(before, transformer.output_head(weights)[:, known])
    for _ in range(2):  # The first step of the warm-up has rate 0.
        state, _ = step_of(config)(state, weights, rows)
    np.testing.assert_array_equal(state.params.offsets, known - np.arange(9))
    chex.assert_type(state.params.offsets, jnp.int32)
    assert np.abs(state.params.output_head - before).max() > 0


def test_every_step_draws_other_noise(rows: PackedRows, target_params: Any) -> None:
    begun = init_state(CONFIG, 0)  # The first step of the warm-up has rate 0.
    state, first = step_of(CONFIG)(begun, target_params, rows)
    _, second = step_of(CONFIG)(state, target_params, rows)
    _, repeated = step_of(CONFIG)(begun, target_params, rows)
    assert float(first.loss) == float(repeated.loss) != float(second.loss)


def test_evaluation_is_the_loss_without_noise(
    rows: PackedRows, target_params: Any
) -> None:
    quiet = dataclasses.replace(CONFIG, loss=EagleLoss(noise=0.0))
    _, wanted = step_of(quiet)(init_state(CONFIG, 0), target_params, rows)
    features = read_target(CONFIG, target_params, rows)
    given = init_state(CONFIG, 0).params, target_params, rows, features
    found = jax.jit(eval_step, static_argnames=("config",))(*given, config=CONFIG)
    np.testing.assert_allclose(float(found.loss), float(wanted.loss), rtol=1e-6)


@dataclasses.dataclass(frozen=True)
class Foreign:
    """A target whose parameters are a dictionary."""

    inner: transformer.Transformer

    def init_cache(self, batch: int, capacity: int) -> Any:
        return self.inner.init_cache(batch, capacity)

    def forward(self, params: dict[str, Any], *inputs: Any) -> Any:
        return self.inner.forward(params["all of it"], *inputs)

    def unembed(self, params: dict[str, Any], hidden: jax.Array) -> jax.Array:
        return self.inner.unembed(params["all of it"], hidden)

    def commit(self, *inputs: Any) -> Any:
        return self.inner.commit(*inputs)


def tables_of(params: dict[str, Any]) -> transformer.Tables:
    return params["all of it"]


CAP = 0.01
"""So low that it changes the loss by more than rounding does."""


def capped(output_head: jax.Array, hidden: jax.Array) -> jax.Array:
    return CAP * jnp.tanh(transformer.unembed(output_head, hidden) / CAP)


def test_a_head_learns_any_targets_features_or_given_ones(
    rows: PackedRows, target_params: Any
) -> None:
    state = init_state(CONFIG, 0)
    _, wanted = STEP(state, target_params, rows, None, config=CONFIG)
    features = target_features(CONFIG.target, target_params, rows)
    _, given = STEP(state, target_params, rows, features, config=CONFIG)
    np.testing.assert_allclose(float(given.loss), float(wanted.loss), rtol=1e-6)
    config = dataclasses.replace(
        CONFIG, target=Foreign(CONFIG.target), tables=tables_of
    )
    theirs = {"all of it": target_params}
    _, found = step_of(config)(init_state(CONFIG, 0), theirs, rows)
    assert float(found.loss) == float(wanted.loss)
    config = dataclasses.replace(config, unembed=capped)
    _, other = step_of(config)(init_state(CONFIG, 0), theirs, rows)
    assert float(other.feature_loss) == float(wanted.feature_loss)
    assert float(other.token_loss) != float(wanted.token_loss)
    config = dataclasses.replace(config, unembed=transformer.unembed_with(CAP))
    _, ours = step_of(config)(init_state(CONFIG, 0), theirs, rows)
    np.testing.assert_allclose(float(ours.loss), float(other.loss), rtol=1e-6)
    assert transformer.unembed_with(CAP) is transformer.unembed_with(CAP)


def tokens_per_round(
    rows: PackedRows,
    config: StepConfig,
    target_params: Any,
    tree: TreeConfig,
    new_tokens: int,
    sharding: PairSharding | None = None,
) -> float | None:
    """What a new head emits per round, with this tree, after two prompts."""
    whole = shard_pair(MeshShape(), CONFIG.target.config, batch_size=4)
    evaluate = make_evaluation(
        TrainingData(rows=rows, held_out=rows, prompts=[[1, 2, 3], [4]]),
        functools.partial(read_target, config),
        config=TrainConfig(
            tree=tree, run=RunConfig(batch_size=4, eval_new_tokens=new_tokens)
        ),
        step_config=config,
        sharding=sharding or whole,
    )
    params = config.head.init(jax.random.key(0))
    return evaluate(params, target_params).tokens_per_round


@pytest.mark.parametrize("is_foreign", [False, True])
def test_what_a_limit_cuts_off_is_in_no_round(
    rows: PackedRows, target_params: Any, is_foreign: bool
) -> None:
    given: tuple[StepConfig, Any] = CONFIG, target_params
    sharding = None
    if is_foreign:
        target = Foreign(CONFIG.target)
        config = dataclasses.replace(CONFIG, target=target, tables=tables_of)
        given = config, {"all of it": target_params}
        sharding = PairSharding(mesh=make_mesh(MeshShape(), 1), target=WHOLE)
    # Every token is a child of the root, so that one is accepted for certain.
    tree = TreeConfig(num_nodes=65, depth=1, width=64)
    assert tokens_per_round(rows, *given, tree, 2, sharding) == 1.0


def test_medusas_heads_are_measured_with_the_tree_that_they_draft(
    rows: PackedRows, target_params: Any
) -> None:
    sizes = {"hidden_size": CONFIG.target.config.layer.hidden_size, "vocab_size": 64}
    heads = MedusaHeads(config=MedusaConfig(num_heads=2, num_layers=1, **sizes))
    config = dataclasses.replace(CONFIG, head=heads, loss=LevelLoss())
    # A tree that drafts nothing, in which every round emits one token.
    tree = TreeConfig(depth=0)
    assert (tokens_per_round(rows, config, target_params, tree, 24) or 0) > 1


def test_what_was_not_measured_is_neither_shown_nor_logged_as_a_number() -> None:
    """Texts of one token need no round."""
    found = Evaluation(loss=1.0, agreement=0.5, chain_length=0.0, tokens_per_round=None)
    assert found.summary() == "loss 1.0000 | agreement 0.500 | - tokens/round"
    means = {"loss": 1.0, "feature_loss": math.nan}
    row = log_row(1, 2, means, 3.0, found)
    names = "step tokens loss tokens_per_second held_out_loss held_out_agreement"
    assert set(row) == set(names.split())


def test_gradients_are_clipped() -> None:
    config = OptimizerConfig(clip=0.5)
    params = {"w": jnp.zeros(4)}
    optimizer: Any = make_optimizer(config, 10)
    gradient = {"w": jnp.array([3.0, 0.0, 0.0, 4.0])}
    _, state = optimizer.update(gradient, optimizer.init(params), params)
    (moment,) = (s.mu["w"] for s in state[1] if hasattr(s, "mu"))
    wanted = [0.3, 0.0, 0.0, 0.4]
    np.testing.assert_allclose(moment, 0.1 * np.array(wanted), rtol=1e-6)


@pytest.mark.parametrize(
    "warmup, steps, wanted",
    [
        (4, 8, [0.0, 0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25]),
        (0, 4, [1.0, 0.75, 0.5, 0.25]),
        (2000, 4, [0.0, 1 / 3, 2 / 3, 1.0]),
    ],
)
def test_the_rate_rises_and_falls_in_straight_lines(
    warmup: int, steps: int, wanted: list[float]
) -> None:
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=warmup, weight_decay=0.0)
    optimizer: Any = make_optimizer(config, steps)
    params = {"w": jnp.zeros(1)}
    state, rates = optimizer.init(params), []
    for _ in range(steps):
        # Adam's step under a constant gradient is the rate itself.
        updates, state = optimizer.update({"w": jnp.full(1, 0.1)}, state, params)
        rates.append(-float(updates["w"][0]))
    np.testing.assert_allclose(rates, wanted, atol=1e-4)
