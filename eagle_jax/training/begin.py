"""A head whose weights are trained further, opened before any long work starts."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from eagle_jax import checkpoints
from eagle_jax.engine import Pair
from eagle_jax.errors import InputError
from eagle_jax.heads import Head, open_head
from eagle_jax.heads.levels import PositionHeads
from eagle_jax.models.transformer import TransformerConfig
from eagle_jax.parallel import PairSharding
from eagle_jax.parallel.placement import draft_shardings
from eagle_jax.training.config import TrainConfig

_NO_SIZES = ("kind", "include_embedding")  # Of settings: the rest is the head's.


def open_beginning(
    folder: Path, source: Pair, config: TrainConfig
) -> tuple[Head, Callable[[Any, PairSharding], Any]]:
    """Opens a head to begin with, whose sizes, rope and biases are kept.

    Args:
        folder: The head's folder.
        source: The target, opened from its files. In the type that its weights have
            in this run its embedding table and the head's must be equal: a head may
            have been exported so.
        config: All settings of the run, of which `head` sets no size.

    Returns:
        The head, and the function from the target's parameters and all shardings to
        its weights, float32.
    """
    kind, target = config.kind, source.sizes
    assert source.folder is not None, "targets are trained for from their files"
    if issubclass(kind, PositionHeads):
        raise InputError("`begin_with` is for EAGLE heads; leave it out")
    opened = open_head(folder, target)
    if type(opened.head) is not kind:
        raise InputError(
            f"{folder} holds {opened.head.title}, and heads of kind {kind.name} are "
            "trained; begin with one of these, or train the other kind"
        )
    opened.head.to_hf_config(checkpoints.Export())  # It can be exported.
    _check_sizes(config)
    own = opened.own_table(source.dtype)
    if own is not None:
        table = checkpoints.read_embedding(source.folder, source.dtype)
        if not np.array_equal(own, np.asarray(table)):
            raise InputError(
                f"{folder} holds a head with an embedding table of its own, and heads "
                "are trained with the target's; begin with another head"
            )
    head = begun_head(opened.head, target, config)

    def read(target_params: Any, sharding: PairSharding) -> Any:
        shardings = draft_shardings(sharding, head.init, head.config)
        params = opened.load(target_params, "float32", shardings)
        return dataclasses.replace(params, embedding=None)  # It is the target's.

    return head, read


def begun_head(head: Head, target: TransformerConfig, config: TrainConfig) -> Head:
    """Returns a head, of whose sizes the positions become those of the data."""
    length = min(target.max_positions, config.data.row_length)
    length = max(head.config.max_positions, length)
    sizes = dataclasses.replace(head.config, max_positions=length)
    return dataclasses.replace(head, config=sizes)


def _check_sizes(config: TrainConfig) -> None:
    """Refuses settings of sizes, which are the head's own."""
    usual = config.kind.Settings()
    for name, value in vars(config.head).items():
        if name not in _NO_SIZES and value != getattr(usual, name):
            raise InputError(
                f"{name} = {value}: the head of `begin_with` keeps its own; leave it "
                "out of [head]"
            )
