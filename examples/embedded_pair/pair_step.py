"""Training a target and its head together: what a pair learns, and a step of it.

A head drafts from the target's features alone, so that the target can learn to put
into them what drafting needs, as with the trunk of DeepSeek-V3's multi-token
prediction (arXiv 2412.19437, section 2.2) and the layers of LayerSkip
(arXiv 2404.16710): the head's loss is added to that of the next token, and its
gradients go on into the target.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from eagle_jax.config import require
from eagle_jax.heads.eagle import EagleHead, EagleHeadParams, EagleLoss
from eagle_jax.heads.loss import Batch, Metrics
from eagle_jax.heads.rows import PackedRows, segment_mask
from eagle_jax.models.transformer import (
    Transformer,
    TransformerConfig,
    TransformerParams,
)
from eagle_jax.prng import make_key
from examples.embedded_pair.training import (
    PretrainRunConfig,
    PretrainState,
    next_state,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TogetherConfig:
    """All settings of `together.py`, one TOML table per attribute.

    Attributes:
        run: Half of the rows of a step are source, half texts of the target.
        loss: Of the head; its weights are relative to the next token's loss.
    """

    run: PretrainRunConfig = dataclasses.field(default_factory=PretrainRunConfig)
    loss: EagleLoss = dataclasses.field(default_factory=EagleLoss)

    def __post_init__(self) -> None:
        """Refuses an odd number of rows."""
        size = self.run.batch_size
        require(size % 2 == 0, "batch_size", size, "even")


@struct.dataclass(kw_only=True)
class PairParams:
    """The weights of a target and of its EAGLE-1/2 head, float32."""

    target: TransformerParams
    head: EagleHeadParams


@struct.dataclass(kw_only=True)
class PairRows:
    """Rows for both models; NumPy arrays until a step takes them.

    Attributes:
        rows: `[B, T]` fields; the head learns the pairs of all.
        next_tokens: `[B, T]` int32, what follows each token; 0 where nothing is.
        is_learnt: `[B, T]` bool, places whose next token the target learns.
    """

    rows: PackedRows
    next_tokens: Any
    is_learnt: Any


def source_rows(tokens: np.ndarray) -> PairRows:
    """Returns rows `[B, T + 1]` of source, all of whose tokens both models learn."""
    shape = (len(tokens), tokens.shape[1] - 1)
    rows = PackedRows(
        tokens=tokens[:, :-1],
        segments=np.ones(shape, np.int32),
        positions=np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape),
        loss_mask=np.ones(shape, np.bool_),
    )
    learnt = np.ones(shape, np.bool_)
    return PairRows(rows=rows, next_tokens=tokens[:, 1:], is_learnt=learnt)


def own_rows(rows: PackedRows) -> PairRows:
    """Returns rows of the target's own texts, whose tokens it does not learn again."""
    nothing = np.zeros_like(rows.tokens)
    return PairRows(rows=rows, next_tokens=nothing, is_learnt=nothing.astype(np.bool_))


def pair_losses(
    params: PairParams,
    batch: PairRows,
    key: jax.Array | None,
    *,
    target: TransformerConfig,
    head: EagleHead,
    loss: EagleLoss,
) -> tuple[jax.Array, jax.Array, Metrics]:
    """Computes both losses of a batch.

    Args:
        params: Of target and head.
        batch: The rows.
        key: The PRNG key of the noise on the head's inputs; `None` for none.
        target: The target's sizes. Static.
        head: The head. Static.
        loss: The settings of the head's loss. Static.

    Returns:
        The target's mean cross-entropy of next tokens, in nats, the head's loss and
        its parts. Through the head's loss gradients reach the target's features, and
        its distributions through these; its embedding and output head only by way of
        them.
    """
    model, rows = Transformer(config=target), batch.rows
    cache = model.init_cache(rows.tokens.shape[0], 0)
    mask = segment_mask(rows.segments)
    output = model.forward(params.target, rows.tokens, rows.positions, mask, cache)
    entropy = optax.softmax_cross_entropy_with_integer_labels(
        model.unembed(params.target, output.hidden), batch.next_tokens
    )
    count = jnp.maximum(jnp.sum(batch.is_learnt), 1)
    learnt = Batch(rows=rows, features=output.features, tables=params.target, key=key)
    drafting, metrics = head.loss(params.head, learnt, loss)
    return jnp.sum(entropy * batch.is_learnt) / count, drafting, metrics


def pair_step(
    state: PretrainState,
    batch: PairRows,
    *,
    config: TogetherConfig,
    target: TransformerConfig,
    head: EagleHead,
) -> tuple[PretrainState, dict[str, jax.Array]]:
    """Takes one step of both; jit it with `state` donated.

    Args:
        state: Of the run, whose `params` are `PairParams`.
        batch: The rows.
        config: All settings. Static.
        target: The target's sizes. Static.
        head: The head. Static.

    Returns:
        The next state, and the figures of the log, before the step.
    """
    key = jax.random.fold_in(make_key(config.run.seed), state.step)

    def loss(params: PairParams) -> tuple[jax.Array, dict[str, jax.Array]]:
        next_token, drafting, metrics = pair_losses(
            params, batch, key, target=target, head=head, loss=config.loss
        )
        figures = {
            "loss": next_token,
            "drafting": drafting,
            "agreement": metrics.agreement,
        }
        return next_token + drafting, figures

    gradients, figures = jax.grad(loss, has_aux=True)(state.params)
    return next_state(config.run, state, gradients), figures
