"""The kinds of heads that are trained: their sizes, first weights and loss."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax import checkpoints
from eagle_jax.config import require
from eagle_jax.errors import InputError
from eagle_jax.models.eagle3_head import Eagle3HeadConfig, Eagle3HeadParams
from eagle_jax.models.eagle_head import EagleHeadConfig
from eagle_jax.models.hydra_heads import HydraConfig
from eagle_jax.models.layers import LayerConfig
from eagle_jax.models.medusa_heads import MedusaConfig
from eagle_jax.models.transformer import Tables, TransformerConfig, output_head
from eagle_jax.training.config import TrainConfig
from eagle_jax.training.eagle3_loss import eagle3_loss
from eagle_jax.training.loss import Metrics, head_loss
from eagle_jax.training.packing import PackedRows
from eagle_jax.training.position_loss import hydra_loss, medusa_loss

TrainedHead = EagleHeadConfig | Eagle3HeadConfig | MedusaConfig | HydraConfig
"""The sizes of heads of any kind that is trained."""

Loss = Callable[..., tuple[jax.Array, Metrics]]
"""A loss with the arguments of `loss.head_loss`."""

_ATTENTION = {"intermediate_size", "num_heads", "num_kv_heads"}
_OF_CHAINS = {"mask", "normalize", "alignment", "token_loss"}
_FEATURE_LOSS = {
    *("feature_weight", "token_weight", "noise", "noise_scale"),
    *("top_k_loss", "top_k_weight"),
}
_BY_POSITION = {"draft_heads", "head_layers", "decay", "labels"}
# What settings of `head` and `loss` are of use to a kind.
_USED = {
    "eagle2": {*_ATTENTION, *_OF_CHAINS, *_FEATURE_LOSS, "fc_bias"},
    "eagle3": {
        *(*_ATTENTION, *_OF_CHAINS, "decay"),
        *("draft_vocab_size", "feature_layers", "recycles_normed"),
    },
    "medusa": _BY_POSITION,
    "hydra": _BY_POSITION,
}
_ALWAYS = {"kind", "include_embedding"}  # "false" is true of heads of any kind.
_MEDUSA_HEADS, _HYDRA_HEADS, _MEDUSA_LAYERS, _HYDRA_LAYERS = 5, 4, 1, 4
_DRAFT_VOCAB_SIZE = 32_000


def new_head(target: TransformerConfig, config: TrainConfig) -> TrainedHead:
    """Returns the sizes of new heads: those that are set, else published ones.

    Raises:
        InputError: If the attention heads that are set do not divide the target's
            width.
    """
    sizes = config.head
    check_kind(config)
    if sizes.kind == "eagle2":
        return new_eagle_head(target, config)
    if sizes.kind == "eagle3":
        return new_eagle3_head(target, config)
    width, vocab_size = target.layer.hidden_size, target.vocab_size
    if sizes.kind == "medusa":
        return MedusaConfig(
            num_heads=sizes.draft_heads or _MEDUSA_HEADS,
            num_layers=sizes.head_layers or _MEDUSA_LAYERS,
            hidden_size=width,
            vocab_size=vocab_size,
        )
    return HydraConfig(
        num_heads=sizes.draft_heads or _HYDRA_HEADS,
        num_layers=sizes.head_layers or _HYDRA_LAYERS,
        hidden_size=width,
        vocab_size=vocab_size,
        # The published layout has no sizes of the layer: they are the target's.
        layer=target.layer.plain,
    )


def new_eagle_head(target: TransformerConfig, config: TrainConfig) -> EagleHeadConfig:
    """Returns the sizes of a new EAGLE-1/2 head, see `new_head`."""
    return EagleHeadConfig(
        layer=_new_layer(target, config),
        vocab_size=target.vocab_size,
        max_positions=min(target.max_positions, config.data.row_length),
        fc_bias=config.head.fc_bias,
    )


def new_eagle3_head(target: TransformerConfig, config: TrainConfig) -> Eagle3HeadConfig:
    """Returns the sizes of a new EAGLE-3 head, see `new_head`.

    Raises:
        InputError: Also if the target lacks a feature layer, or has fewer tokens than
            the head is to know.
    """
    known, vocab_size = config.head.draft_vocab_size, target.vocab_size
    wanted = f"at most the target's vocabulary of {vocab_size} tokens"
    require(known is None or known <= vocab_size, "draft_vocab_size", known, wanted)
    layers = config.head.feature_layers
    head = Eagle3HeadConfig(
        layer=_new_layer(target, config),
        vocab_size=vocab_size,
        draft_vocab_size=known or min(_DRAFT_VOCAB_SIZE, vocab_size),
        max_positions=min(target.max_positions, config.data.row_length),
        feature_size=3 * target.layer.hidden_size,
        feature_layers=None if layers is None else tuple(map(int, layers.split())),
        recycles_normed=config.head.recycles_normed,
    )
    checkpoints.eagle3_target(target, head.feature_layers)
    return head


def _new_layer(target: TransformerConfig, config: TrainConfig) -> LayerConfig:
    """Returns the sizes of a new EAGLE head's layer."""
    sizes, layer = config.head, target.layer
    num_heads = sizes.num_heads or layer.num_heads  # None, as sizes are never 0.
    if layer.hidden_size % (2 * num_heads):
        raise InputError(
            f"num_heads = {num_heads} must divide the target's hidden_size = "
            f"{layer.hidden_size} into an even head_dim; set [head] num_heads"
        )
    num_kv_heads = sizes.num_kv_heads or min(layer.num_kv_heads, num_heads)
    if num_heads % num_kv_heads:
        raise InputError(
            f"num_kv_heads = {num_kv_heads} must divide num_heads = {num_heads}"
        )
    return dataclasses.replace(
        layer.plain,
        intermediate_size=sizes.intermediate_size or layer.intermediate_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=layer.hidden_size // num_heads,
    )


