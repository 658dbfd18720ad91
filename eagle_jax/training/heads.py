"""The kinds of heads that are trained: their sizes, first weights and loss."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from eagle_jax.config import require
from eagle_jax.errors import InputError
from eagle_jax.models.eagle_head import EagleHeadConfig
from eagle_jax.models.hydra_heads import HydraConfig
from eagle_jax.models.medusa_heads import MedusaConfig
from eagle_jax.models.transformer import Tables, TransformerConfig, output_head
from eagle_jax.training.config import TrainConfig
from eagle_jax.training.loss import Metrics, head_loss
from eagle_jax.training.position_loss import hydra_loss, medusa_loss

TrainedHead = EagleHeadConfig | MedusaConfig | HydraConfig
"""The sizes of heads of any kind that is trained."""

Loss = Callable[..., tuple[jax.Array, Metrics]]
"""A loss with the arguments of `loss.head_loss`."""

# By table of the settings; `include_embedding` = false is true of heads of any kind.
_FOR_EAGLE = {
    "head": ("intermediate_size", "num_heads", "num_kv_heads", "inputs", "fc_bias"),
    "loss": (
        *("feature_weight", "token_weight", "noise", "noise_scale"),
        *("mask", "normalize"),
    ),
}
_FOR_OTHERS = {"head": ("draft_heads", "head_layers"), "loss": ("decay", "labels")}
_MEDUSA_HEADS, _HYDRA_HEADS, _MEDUSA_LAYERS, _HYDRA_LAYERS = 5, 4, 1, 4


def new_head(target: TransformerConfig, config: TrainConfig) -> TrainedHead:
    """Returns the sizes of new heads: those that are set, else published ones.

    Raises:
        InputError: If the attention heads that are set do not divide the target's
            width.
    """
    sizes = config.head
    check_kind(config)
    if sizes.kind == "eagle":
        return new_eagle_head(target, config)
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
        layer=target.layer.plain if sizes.kind == "hydra" else None,
    )


def new_eagle_head(target: TransformerConfig, config: TrainConfig) -> EagleHeadConfig:
    """Returns the sizes of a new EAGLE head, see `new_head`."""
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
    return EagleHeadConfig(
        layer=dataclasses.replace(
            layer.plain,
            intermediate_size=sizes.intermediate_size or layer.intermediate_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=layer.hidden_size // num_heads,
        ),
        vocab_size=target.vocab_size,
        max_positions=min(target.max_positions, config.data.row_length),
        fc_bias=sizes.fc_bias,
        inputs=sizes.inputs,
    )


def check_kind(config: TrainConfig) -> None:
    """Refuses settings that are of no use to the kind of head.

    Raises:
        InputError: If one is set that would change nothing.
    """
    kind, usual = config.head.kind, TrainConfig()
    others = _FOR_OTHERS if kind == "eagle" else _FOR_EAGLE
    for table, names in others.items():
        for name in names:
            value = getattr(getattr(config, table), name)
            holds = value == getattr(getattr(usual, table), name)
            wanted = f"left out: heads of kind {kind} have no use for it"
            require(holds, name, value, wanted)


def begin_with(params: Any, head: TrainedHead, tables: Tables) -> Any:
    """Returns weights to begin with: output heads are copies of the target's."""
    if isinstance(head, EagleHeadConfig):
        return params
    table = output_head(tables)

    def begin(one: Any) -> Any:
        if one.output_head is None:
            return one
        own = jnp.asarray(table, one.output_head.dtype)
        return dataclasses.replace(one, output_head=own)

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
    if isinstance(head, EagleHeadConfig):
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
    return hydra_loss if isinstance(head, HydraConfig) else head_loss
