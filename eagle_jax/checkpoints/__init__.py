"""Hugging Face folders in and out, and pairs converted for quick loading."""

from eagle_jax.checkpoints.convert import convert_pair
from eagle_jax.checkpoints.eagle3 import (
    check_eagle3_pair,
    eagle3_config,
    eagle3_target,
    load_eagle3_head,
)
from eagle_jax.checkpoints.export import (
    export_head,
    export_target,
    has_torch,
    is_export,
)
from eagle_jax.checkpoints.hf_config import (
    head_config,
    is_eagle3,
    stored_dtype,
    target_config,
)
from eagle_jax.checkpoints.hub import fingerprint_folder, resolve
from eagle_jax.checkpoints.load import (
    check_max_length,
    check_pair,
    check_small_model,
    load_head,
    load_target,
    open_target,
    read_embedding,
    read_head,
    target_bits,
)
from eagle_jax.checkpoints.orbax_store import open_weights
from eagle_jax.checkpoints.tokenizer import (
    RefusedError,
    apply_chat_template,
    fix_date,
    load_tokenizer,
    stop_tokens,
)

__all__ = [
    "RefusedError",
    "apply_chat_template",
    "check_eagle3_pair",
    "check_max_length",
    "check_pair",
    "check_small_model",
    "convert_pair",
    "eagle3_config",
    "eagle3_target",
    "export_head",
    "export_target",
    "fingerprint_folder",
    "fix_date",
    "has_torch",
    "head_config",
    "is_eagle3",
    "is_export",
    "load_eagle3_head",
    "load_head",
    "load_target",
    "load_tokenizer",
    "open_target",
    "open_weights",
    "read_embedding",
    "read_head",
    "resolve",
    "stop_tokens",
    "stored_dtype",
    "target_bits",
    "target_config",
]
