"""Writes GGUF files as llama.cpp's converters do, from Hugging Face's tensors."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

gguf: Any = pytest.importorskip("gguf", reason="needs gguf: pip install '.[gguf]'")

_Q = gguf.GGMLQuantizationType
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.{}.gate_proj": "ffn_gate_exps",
    "mlp.experts.{}.up_proj": "ffn_up_exps",
    "mlp.experts.{}.down_proj": "ffn_down_exps",
}
_GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_GPT_OSS = {"post_attention_layernorm": "post_attention_norm"}


def name_of(name: str, arch: str) -> str:
    """The name of a tensor in GGUF."""
    if name.endswith("self_attn.sinks"):
        return f"blk.{name.split('.')[2]}.attn_sinks.weight"
    stem, _, kind = name.rpartition(".")
    names = _NAMES | (_GEMMA if arch.startswith("gemma") else {})
    names |= _GPT_OSS if arch == "gpt-oss" else {}
    if not stem.startswith("model.layers."):
        return f"{names[stem]}.{kind}"
    _, _, number, inner = stem.split(".", maxsplit=3)
    return f"blk.{number}.{names[inner]}.{kind}"


def permuted(tensor: np.ndarray, heads: int) -> np.ndarray:
    """The rows of q or k as `LlamaModel.permute` of the converter orders them."""
    shape = (heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return tensor.reshape(shape).swapaxes(1, 2).reshape(tensor.shape)


def write_gguf(
    path: Path,
    tensors: dict[str, np.ndarray],
    fields: dict[str, Any],
    arch: str = "llama",
    *,
    kind: Any = _Q.F32,
    name: str = "",
) -> Path:
    """Writes a model.

    Args:
        path: The file.
        tensors: The tensors by Hugging Face's names, float32; experts are stacks.
        fields: The metadata; a key that begins with a dot belongs to the architecture.
        arch: The architecture.
        kind: The type of matrices; norms and biases stay float32.
        name: The model's own name.
    """
    writer = gguf.GGUFWriter(path, arch)
    if name:
        writer.add_name(name)
    for key, value in fields.items():
        full = f"{arch}{key}" if key.startswith(".") else key
        if isinstance(value, bool):
            writer.add_bool(full, value)
        elif isinstance(value, int):
            writer.add_uint32(full, value)
        elif isinstance(value, float):
            writer.add_float32(full, value)
        elif isinstance(value, list):
            writer.add_array(full, value)
        else:
            writer.add_string(full, value)
    heads, groups = fields[".attention.head_count"], fields[".attention.head_count_kv"]
    for theirs, tensor in tensors.items():
        stored = tensor
        if arch in ("llama", "mistral") and "self_attn.q_proj" in theirs:
            stored = permuted(tensor, heads or 1)
        if arch in ("llama", "mistral") and "self_attn.k_proj" in theirs:
            stored = permuted(tensor, groups)
        if arch.startswith("gemma") and theirs.endswith("norm.weight"):
            stored = tensor + np.float32(1)
        own = theirs if theirs.startswith("rope_") else name_of(theirs, arch)
        if tensor.ndim > 1 and kind != _Q.F32:
            blocks = gguf.quants.quantize(stored, kind)
            writer.add_tensor(own, blocks, raw_dtype=kind)
        else:
            writer.add_tensor(own, np.ascontiguousarray(stored))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
