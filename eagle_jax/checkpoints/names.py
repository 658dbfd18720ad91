"""One table of tensor names per kind of checkpoint, used in both directions."""

import re
from typing import Any

import jax
import numpy as np

_LAYER = {
    "input_norm": "input_layernorm.weight",
    "query": "self_attn.q_proj.weight",
    "query_bias": "self_attn.q_proj.bias",
    "key": "self_attn.k_proj.weight",
    "key_bias": "self_attn.k_proj.bias",
    "value": "self_attn.v_proj.weight",
    "value_bias": "self_attn.v_proj.bias",
    "output": "self_attn.o_proj.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}

TRANSFORMER = {
    "embedding": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "output_head": "lm_head.weight",
    **{f"layers.{{}}.{ours}": f"model.layers.{{}}.{hf}" for ours, hf in _LAYER.items()},
}
"""Llama and Mistral: path in `TransformerParams` -> tensor name."""

EAGLE_HEAD = {
    "embedding": "embed_tokens.weight",
    "fc": "fc.weight",
    "fc_bias": "fc.bias",
    **{f"layer.{ours}": f"layers.0.{hf}" for ours, hf in _LAYER.items()},
}
"""EAGLE-1/2 heads: path in `EagleHeadParams` -> tensor name."""


def tensor_names(params: Any, table: dict[str, str]) -> Any:
    """Returns a pytree like `params` with the name of each tensor in it.

    Args:
        params: A pytree of arrays or of their shapes; absent tensors are `None`.
        table: Paths to names; `{}` stands for the number of a layer.
    """

    def name(path: tuple[Any, ...], leaf: Any) -> str:
        del leaf
        text = jax.tree_util.keystr(path, simple=True, separator=".")
        number = re.search(r"(?<=\.)\d+(?=\.)", text)
        if number is None:
            return table[text]
        return table[text.replace(number[0], "{}", 1)].format(number[0])

    return jax.tree_util.tree_map_with_path(name, params)


def is_transposed(name: str) -> bool:
    """Returns whether files hold this tensor `[out, in]` and we hold it `[in, out]`.

    That is every matrix but the embedding tables.
    """
    return name.endswith(("_proj.weight", "fc.weight", "lm_head.weight"))


def by_name(params: Any, table: dict[str, str]) -> dict[str, Any]:
    """Returns the leaves of a pytree by the names of their tensors, as in files.

    Args:
        params: As for `tensor_names`.
        table: As for `tensor_names`.
    """
    listed = jax.tree.leaves(tensor_names(params, table))
    named = zip(listed, jax.tree.leaves(params), strict=True)
    return {name: _as_in_file(name, leaf) for name, leaf in named}


def _as_in_file(name: str, leaf: Any) -> Any:
    if not is_transposed(name):
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape[::-1], leaf.dtype)
    return np.asarray(leaf).T  # A view: on CPUs nothing is copied.
