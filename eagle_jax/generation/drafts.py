"""What drafts for a target, opened before any weights are read."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eagle_jax import checkpoints
from eagle_jax.drafting import DraftModel, SmallModel
from eagle_jax.errors import InputError
from eagle_jax.generation.placement import draft_shardings
from eagle_jax.heads import find_head, open_head
from eagle_jax.methods import METHODS, SMALL_MODEL, Weights
from eagle_jax.models import transformer
from eagle_jax.models.transformer import (
    Transformer,
    TransformerConfig,
    TransformerParams,
)
from eagle_jax.parallel import PairSharding

ReadDraft = Callable[[Any, PairSharding | None], Any]
"""Reads a draft model's weights: `(target_params, sharding) -> params`.

A head borrows tables of the target's weights.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftSource:
    """A draft model that is opened, but whose weights are not read.

    Attributes:
        model: The draft model.
        read: The function that reads or makes its weights, to be laid out by a
            sharding or, given `None`, on the default device.
        folder: The folder of its files, `None` if it has none.
        tokens: The tokens that it chooses among, ascending; `None` for all.
    """

    model: DraftModel
    read: ReadDraft
    folder: Path | None = None
    tokens: tuple[int, ...] | None = None


def open_draft_model(
    name: str, target: TransformerConfig, *, dtype: str, weights: Weights
) -> DraftSource:
    """Opens a model that drafts for a target that is opened already.

    Args:
        name: The folder or hub name of the weights.
        target: The target's sizes.
        dtype: The type of the weights; not "auto".
        weights: The kind of the weights.

    Raises:
        InputError: If the folder holds weights of another kind.
    """
    folder = checkpoints.resolve(name)
    head = find_head(folder)
    if (head.family if head else SMALL_MODEL.kind) != weights.kind:
        methods = [row.name for row in METHODS.values() if row.weights is weights]
        needs = "methods {} need" if len(methods) > 1 else "method {} needs"
        raise InputError(
            f"{folder} holds {head.title if head else 'a whole model'}; "
            f"{needs.format(', '.join(methods))} {weights.description}"
        )
    if head is None:
        small, _ = checkpoints.open_target(folder)
        if small.vocab_size != target.vocab_size:
            raise InputError(
                f"the small model has {small.vocab_size} tokens, the target "
                f"{target.vocab_size}; give a model with the target's tokenizer"
            )

        def read_small(_: TransformerParams, sharding: PairSharding | None) -> Any:
            shardings = draft_shardings(sharding, transformer.init_params, small)
            return checkpoints.load_target(folder, dtype, shardings)[1]

        decoder = Transformer(config=small, dtype=dtype)
        drafted = SmallModel(target=decoder, vocab_size=small.vocab_size)
        return DraftSource(model=drafted, read=read_small, folder=folder)
    opened = open_head(folder, target)
    model = head.model(opened.config, dtype)

    def read_head(
        target_params: TransformerParams, sharding: PairSharding | None
    ) -> Any:
        shardings = draft_shardings(sharding, head.init, opened.config)
        params = opened.load(target_params, dtype, shardings)
        return model.join(params, target_params)

    return DraftSource(model=model, read=read_head, folder=folder)
