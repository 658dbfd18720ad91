"""Hugging Face folders in and out, and pairs converted for quick loading."""

from eagle_jax.checkpoints.eagle3 import (
    eagle3_config,
    export_eagle3,
    load_eagle3_head,
    read_eagle3_head,
)
from eagle_jax.checkpoints.export import (
    check_exportable,
    export_head,
    export_target,
)
from eagle_jax.checkpoints.export_files import has_torch, is_export
from eagle_jax.checkpoints.heads import (
    check_eagle3_pair,
    check_pair,
    eagle3_target,
    load_head,
    read_head,
    read_own_embedding,
)
from eagle_jax.checkpoints.hf_config import (
    head_config,
    is_eagle3,
    stored_dtype,
    target_config,
)
from eagle_jax.checkpoints.hf_fields import stop_tokens
from eagle_jax.checkpoints.hub import heads_of, resolve
from eagle_jax.checkpoints.hydra import (
    export_hydra,
    hydra_config,
    load_hydra,
)
from eagle_jax.checkpoints.load import (
    check_max_length,
    check_small_model,
    load_target,
    open_target,
    read_embedding,
    target_bits,
)
from eagle_jax.checkpoints.medusa import (
    export_medusa,
    load_medusa,
    medusa_config,
)
from eagle_jax.checkpoints.orbax_store import convert_pair
from eagle_jax.checkpoints.weights import open_weights

__all__ = [
    "check_eagle3_pair",
    "check_exportable",
    "check_max_length",
    "check_pair",
    "check_small_model",
    "convert_pair",
    "eagle3_config",
    "eagle3_target",
    "export_eagle3",
    "export_head",
    "export_hydra",
    "export_medusa",
    "export_target",
    "has_torch",
    "head_config",
    "heads_of",
    "hydra_config",
    "is_eagle3",
    "is_export",
    "load_eagle3_head",
    "load_head",
    "load_hydra",
    "load_medusa",
    "load_target",
    "medusa_config",
    "open_target",
    "open_weights",
    "read_eagle3_head",
    "read_embedding",
    "read_head",
    "read_own_embedding",
    "resolve",
    "stop_tokens",
    "stored_dtype",
    "target_bits",
    "target_config",
]
