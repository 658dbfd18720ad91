"""Hugging Face folders in and out."""

from eagle_jax.checkpoints.export_files import Export, has_torch, is_export
from eagle_jax.checkpoints.hf_config import target_config
from eagle_jax.checkpoints.hf_fields import stop_tokens, stored_dtype
from eagle_jax.checkpoints.hub import resolve
from eagle_jax.checkpoints.load import (
    check_bits,
    check_max_length,
    load_target,
    open_target,
    read_embedding,
)
from eagle_jax.checkpoints.weights import open_weights

__all__ = [
    "Export",
    "check_bits",
    "check_max_length",
    "has_torch",
    "is_export",
    "load_target",
    "open_target",
    "open_weights",
    "read_embedding",
    "resolve",
    "stop_tokens",
    "stored_dtype",
    "target_config",
]
