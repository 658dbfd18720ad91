"""One table of tensor names per kind of checkpoint, used in both directions."""

import re
from typing import Any

import jax

# These have a weight, and some a bias.
_MATRICES = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "mlp.router": "mlp.gate",
    "mlp.experts.gate": "mlp.experts.{{}}.gate_proj",
    "mlp.experts.up": "mlp.experts.{{}}.up_proj",
    "mlp.experts.down": "mlp.experts.{{}}.down_proj",
}
LAYER = {
    **{ours: f"{hf}.weight" for ours, hf in _MATRICES.items()},
    **{f"{ours}_bias": f"{hf}.bias" for ours, hf in _MATRICES.items()},
    "input_norm": "input_layernorm.weight",
    "output": "self_attn.o_proj.weight",
    "out_bias": "self_attn.o_proj.bias",
    "sinks": "self_attn.sinks",
    "mlp_norm": "post_attention_layernorm.weight",
    "query_norm": "self_attn.q_norm.weight",
    "key_norm": "self_attn.k_norm.weight",
}
"""The tensor names of a layer, by path in `LayerParams`.

A name with braces for a number names a stack of tensors, see `stacks.stacked`.
"""

TRANSFORMER = {
    "embedding": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "output_head": "lm_head.weight",
    **{f"layers.{{}}.{ours}": f"model.layers.{{}}.{hf}" for ours, hf in LAYER.items()},
}
"""The tensor names of targets, by path in `TransformerParams`; Mixtral has others."""

_MIXTRAL = {
    "router": "gate",
    "experts.gate": "experts.{{}}.w1",
    "experts.up": "experts.{{}}.w3",
    "experts.down": "experts.{{}}.w2",
}
MIXTRAL = TRANSFORMER | {
    f"layers.{{}}.mlp.{ours}": f"model.layers.{{}}.block_sparse_moe.{hf}.weight"
    for ours, hf in _MIXTRAL.items()
}
"""The tensor names of Mixtral targets."""

GEMMA = TRANSFORMER | {
    f"layers.{{}}.{ours}": f"model.layers.{{}}.{hf}.weight"
    for ours, hf in {
        "output_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_output_norm": "post_feedforward_layernorm",
    }.items()
}
"""The same where outputs are normalised, and Llama's name of a norm means another."""

MAPS = ("d2t", "t2d")
"""The maps from an EAGLE-3 head's tokens to the target's and back, no weights."""


def tensor_names(params: Any, table: dict[str, str]) -> Any:
    """Returns a pytree like `params` with the name of each tensor in it.

    Args:
        params: A pytree of arrays or of their shapes; absent tensors are `None`.
        table: Names by path; `{}` stands for the number of a layer or a head,
            unless the path itself has a name.
    """

    def name(path: tuple[Any, ...], leaf: Any) -> str:
        text = jax.tree_util.keystr(path, simple=True, separator=".")
        number = re.compile(r"(?<=\.)\d+(?=\.)")
        known = text if text in table else number.sub("{}", text)
        return table[known].format(*number.findall(text))

    return jax.tree_util.tree_map_with_path(name, params)


def is_transposed(name: str) -> bool:
    """Returns whether files hold this tensor `[out, in]` and we hold it `[in, out]`.

    That is every matrix but the embedding tables, and no vector or stack of them.
    """
    return not name.endswith(("embed_tokens.weight", "markov_w1.weight", ".bias"))


def transposed(shape: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the shape, or part, of a transposed matrix, or of a stack of them."""
    return *shape[:-2], *shape[-2:][::-1]


def by_name(params: Any, table: dict[str, str]) -> dict[str, Any]:
    """Returns the leaves of a pytree by tensor name, of what `tensor_names` takes."""
    listed = jax.tree.leaves(tensor_names(params, table))
    return dict(zip(listed, jax.tree.leaves(params), strict=True))
