"""Training a small target from scratch: next-token loss, Muon, constant then decay."""

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from flax import struct

from eagle_jax.config import require
from eagle_jax.models import transformer
from eagle_jax.models.layers import LayerConfig, LayerParams
from eagle_jax.models.mlp import MlpParams
from eagle_jax.models.rope import RopeConfig
from eagle_jax.models.transformer import (
    Transformer,
    TransformerConfig,
    TransformerParams,
)
from eagle_jax.prng import make_key


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes of the model; untied output head, rope base 10000.

    Attributes:
        vocab_size: `V`, of the tokenizer that is trained first.
        hidden_size: `E`.
        intermediate_size: Width of the feed-forward layers.
        num_layers: `L`.
        num_heads: `H`.
        num_kv_heads: `G`.
        max_positions: Written to `config.json`.
    """

    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 768
    num_layers: int = 12
    num_heads: int = 4
    num_kv_heads: int = 1
    max_positions: int = 512

    def __post_init__(self) -> None:
        """Refuses sizes that make no model."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            require(value >= 1, field.name, value, "at least 1")
        require(self.vocab_size >= 257, "vocab_size", self.vocab_size, "at least 257")
        even = self.hidden_size % (2 * self.num_heads) == 0
        require(even, "hidden_size", self.hidden_size, "an even multiple of num_heads")
        divides = self.num_heads % self.num_kv_heads == 0
        require(divides, "num_kv_heads", self.num_kv_heads, "a divisor of num_heads")

    def transformer(self) -> TransformerConfig:
        """Returns the sizes as a decoder's."""
        layer = LayerConfig(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.hidden_size // self.num_heads,
            rms_norm_eps=1e-5,
            rope=RopeConfig(theta=10000.0),
        )
        return TransformerConfig(
            layer=layer,
            num_layers=self.num_layers,
            vocab_size=self.vocab_size,
            max_positions=self.max_positions,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainRunConfig:
    """Length, rhythm and rates.

    Attributes:
        steps: Optimizer steps.
        batch_size: Rows per step.
        row_length: `T`.
        learning_rate: Between warm-up and decay.
        warmup_steps: At the start.
        decay_fraction: Share of the steps, at the end, over which the rate falls to
            0.
        weight_decay: Of the matrices inside the layers.
        seed: Of weights and order.
        log_every: Steps between lines.
        eval_every: Steps between held-out perplexities and checkpoints.
        eval_rows: Held-out rows.
        keep: Checkpoints kept.
    """

    steps: int = 500
    batch_size: int = 8
    row_length: int = 512
    learning_rate: float = 3e-3
    warmup_steps: int = 50
    decay_fraction: float = 0.25
    weight_decay: float = 0.1
    seed: int = 0
    log_every: int = 10
    eval_every: int = 50
    eval_rows: int = 48
    keep: int = 2

    def __post_init__(self) -> None:
        """Refuses counts below one and rates outside their range."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int and field.name != "seed":
                require(value >= 1, field.name, value, "at least 1")
        require(self.learning_rate > 0, "learning_rate", self.learning_rate, "above 0")
        fraction = self.decay_fraction
        require(0 < fraction <= 1, "decay_fraction", fraction, "above 0, at most 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    """All settings of `pretrain.py`, one TOML table per attribute."""

    model: ModelConfig = ModelConfig()
    run: PretrainRunConfig = PretrainRunConfig()


@struct.dataclass(kw_only=True)
class PretrainState:
    """What a run changes.

    Attributes:
        step: int32 scalar, steps done.
        params: The model, or target and head, float32.
        opt_state: Of the optimizer.
    """

    step: jax.Array
    params: Any
    opt_state: Any


def make_optimizer(config: PretrainRunConfig) -> Any:
    """Returns an optax optimizer: Muon for the layers' matrices, AdamW for the rest.

    A head's matrices that read its inputs are of its layer, too.

    Muon needs about half of AdamW's tokens at this size, which counts on a CPU. The
    constant rate between warm-up and decay lets a run be made longer until the decay
    has begun.
    """

    def rate(step: Any) -> jax.Array:
        warm = jnp.minimum(1.0, (step + 1) / config.warmup_steps)
        left = (config.steps - step) / (config.steps * config.decay_fraction)
        return config.learning_rate * warm * jnp.clip(left, 0.0, 1.0)

    def matrices(params: Any) -> Any:
        def kind(path: Any, leaf: jax.Array) -> Any:
            name = jax.tree_util.keystr(path)
            in_layer = ".layer" in name or name.endswith(".fc")
            is_matrix = in_layer and leaf.ndim == 2
            return optax.contrib.MuonDimensionNumbers() if is_matrix else None

        return jax.tree_util.tree_map_with_path(kind, params)

    muon = optax.contrib.muon(
        rate,
        weight_decay=config.weight_decay,
        adam_b2=0.95,
        consistent_rms=0.2,
        muon_weight_dimension_numbers=matrices,
    )
    return optax.chain(optax.clip_by_global_norm(1.0), muon)


def init_state(config: PretrainConfig) -> PretrainState:
    """Returns a run's first state, from random weights."""
    key = make_key(config.run.seed)
    params = transformer.init_params(key, config.model.transformer(), "float32")
    return first_state(config.run, params)


def first_state(run: PretrainRunConfig, params: Any) -> PretrainState:
    """Returns a run's first state, which begins with weights."""
    return PretrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=make_optimizer(run).init(params),
    )


