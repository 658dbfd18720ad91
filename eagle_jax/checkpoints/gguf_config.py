"""What a GGUF file says, in the words of Hugging Face: settings and tensors."""

import dataclasses
import re
from typing import Any

import numpy as np

from eagle_jax.checkpoints.families import FAMILIES
from eagle_jax.checkpoints.gguf_header import Gguf
from eagle_jax.checkpoints.tensors import Part, StoredTensor
from eagle_jax.errors import InputError, shortened

_FAMILIES = {
    **{name: name for name in ("llama", "mistral", "qwen2", "qwen3", "gemma2", "phi3")},
    **{"qwen3moe": "qwen3_moe", "gemma3": "gemma3_text", "gpt-oss": "gpt_oss"},
}
"""The architectures that are read, and their `model_type`."""

# Of these llama.cpp keeps the rows of q and k in another order.
_PERMUTED = ("llama", "mistral")
_DRAFTS = ("eagle", "dflash", "medusa", "mtp")
# What people try that is no model to write texts with.
_OTHERS = {
    "mmproj": "a projector of images beside a model; give the model's own file",
    "adapter": "an adapter (LoRA); merge it into its model, and give that",
    "imatrix": "statistics for quantizing, no model",
    "vocab": "a vocabulary without a model",
}

_FIELDS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attention.sliding_window_pattern": "sliding_window_pattern",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
"""The fields that are read, without the architecture in front, and Hugging Face's."""

# Read below, or the same as what the tensors say.
_READ = """vocab_size rope.dimension_count rope.scaling.type rope.scaling.factor
    rope.scaling.original_context_length rope.scaling.attn_factor
    rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow rope.scaling.finetuned
    rope.scale_linear attention.value_length attention.causal tensor_data_layout"""
_NEUTRAL = (0, False, "", "none")

_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_sinks": "self_attn.sinks",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
"""The tensors by their names in GGUF and in Hugging Face's files, of a layer or not."""

_OWN_TENSORS = {
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "gpt-oss": {"post_attention_norm": "post_attention_layernorm"},
    "gemma": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}
"""What names mean in some architectures alone."""

# The stretch of each rotary frequency, for short and for long texts.
_FACTORS, _LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
_LLAMA_FACTORS = "rope_freqs.weight"

_NAME = re.compile(r"(blk\.(?P<layer>\d+)\.)?(?P<inner>\w+)(?P<kind>\.weight|\.bias)")


