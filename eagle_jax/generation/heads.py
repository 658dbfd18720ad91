"""Heads of every kind, opened from the folder that holds them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from eagle_jax import checkpoints
from eagle_jax.config import Method
from eagle_jax.drafting.heads import HeadModel, head_model
from eagle_jax.errors import InputError
from eagle_jax.generation.methods import DRAFTS, EAGLE_METHODS, draft_kind
from eagle_jax.models.transformer import TransformerConfig


def check_kind(folder: Path, method: Method) -> None:
    """Refuses weights of another method.

    Args:
        folder: The folder of the weights, from `resolve`.
        method: The method, one that drafts with a model.

    Raises:
        InputError: If a folder of Medusa's or Hydra's heads is given to another method,
            or another folder to one of these two.
    """
    kind, wanted = checkpoints.heads_of(folder), draft_kind(method)
    if kind == wanted or (kind is None and wanted not in ("medusa", "hydra")):
        return
    if kind is not None:
        found = f"{kind.capitalize()} heads, for method {kind}"
    elif "fc.weight" in checkpoints.open_weights(folder).names():
        found = f"an EAGLE head, for methods {', '.join(EAGLE_METHODS)}"
    else:
        found = "a whole model, for method small-model"
    raise InputError(f"{folder} holds {found}; method {method} needs {DRAFTS[method]}")


def open_heads(
    folder: Path, target: TransformerConfig, dtype: str, method: Method
) -> tuple[HeadModel, Callable[..., tuple[Any, Any]]]:
    """Opens the heads that a method drafts with, without reading their weights.

    Args:
        folder: The folder of the heads, from `resolve`.
        target: The target's sizes.
        dtype: The type of the weights; not "auto".
        method: The method, one that drafts with heads.

    Returns:
        The heads as a draft model, and the function that reads their weights.

    Raises:
        InputError: If the heads cannot be used, or do not fit the target.
    """
    config: Any
    load: Any
    if method == "medusa":
        config = checkpoints.medusa_config(folder, target.vocab_size)
        load = checkpoints.load_medusa
    elif method == "hydra":
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