def next_state(run: PretrainRunConfig, state: PretrainState, gradients: Any) -> Any:
    """Returns the state after one step of the optimizer."""
    updates, opt_state = make_optimizer(run).update(
        gradients, state.opt_state, state.params
    )
    params: Any = optax.apply_updates(cast(Any, state.params), updates)
    return dataclasses.replace(
        state, step=state.step + 1, params=params, opt_state=opt_state
    )


def deepen(params: TransformerParams, num_layers: int) -> TransformerParams:
    """Returns a deeper model that computes the same, to be trained further.

    Every layer is followed by copies of itself that add nothing yet: what they write
    to the residual stream is multiplied by 0 (block expansion: LLaMA Pro, Wu et al.
    2024, section 3.2). The early, shallow steps are the cheap ones.

    Args:
        params: Of `L` layers.
        num_layers: A multiple of `L`.

    Raises:
        InputError: If it is no multiple.
    """
    before = len(params.layers)
    multiple = num_layers >= before and num_layers % before == 0
    require(multiple, "num_layers", num_layers, f"a multiple of {before}")

    def silent(layer: LayerParams) -> LayerParams:
        # Copies in memory too: what a step is given is donated.
        copied = jax.tree.map(jnp.copy, layer)
        mlp = copied.mlp
        assert isinstance(mlp, MlpParams), "no mixture is trained here"
        return dataclasses.replace(
            copied,
            output=jnp.zeros_like(copied.output),
            mlp=dataclasses.replace(mlp, down=jnp.zeros_like(mlp.down)),
        )

    copies = num_layers // before - 1
    layers = [
        block
        for layer in params.layers
        for block in (layer, *(silent(layer) for _ in range(copies)))
    ]
    return dataclasses.replace(params, layers=tuple(layers))


def next_token_loss(
    params: TransformerParams, rows: jax.Array, config: TransformerConfig
) -> jax.Array:
    """Returns the mean cross-entropy, in nats, of rows `[B, T + 1]` of tokens."""
    model = Transformer(config=config)
    tokens = rows[:, :-1]
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    cache = model.init_cache(tokens.shape[0], 0)
    output = model.forward(params, tokens, positions, None, cache)
    logits = model.unembed(params, output.hidden)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:])
    return losses.mean()


def pretrain_step(
    state: PretrainState, rows: jax.Array, *, config: PretrainConfig
) -> tuple[PretrainState, dict[str, jax.Array]]:
    """Takes one step; jit it with `config` static and `state` donated.

    Args:
        state: Of the run.
        rows: `[B, T + 1]` int32.
        config: Static.

    Returns:
        The next state, and the loss before the step, as a figure of the log.
    """
    loss, gradients = jax.value_and_grad(next_token_loss)(
        state.params, rows, config.model.transformer()
    )
    return next_state(config.run, state, gradients), {"loss": loss}
