"""Hugging Face folders in: settings, names, weights and the tokenizer."""

from eagle_jax.checkpoints.model_config import (
    check_max_length,
    check_pair,
    head_config,
    stop_tokens,
    stored_dtype,
    target_config,
)
from eagle_jax.checkpoints.pair import load_head, load_target
from eagle_jax.checkpoints.source import read_json, resolve
from eagle_jax.checkpoints.tokenizer import load_tokenizer
from eagle_jax.checkpoints.weights import TensorFiles

__all__ = [
    "TensorFiles",
    "check_max_length",
    "check_pair",
    "head_config",
    "load_head",
    "load_target",
    "load_tokenizer",
    "read_json",
    "resolve",
    "stop_tokens",
    "stored_dtype",
    "target_config",
]
