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
    "query_norm": "self_attn.q_norm.weight",
    "key_norm": "self_attn.k_norm.weight",
    "mlp.gate": "mlp.gate_proj.weight",
    "mlp.up": "mlp.up_proj.weight",
    "mlp.down": "mlp.down_proj.weight",
    "mlp.router": "block_sparse_moe.gate.weight",
    "mlp.experts.{}.gate": "block_sparse_moe.experts.{}.w1.weight",
    "mlp.experts.{}.up": "block_sparse_moe.experts.{}.w3.weight",
    "mlp.experts.{}.down": "block_sparse_moe.experts.{}.w2.weight",
}

TRANSFORMER = {
    "embedding": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "output_head": "lm_head.weight",
    **{f"layers.{{}}.{ours}": f"model.layers.{{}}.{hf}" for ours, hf in _LAYER.items()},
}
"""The tensor names of targets of every family, by path in `TransformerParams`."""

EAGLE_HEAD = {
    "embedding": "embed_tokens.weight",
    "fc": "fc.weight",
    "fc_bias": "fc.bias",
    **{f"layer.{ours}": f"layers.0.{hf}" for ours, hf in _LAYER.items()},
}
"""The tensor names of EAGLE-1/2 heads, by path in `EagleHeadParams`."""


def _eagle3_head(prefix: str) -> dict[str, str]:
    layer = {ours: hf for ours, hf in _LAYER.items() if ours != "input_norm"}
    return {
        "embedding": "embed_tokens.weight",
        "fc": "fc.weight",
        "embedding_norm": f"{prefix}.input_layernorm.weight",
        "feature_norm": f"{prefix}.hidden_norm.weight",
        "norm": "norm.weight",
        "output_head": "lm_head.weight",
        **{f"fc_norm.{number}": f"fc_norm.{number}.weight" for number in range(3)},
        **{f"layer.{ours}": f"{prefix}.{hf}" for ours, hf in layer.items()},
    }


EAGLE3_HEAD = _eagle3_head("midlayer")
"""The tensor names of published EAGLE-3 heads, by path in `Eagle3HeadParams`."""

EAGLE3_HEAD_ELSEWHERE = _eagle3_head("layers.0")
"""The tensor names of other trainers' EAGLE-3 heads, by path in `Eagle3HeadParams`."""

EAGLE3_HEADS = {"midlayer": EAGLE3_HEAD, "layers.0": EAGLE3_HEAD_ELSEWHERE}
"""Both tables of EAGLE-3 heads, by what the names of the layer begin with."""


def medusa_heads(num_layers: int, prefix: str = "") -> dict[str, str]:
    """Returns the tensor names of Medusa's heads, by path below `heads`.

    Args:
        num_layers: The number of residual blocks of each head.
        prefix: What every name begins with.
    """
    block = f"{prefix}{{}}.{{}}.linear"
    return {
        "heads.{}.blocks.{}.linear": f"{block}.weight",
        "heads.{}.blocks.{}.linear_bias": f"{block}.bias",
        "heads.{}.output_head": f"{prefix}{{}}.{num_layers}.weight",
    }


def hydra_heads(num_heads: int, num_layers: int, *, has_prefix: bool) -> dict[str, str]:
    """Returns the tensor names of Hydra's heads, by path in `HydraParams`.

    With a prefix layer, a dropout stands before each block and each output head and is
    counted, too.

    Args:
        num_heads: The number of heads.
        num_layers: The number of blocks of each head, the first one included.
        has_prefix: Whether there is a prefix layer.
    """
    first, step, last = (1, 2, ".1") if has_prefix else (0, 1, "")
    table = {
        "heads.{}.output_head": f"hydra_lm_head.{{}}{last}.weight",
        "heads.{}.output_bias": f"hydra_lm_head.{{}}{last}.bias",
        "norm": "prefix_embeding_layer.norm.weight",  # Their spelling.
    }
    for ours, hf in _LAYER.items():
        table[f"layer.{ours}"] = f"prefix_embeding_layer.layers.0.{hf}"
    for ours, part in (("linear", "linear"), ("residual", "res_connection")):
        name = f"hydra_mlp.{{}}.{first}.{part}"
        table[f"heads.{{}}.first.{ours}"] = f"{name}.weight"
        table[f"heads.{{}}.first.{ours}_bias"] = f"{name}.bias"
    for head in range(num_heads):
        for number in range(1, num_layers):
            path = f"heads.{head}.blocks.{number - 1}.linear"
            name = f"hydra_mlp.{head}.{first + number * step}.linear"
            table |= {path: f"{name}.weight", f"{path}_bias": f"{name}.bias"}
    return table


MAPS = ("d2t", "t2d")
"""The maps from an EAGLE-3 head's tokens to the target's and back, no weights."""


_PARTS = (".values", ".scales")

_MATRICES = (
    *("_proj.weight", "fc.weight", "lm_head.weight"),
    *(".gate.weight", ".w1.weight", ".w2.weight", ".w3.weight"),
    *(".linear.weight", ".res_connection.weight"),
    # Output heads of Medusa and Hydra are numbered: 4.1.weight, hydra_lm_head.0.weight.
    *(f"{digit}.weight" for digit in range(10)),
)


def tensor_names(params: Any, table: dict[str, str]) -> Any:
    """Returns a pytree like `params` with the name of each tensor in it.

    Args:
        params: A pytree of arrays or of their shapes; absent tensors are `None`.
        table: Names by path; `{}` stands for the number of a layer, an expert or a
            head, unless the path itself has a name.
    """

    def name(path: tuple[Any, ...], leaf: Any) -> str:
        del leaf
        text = jax.tree_util.keystr(path, simple=True, separator=".")
        part = text[-len(_PARTS[0]) :] if is_quantized(text) else ""
        text = text.removesuffix(part)
        number = re.compile(r"(?<=\.)\d+(?=\.)")
        known = text if text in table else number.sub("{}", text)
        return table[known].format(*number.findall(text)) + part

    return jax.tree_util.tree_map_with_path(name, params)


def is_quantized(name: str) -> bool:
    """Returns whether a tensor is part of a quantized matrix, stored as we hold it."""
    return name.endswith(_PARTS)


def is_transposed(name: str) -> bool:
    """Returns whether files hold this tensor `[out, in]` and we hold it `[in, out]`.

    That is every matrix but the embedding tables and the quantized ones. A vector is
    its own transpose.
    """
    return name.endswith(_MATRICES)


def by_name(params: Any, table: dict[str, str]) -> dict[str, Any]:
    """Returns the leaves of a pytree by tensor name, each as files hold it.

    Args:
        params: A pytree of arrays or of their shapes; absent tensors are `None`.
        table: Names by path, see `tensor_names`.
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
