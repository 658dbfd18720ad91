"""One optimizer step: rates, clipping, dtypes, donation, compilation."""

import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.models import transformer
from eagle_jax.models.eagle_head import EagleHeadConfig
from eagle_jax.models.transformer import Transformer, TransformerConfig
from eagle_jax.training.config import LossConfig, OptimizerConfig
from eagle_jax.training.encode import EncodedExample
from eagle_jax.training.evaluate import alphas, prompts_of
from eagle_jax.training.packing import PackedRows, pack
from eagle_jax.training.step import StepConfig, init_state, make_optimizer, train_step
from tests.helpers import SMALL_LAYER

pytestmark = pytest.mark.usefixtures("quick_compilation")

CONFIG = StepConfig(
    target=Transformer(
        config=TransformerConfig(
            layer=SMALL_LAYER, num_layers=1, vocab_size=40, max_positions=64
        )
    ),
    head=EagleHeadConfig(layer=SMALL_LAYER, vocab_size=40, max_positions=64),
    loss=LossConfig(),
    optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=2),
    steps=20,
)


@pytest.fixture(scope="module")
def target_params() -> transformer.TransformerParams:
    return transformer.init_params(jax.random.key(0), CONFIG.target.config)


@pytest.fixture(scope="module")
def rows() -> PackedRows:
    tokens = np.random.default_rng(0).integers(40, size=(4, 16)).astype(np.int32)
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


@pytest.mark.parametrize("clip_by", ["norm", "value"])
def test_gradients_are_clipped(clip_by: str) -> None:
    config = OptimizerConfig(clip=0.5, clip_by=clip_by)  # type: ignore[arg-type]
    params = {"w": jnp.zeros(4)}
    optimizer: Any = make_optimizer(config, 10)
    gradient = {"w": jnp.array([3.0, 0.0, 0.0, 4.0])}
    _, state = optimizer.update(gradient, optimizer.init(params), params)
    (moment,) = (s.mu["w"] for s in state[1] if hasattr(s, "mu"))
    wanted = [0.3, 0.0, 0.0, 0.4] if clip_by == "norm" else [0.5, 0.0, 0.0, 0.5]
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


def test_alphas_are_conditional_on_the_drafts_before() -> None:
    lengths = np.array([0, 0, 1, 2, 5, 5, 5, 5])
    assert alphas(lengths) == (6 / 8, 5 / 6, 4 / 5, 1.0, 1.0)
    assert np.isnan(alphas(np.array([0, 0]))[1])


def test_prompts_end_where_the_answer_begins() -> None:
    def sample(*mask: int) -> EncodedExample:
        return EncodedExample(
            tokens=np.arange(len(mask), dtype=np.int32),
            loss_mask=np.array(mask, bool),
        )

    chat, plain = sample(0, 0, 0, 0, 1, 1), sample(0, 1, 1, 1, 1, 1, 1, 1)
    found = prompts_of([chat, plain, sample(0, 1)], count=3, plain_tokens=3)
    assert found == [[0, 1, 2, 3], [0, 1, 2], [0]]
    assert prompts_of([chat] * 5, count=2, plain_tokens=3) == [[0, 1, 2, 3]] * 2
