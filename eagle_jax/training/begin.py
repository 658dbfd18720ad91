"""A head whose weights are trained further, opened before any long work starts."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from eagle_jax import checkpoints
from eagle_jax.drafting.heads import init_heads
from eagle_jax.errors import InputError
from eagle_jax.generation.heads import open_heads
from eagle_jax.generation.pairs import PairSource
from eagle_jax.generation.placement import draft_shardings
from eagle_jax.methods import EAGLE
from eagle_jax.models.eagle3_head import Eagle3HeadConfig
from eagle_jax.models.eagle_head import EagleHeadConfig
from eagle_jax.models.transformer import TransformerConfig
from eagle_jax.parallel import PairSharding
from eagle_jax.training.config import HeadConfig, TrainConfig

BegunHead = EagleHeadConfig | Eagle3HeadConfig
"""The sizes of heads that can be trained further."""

_NO_SIZES = ("kind", "include_embedding")  # Of settings: the rest is the head's.


@dataclasses.dataclass(frozen=True)
class Beginning:
    """A head to begin with.

    Attributes:
        sizes: Its sizes.
        read: The function from the target's parameters and all shardings to its
            weights, float32.
    """

    sizes: BegunHead
    read: Callable[[Any, PairSharding], Any]


def open_beginning(folder: Path, source: PairSource, config: TrainConfig) -> Beginning:
    """Opens a head to begin with, whose sizes, rope and biases are kept.

    Args:
        folder: The head's folder.
        source: The target, opened from its files. In the type that its weights have
            in this run its embedding table and the head's must be equal: a head may
            have been exported so.
        config: All settings of the run; sizes that `head` does not set are the head's.
    """
    kind, target = config.head.kind, source.config
    assert source.folder is not None, "targets are trained for from their files"
    if kind not in ("eagle2", "eagle3"):
        raise InputError("`begin_with` is for EAGLE heads; leave it out")
    model, load = open_heads(folder, target, "float32", EAGLE)
    head: Any = model.config
    is_eagle3 = isinstance(head, Eagle3HeadConfig)
    if is_eagle3 != (kind == "eagle3"):
        found = "EAGLE-3" if is_eagle3 else "EAGLE-1/2"
        raise InputError(
            f"{folder} holds an {found} head, and heads of kind {kind} are trained; "
            "begin with one of these, or train the other kind"
        )
    if not is_eagle3:
        checkpoints.check_exportable(head)
    _check_sizes(folder, head, target, config.head)
    own = checkpoints.read_own_embedding(folder, head, source.dtype)
    if own is not None:
        table = checkpoints.read_embedding(source.folder, source.dtype)
        if not np.array_equal(np.asarray(own), np.asarray(table)):
            raise InputError(
                f"{folder} holds a head with an embedding table of its own, and heads "
                "are trained with the target's; begin with another head"
            )
    length = min(target.max_positions, config.data.row_length)
    sizes = dataclasses.replace(head, max_positions=max(head.max_positions, length))

    def read(target_params: Any, sharding: PairSharding) -> Any:
        shardings = draft_shardings(sharding, init_heads, sizes)
        params = load(folder, target, target_params, "float32", shardings)[1]
        return dataclasses.replace(params, embedding=None)  # It is the target's.

    return Beginning(sizes, read)


def _check_sizes(
    folder: Path, head: BegunHead, target: TransformerConfig, wanted: HeadConfig
) -> None:
    """Refuses settings that the head does not have."""
    given: dict[str, Any] = vars(head) | vars(head.layer)
    asked = {
        name: value
        for name, value in vars(wanted).items()
        if name not in _NO_SIZES and value != getattr(HeadConfig(), name)
    }
    if wanted.feature_layers is not None:
        assert isinstance(head, Eagle3HeadConfig), "other kinds have no use for it"
        reading = checkpoints.eagle3_target(target, head.feature_layers)
        given |= {"feature_layers": reading.feature_layers}
        asked["feature_layers"] = tuple(map(int, wanted.feature_layers.split()))
    for name, value in asked.items():
        if given[name] != value:
            raise InputError(
                f"{folder} holds a head whose {name} is {given[name]}, not {value}; "
                f"leave {name} out of [head], or begin with a head that has it"
            )
