"""Heads of every kind, opened from the folder that holds them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from eagle_jax import checkpoints
from eagle_jax.drafting.heads import HeadModel, head_model
from eagle_jax.errors import InputError
from eagle_jax.methods import EAGLE, HYDRA, MEDUSA, METHODS, SMALL_MODEL, Weights
from eagle_jax.models.transformer import TransformerConfig


def check_kind(folder: Path, weights: Weights) -> None:
    """Refuses weights of another kind.

    Args:
        folder: The folder of the weights, from `resolve`.
        weights: The kind that is wanted.

    Raises:
        InputError: If a folder of Medusa's or Hydra's heads is given for another kind,
            or another folder for one of these two.
    """
    kind = checkpoints.heads_of(folder)
    if kind == weights.kind or (kind is None and weights in (EAGLE, SMALL_MODEL)):
        return
    if kind is not None:
        found = f"{kind.capitalize()} heads"
    elif "fc.weight" in checkpoints.open_weights(folder).names():
        found = "an EAGLE head"
    else:
        found = "a whole model"
    methods = [row.name for row in METHODS.values() if row.weights is weights]
    raise InputError(
        f"{folder} holds {found}; method {' and '.join(methods)} needs "
        f"{weights.description}"
    )


def open_heads(
    folder: Path, target: TransformerConfig, dtype: str, weights: Weights
) -> tuple[HeadModel, Callable[..., tuple[Any, Any]]]:
    """Opens the heads of a kind, without reading their weights.

    Args:
        folder: The folder of the heads, from `resolve`.
        target: The target's sizes.
        dtype: The type of the weights; not "auto".
        weights: The kind of the heads.

    Returns:
        The heads as a draft model, and the function that reads their weights.

    Raises:
        InputError: If the heads cannot be used, or do not fit the target.
    """
    config: Any
    load: Any
    if weights is MEDUSA:
        config = checkpoints.medusa_config(folder, target.vocab_size)
        load = checkpoints.load_medusa
    elif weights is HYDRA:
        config = checkpoints.hydra_config(folder, target.layer)
        load = checkpoints.load_hydra
    elif checkpoints.is_eagle3(folder):
        config = checkpoints.eagle3_config(folder)
        load = checkpoints.load_eagle3_head
    else:
        config = checkpoints.head_config(folder)
        load = checkpoints.load_head
    checkpoints.check_pair(target, config)
    checkpoints.open_weights(folder)
    return head_model(config, dtype), load