def check_kind(config: TrainConfig) -> None:
    """Refuses settings that are of no use to the kind of head, or without another.

    Raises:
        InputError: If one is set that would change nothing.
    """
    kind, usual = config.head.kind, TrainConfig()
    for table in ("head", "loss"):
        for name, value in vars(getattr(config, table)).items():
            is_used = name in _USED[kind] | _ALWAYS
            holds = is_used or value == getattr(getattr(usual, table), name)
            wanted = f"left out: heads of kind {kind} have no use for it"
            require(holds, name, value, wanted)
    weight = config.loss.top_k_weight
    holds = config.loss.top_k_loss > 0 or weight == usual.loss.top_k_weight
    wanted = "left out: it is of use with a top_k_loss alone"
    require(holds, "top_k_weight", weight, wanted)


def trained_target(target: TransformerConfig, head: TrainedHead) -> TransformerConfig:
    """Returns the target, set to give the features that heads of a kind read."""
    if isinstance(head, Eagle3HeadConfig):
        return checkpoints.eagle3_target(target, head.feature_layers)
    return target


def reads_hidden(head: TrainedHead) -> bool:
    """Returns whether the last hidden states are learnt from beside the features."""
    return isinstance(head, Eagle3HeadConfig)


def count_vocabulary(rows: PackedRows, head: TrainedHead) -> np.ndarray | None:
    """Returns the tokens that a new EAGLE-3 head knows, ascending, `[W]` int32.

    They are the most frequent of those to be predicted; ties, and places that are left,
    go to the lowest ids. `None` where the head knows all tokens, or is of another kind.

    Args:
        rows: The rows to train on, `[R, T]` NumPy arrays.
        head: The head's sizes.

    Raises:
        InputError: If no token is to be predicted.
    """
    if not isinstance(head, Eagle3HeadConfig):
        return None
    if head.draft_vocab_size == head.vocab_size:
        return None
    wanted = rows.tokens[rows.loss_mask & (rows.segments > 0)]
    if not wanted.size:
        raise InputError(
            "the data have no token that is to be predicted, so a draft vocabulary "
            "cannot be counted; give data with answers"
        )
    counts = np.bincount(wanted, minlength=head.vocab_size)
    order = np.argsort(-counts, kind="stable").astype(np.int32)
    return np.sort(order[: head.draft_vocab_size])


def fixed(params: Any) -> tuple[Any, Any]:
    """Returns heads without what no gradient reaches, and that: the token offsets."""
    if not isinstance(params, Eagle3HeadParams):
        return params, None
    return dataclasses.replace(params, offsets=None), params.offsets


def with_fixed(params: Any, offsets: Any) -> Any:
    """Returns heads as they were before `fixed`."""
    return params if offsets is None else dataclasses.replace(params, offsets=offsets)


def with_target_tables(
    params: Any, head: TrainedHead, tables: Tables, tokens: jax.Array | None = None
) -> Any:
    """Returns weights to begin with: output heads are copies of the target's.

    Args:
        params: Random weights of heads.
        head: The heads' sizes.
        tables: The target's embedding and output head.
        tokens: `[W]` int32, the tokens that an EAGLE-3 head knows; `None` for all.
    """
    if isinstance(head, EagleHeadConfig):
        return params
    table = output_head(tables)
    if tokens is not None:
        table = table[:, tokens]
        offsets = jnp.asarray(tokens - jnp.arange(len(tokens)), jnp.int32)
        params = dataclasses.replace(params, offsets=offsets)

    def begin(one: Any) -> Any:
        if one.output_head is None:
            return one
        own = jnp.asarray(table, one.output_head.dtype)
        return dataclasses.replace(one, output_head=own)

    if isinstance(head, Eagle3HeadConfig):
        return begin(params)
    if isinstance(head, MedusaConfig):
        return tuple(begin(one) for one in params)
    return dataclasses.replace(params, heads=tuple(begin(one) for one in params.heads))


def tie_blocks(params: Any, head: TrainedHead) -> Any:
    """Returns heads whose residual blocks after one another are all the first.

    The official code repeats one module, so its files hold one block under several
    names; the first one's gradient is then the sum over all places.

    Args:
        params: The weights of heads of any kind.
        head: The heads' sizes.
    """
    if isinstance(head, EagleHeadConfig | Eagle3HeadConfig):
        return params

    def tie(one: Any) -> Any:
        return dataclasses.replace(one, blocks=one.blocks[:1] * len(one.blocks))

    if isinstance(head, MedusaConfig):
        return tuple(tie(one) for one in params)
    return dataclasses.replace(params, heads=tuple(tie(one) for one in params.heads))


def loss_of(head: TrainedHead) -> Loss:
    """Returns the loss that heads of a kind are trained with."""
    if isinstance(head, MedusaConfig):
        return medusa_loss
    if isinstance(head, Eagle3HeadConfig):
        return eagle3_loss
    return hydra_loss if isinstance(head, HydraConfig) else head_loss