def config_of(gguf: Gguf) -> dict[str, Any]:
    """Returns what `config.json` would say.

    Raises:
        InputError: If it holds no model that can be run, naming what is in the way.
    """
    arch = _architecture(gguf)
    start, read = f"{arch}.", {*_FIELDS, *_READ.split()}
    fields = {name: x for name, x in gguf.fields.items() if name.startswith(start)}
    values = {name.removeprefix(start): value for name, value in fields.items()}
    for name, value in values.items():
        is_bidirectional = name == "attention.causal" and not value
        if is_bidirectional or (name not in read and value not in _NEUTRAL):
            raise _refusal(gguf, f"{start}{name} = {value!r} is not supported")
    config = {hf: values[name] for name, hf in _FIELDS.items() if name in values}
    heads, width = config.get("num_attention_heads"), config.get("hidden_size")
    if type(heads) is not int or heads < 1 or type(width) is not int:
        raise _refusal(gguf, f"{start}attention.head_count = {heads!r} is no number")
    turned = values.get("rope.dimension_count") if arch in _PERMUTED else None
    length = config.setdefault("head_dim", turned or width // heads)
    if values.get("attention.value_length", length) != length:
        raise _refusal(gguf, f"keys have a length of {length!r}, and values another")
    kind = _FAMILIES[arch]
    if arch == "llama" and "sliding_window" in config:
        kind = "mistral"
    table = gguf.tensors.get("token_embd.weight")
    if table is None:
        raise _refusal(gguf, "it lacks token_embd.weight, the embedding table")
    dtypes = {x.dtype for x in gguf.tensors.values() if len(x.shape) > 1}
    dtypes -= {"float32"} if len(dtypes) > 1 else set()
    config |= {
        "model_type": kind,
        "architectures": [FAMILIES[kind].architecture],
        "vocab_size": table.shape[0],
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "dtype": dtypes.pop() if len(dtypes) == 1 else "bfloat16",
        "eos_token_id": _stop_tokens(gguf),
        **_rope(gguf, values, config),
    }
    # What llama.cpp knows of an architecture, and its files do not say.
    if arch.startswith("gemma"):  # The largest of each has a scale of its own.
        is_largest = config.get("num_hidden_layers") in (46, 62)
        config["query_pre_attn_scalar"] = width // heads if is_largest else length
    elif arch == "qwen3moe":
        config["norm_topk_prob"] = True
    elif arch == "gpt-oss":
        size = config.pop("moe_intermediate_size", config.get("intermediate_size"))
        config |= {"attention_bias": True, "intermediate_size": size}
    elif kind == "mistral":
        config.setdefault("sliding_window", None)
    return config


def tensors_of(gguf: Gguf) -> dict[str, StoredTensor]:
    """Returns the tensors by their names in Hugging Face's files, as those hold them.

    Args:
        gguf: A file that `config_of` has taken.

    Raises:
        InputError: If there is a tensor of another model.
    """
    arch, found, left = _architecture(gguf), {}, []
    is_gemma = arch.startswith("gemma")
    names = _TENSORS | _OWN_TENSORS.get("gemma" if is_gemma else arch, {})
    heads = gguf.fields.get(f"{arch}.attention.head_count", 1)
    groups = gguf.fields.get(f"{arch}.attention.head_count_kv", heads)
    counts = {"attn_q": heads, "attn_k": groups} if arch in _PERMUTED else {}
    for name, tensor in gguf.tensors.items():
        if name in (_FACTORS, _LONG_FACTORS, _LLAMA_FACTORS):
            continue
        one = _NAME.fullmatch(name)
        if one is None or one["inner"] not in names:
            left.append(name)
            continue
        inner, layer = one["inner"], one["layer"]
        if inner in counts:
            tensor = _unpermuted(tensor, counts[inner])
        if is_gemma and inner.endswith("norm"):
            tensor = _less_one(tensor)
        theirs = names[inner] + ("" if inner == "attn_sinks" else one["kind"])
        found[f"model.layers.{layer}.{theirs}" if layer else theirs] = tensor
    if left:
        raise _refusal(gguf, f"it holds tensors of another model: {shortened(left, 4)}")
    return found


def _refusal(gguf: Gguf, reason: str) -> InputError:
    return InputError(f"{gguf.path}: {reason}")


def _architecture(gguf: Gguf) -> str:
    """Returns the architecture of a model that can be run."""
    kind, arch = (
        gguf.fields.get(f"general.{name}") for name in ("type", "architecture")
    )
    kind = "mmproj" if arch == "clip" else kind
    if kind in _OTHERS:
        raise _refusal(gguf, f"it holds {_OTHERS[kind]}")
    if any(one in str(arch) for one in _DRAFTS):
        told = f"it holds a draft ({arch}), not a target; give the model it drafts for"
        raise _refusal(gguf, f"{told}, and a head of Hugging Face's format as `draft`")
    if arch not in _FAMILIES:
        told = f"general.architecture = {arch!r} is not supported; known are "
        raise _refusal(gguf, told + ", ".join(_FAMILIES))
    return arch


def _rope(gguf: Gguf, values: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Returns the scaling of rotary embeddings, and how much of a head is turned."""
    found: dict[str, Any] = {}
    turned, width = values.get("rope.dimension_count"), config["head_dim"]
    if isinstance(turned, int) and turned != width:
        found["partial_rotary_factor"] = turned / width
    names = "type factor original_context_length attn_factor"
    kind, factor, original, attention = (
        values.get(f"rope.scaling.{name}") for name in names.split()
    )
    factor = factor or values.get("rope.scale_linear")
    positions = config.get("max_position_embeddings")
    if kind == "yarn" and attention not in (None, 1):
        raise _refusal(gguf, f"rope.scaling.attn_factor = {attention!r} is not known")
    freqs = gguf.tensors.get(_LLAMA_FACTORS)
    short = gguf.tensors.get(_FACTORS, freqs)
    if freqs is not None and kind not in (None, "none"):
        raise _refusal(gguf, f"{_LLAMA_FACTORS} beside rope.scaling.type = {kind!r}")
    if short is not None:
        # Where texts of all lengths have the same ones, nothing is turned anew.
        scaling = {
            "rope_type": "longrope",
            "short_factor": _numbers(short),
            "long_factor": _numbers(gguf.tensors.get(_LONG_FACTORS, short)),
            "original_max_position_embeddings": positions if freqs else original,
        }
        if attention or freqs is not None:
            scaling["attention_factor"] = attention or 1.0
    elif kind == "linear" or (kind is None and factor not in (None, 0, 1)):
        scaling = {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        scaling = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            "beta_fast": values.get("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": values.get("rope.scaling.yarn_beta_slow", 1.0),
            "truncate": config.get("num_local_experts") is None,
        }
    elif kind in (None, "none", "longrope"):
        return found
    else:
        raise _refusal(gguf, f"rope.scaling.type = {kind!r} is not supported")
    return found | {"rope_scaling": scaling}


def _numbers(tensor: StoredTensor) -> list[float]:
    whole = tensor.read_part(tuple((0, size) for size in tensor.shape))
    return whole.ravel().astype(float).tolist()


def _stop_tokens(gguf: Gguf) -> list[int]:
    """Returns the ids that end a text: of a text, of a turn, of a message."""
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = [gguf.fields.get(f"tokenizer.ggml.{name}") for name in names]
    return sorted({one for one in found if one is not None})


def _less_one(tensor: StoredTensor) -> StoredTensor:
    def read_part(part: Part) -> np.ndarray:
        return tensor.read_part(part) - np.float32(1)

    return dataclasses.replace(tensor, read_part=read_part)


def _unpermuted(tensor: StoredTensor, heads: int) -> StoredTensor:
    """Returns the rows of q or k in the order of Hugging Face's files.

    llama.cpp turns neighbouring dimensions of a head by an angle; there they stand half
    a head apart.
    """
    rows = tensor.shape[0]
    if type(heads) is not int or heads < 1 or rows % (2 * heads):
        return tensor  # Its shape is refused with those of the others.
    order = np.arange(rows).reshape(heads, rows // heads // 2, 2)
    order = order.swapaxes(1, 2).ravel()

    def read_part(part: Part) -> np.ndarray:
        (first, last), *others = part
        wanted = order[first:last]
        start, stop = int(wanted.min()), int(wanted.max()) + 1
        return tensor.read_part(((start, stop), *others))[wanted - start]

    return dataclasses.replace(tensor, read_part=read_part)
