"""The sizes of a target and of what drafts, from their parameters."""

import dataclasses
from typing import Any

from eagle_jax.benchmarks.roofline import ModelSizes
from eagle_jax.drafting import SmallModel
from eagle_jax.drafting.eagle import Eagle3DrafterParams, FeatureHead
from eagle_jax.drafting.small_model import NarrowParams
from eagle_jax.errors import InputError
from eagle_jax.models.transformer import Transformer


def target_sizes(target: Any, params: Any, *, dtype: str) -> ModelSizes:
    """Returns the sizes of a target.

    Args:
        target: The `Target`.
        params: Its parameters; only their shapes are read.
        dtype: The type of weights and caches, whatever `params` have.

    Raises:
        InputError: If it is another model than this package's.
    """
    if not isinstance(target, Transformer):
        raise InputError(
            f"costs are predicted for this package's decoder, not for "
            f"{type(target).__name__}; measure them"
        )
    tables = params.embedding, params.output_head
    table = params.embedding if params.output_head is None else params.output_head
    return ModelSizes.of(
        target.config.layer, params.layers, table, dtype=dtype, tables=tables
    )


def draft_sizes(model: Any, params: Any, *, dtype: str) -> ModelSizes:
    """Returns the sizes of a draft model, with as many tokens as it drafts.

    Args:
        model: The `DraftModel`: an EAGLE head or a small model.
        params: Its parameters; only their shapes are read. An EAGLE head's embedding
            table is taken to be the target's.
        dtype: The type of weights and caches, whatever `params` have.

    Raises:
        InputError: If it is of another kind.
    """
    if isinstance(model, SmallModel):
        is_narrow = isinstance(params, NarrowParams)
        whole = params.model if is_narrow else params
        return target_sizes(model.target, whole, dtype=dtype)
    if not isinstance(model, FeatureHead):
        raise InputError(
            "costs are predicted for EAGLE heads and small models, not for "
            f"{type(model).__name__}; measure them"
        )
    if isinstance(params, Eagle3DrafterParams):
        fused, table = params.head.fc, params.head.output_head
        return ModelSizes.of(
            model.config.layer,
            dataclasses.replace(params.head, fc=None, output_head=None),
            table,
            dtype=dtype,
            tables=table,
            fused=fused,
        )
    is_narrow, table = params.offsets is not None, params.output_head
    return ModelSizes.of(
        model.config.layer,
        params.head,
        params.embedding if table is None else table,
        dtype=dtype,
        tables=table if is_narrow else (),
    )
