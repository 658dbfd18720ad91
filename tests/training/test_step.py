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
from eagle_jax.parallel import (
    WHOLE,
    MeshShape,
    PairSharding,
    make_mesh,
    shard_pair,
)
from eagle_jax.training.config import (
    OptimizerConfig,
    RunConfig,
    TrainConfig,
)
from eagle_jax.training.data import TrainingData, prompts_of
from eagle_jax.training.encode import EncodedExample
from eagle_jax.training.evaluate import Evaluation, make_evaluation
from eagle_jax.training.loop import LogRow
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
def target_params() -> transformer.TransformerParams:
    return transformer.init_params(jax.random.key(0), CONFIG.target.config)


@pytest.fixture(scope="module")
def rows() -> PackedRows:
    tokens = np.random.default_rng(0).integers(64, size=(4, 16)).astype(np.int32)
    mask = np.ones(16, bool)
    return pack([EncodedExample(tokens=t, loss_mask=mask) for t in tokens], 16)


def step_of(config: StepConfig):
    step = jax.jit(train_step, static_argnames=("config",), donate_argnames=("state",))
    return lambda state, *rest: step(state, *rest, None, config=config)


def test_the_loss_falls_and_everything_compiles_once(
    rows: PackedRows, target_params: transformer.TransformerParams
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
    rows: PackedRows, target_params: transformer.TransformerParams
) -> None:
    config = dataclasses.replace(
        CONFIG, dtype="bfloat16", target=Transformer(config=CONFIG.target.config)
    )
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), target_params)
    target = dataclasses.replace(config.target, dtype="bfloat16")
    config = dataclasses.replace(config, target=target)
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


def test_every_step_draws_other_noise(
    rows: PackedRows, target_params: transformer.TransformerParams
) -> None:
    state = init_state(CONFIG, 0)  # The first step of the warm-up has rate 0.
    state, first = step_of(CONFIG)(state, target_params, rows)
    again = init_state(CONFIG, 0)
    _, second = step_of(CONFIG)(state, target_params, rows)
    _, repeated = step_of(CONFIG)(again, target_params, rows)
    assert float(first.loss) == float(repeated.loss) != float(second.loss)


def test_evaluation_is_the_loss_without_noise(
    rows: PackedRows, target_params: transformer.TransformerParams
) -> None:
    quiet = dataclasses.replace(CONFIG, loss=EagleLoss(noise=0.0))
    _, wanted = step_of(quiet)(init_state(CONFIG, 0), target_params, rows)
    params = init_state(CONFIG, 0).params
    found = jax.jit(eval_step, static_argnames=("config",))(
        params,
        target_params,
        rows,
        read_target(CONFIG, target_params, rows),
        config=CONFIG,
    )
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


def capped(output_head: jax.Array, hidden: jax.Array) -> jax.Array:
    return 3 * jnp.tanh(transformer.unembed(output_head, hidden) / 3)


def test_a_head_learns_any_targets_features_or_given_ones(
    rows: PackedRows, target_params: transformer.TransformerParams
) -> None:
    step = jax.jit(train_step, static_argnames=("config",))
    state = init_state(CONFIG, 0)
    _, wanted = step(state, target_params, rows, None, config=CONFIG)
    features = target_features(CONFIG.target, target_params, rows)
    _, given = step(state, target_params, rows, features, config=CONFIG)
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
    config = dataclasses.replace(config, unembed=transformer.unembed_with(3.0))
    _, ours = step_of(config)(init_state(CONFIG, 0), theirs, rows)
    np.testing.assert_allclose(float(ours.loss), float(other.loss), rtol=1e-6)
    assert transformer.unembed_with(3.0) is transformer.unembed_with(3.0)


@pytest.mark.parametrize("is_foreign", [False, True])
def test_what_a_limit_cuts_off_is_in_no_round(
    rows: PackedRows, target_params: transformer.TransformerParams, is_foreign: bool
) -> None:
    config: StepConfig = CONFIG
    params: Any = target_params
    sharding = shard_pair(MeshShape(), CONFIG.target.config, batch_size=4)
    if is_foreign:
        target = Foreign(CONFIG.target)
        config = dataclasses.replace(CONFIG, target=target, tables=tables_of)
        params = {"all of it": target_params}
        sharding = PairSharding(mesh=make_mesh(MeshShape(), 1), target=WHOLE)
    evaluate = make_evaluation(
        TrainingData(rows=rows, held_out=rows, prompts=[[1, 2, 3], [4]]),
        functools.partial(read_target, config),
        config=TrainConfig(
            # Every token is a child of the root, so that one is accepted for certain.
            tree=TreeConfig(num_nodes=65, depth=1, width=64),
            run=RunConfig(batch_size=4, eval_new_tokens=2),
        ),
        step_config=config,
        sharding=sharding,
    )
    found = evaluate(init_state(CONFIG, 0).params, params)
    assert found.tokens_per_round == 1.0


def test_medusas_heads_are_measured_with_the_tree_that_they_draft(
    rows: PackedRows, target_params: transformer.TransformerParams
) -> None:
    layer = CONFIG.target.config.layer
    heads = MedusaHeads(
        config=MedusaConfig(
            num_heads=2, num_layers=1, hidden_size=layer.hidden_size, vocab_size=64
        )
    )
    evaluate = make_evaluation(
        TrainingData(rows=rows, held_out=rows, prompts=[[1, 2, 3], [4]]),
        functools.partial(read_target, CONFIG),
        # A tree that drafts nothing, in which every round emits one token.
        config=TrainConfig(
            tree=TreeConfig(depth=0), run=RunConfig(batch_size=4, eval_new_tokens=24)
        ),
        step_config=dataclasses.replace(CONFIG, head=heads, loss=LevelLoss()),
        sharding=shard_pair(MeshShape(), CONFIG.target.config, batch_size=4),
    )
    found = evaluate(heads.init(jax.random.key(0)), target_params)
    assert (found.tokens_per_round or 0) > 1


def test_what_was_not_measured_is_neither_shown_nor_logged_as_a_number() -> None:
    """Texts of one token need no round."""
    found = Evaluation(loss=1.0, agreement=0.5, chain_length=0.0, tokens_per_round=None)
    assert found.summary() == "loss 1.0000 | agreement 0.500 | - tokens/round"
    means = {"loss": 1.0, "feature_loss": math.nan}
    row = LogRow(
        step=1, tokens=2, metrics=means, tokens_per_second=3.0, evaluation=found
    )
    names = "step tokens loss tokens_per_second held_out_loss held_out_agreement"
    assert set(row.columns()) == set(names.split())


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


def test_prompts_end_where_the_answer_begins() -> None:
    def sample(*mask: int) -> EncodedExample:
        return EncodedExample(
            tokens=np.arange(len(mask), dtype=np.int32),
            loss_mask=np.array(mask, bool),
        )

    chat, plain = sample(0, 0, 0, 0, 1, 1), sample(*[0] + [1] * 7)
    long = sample(*[0] + [1] * 40)
    found = prompts_of([chat, plain, sample(0, 1), long], count=9, max_tokens=20)
    assert [len(prompt) for prompt in found] == [4, 4, 1, 16]
    assert found[0] == [0, 1, 2, 3]
    assert prompts_of([chat] * 5, count=2, max_tokens=4) == [[0, 1, 2, 3]] * 2
    assert prompts_of([chat, sample(0, 1)], count=2, max_tokens=3) == [[0]]
