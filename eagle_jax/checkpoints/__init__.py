"""Hugging Face folders in and out, and pairs converted for quick loading."""

from eagle_jax.checkpoints.export_files import Export, has_torch, is_export
from eagle_jax.checkpoints.hf_config import stored_dtype, target_config
from eagle_jax.checkpoints.hf_fields import stop_tokens
from eagle_jax.checkpoints.hub import resolve
from eagle_jax.checkpoints.load import (
    check_max_length,
    check_small_model,
    load_target,
    open_target,
    read_embedding,
    target_bits,
)
from eagle_jax.checkpoints.orbax_store import convert_pair
from eagle_jax.checkpoints.weights import open_weights

__all__ = [
    "Export",
    "check_max_length",
    "check_small_model",
    "convert_pair",
    "has_torch",
    "is_export",
    "load_target",
    "open_target",
    "open_weights",
    "read_embedding",
    "resolve",
    "stop_tokens",
    "stored_dtype",
    "target_bits",
    "target_config",
]
