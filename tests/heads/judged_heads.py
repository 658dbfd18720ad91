"""Heads of Medusa and Hydra in published layouts, and plain PyTorch that runs them.

Written from the formulas of the papers and the official code; nothing here is shared
with what it judges.
"""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.functional import silu

State = dict[str, torch.Tensor]

PREFIX = "prefix_embeding_layer"


class Sizes(NamedTuple):
    """Sizes of a target of Llama's family, and of its layers."""

    width: int
    vocabulary: int
    intermediate: int
    heads: int
    kv_heads: int
    epsilon: float
    theta: float


def sizes_of(folder: Path) -> Sizes:
    """The sizes in a target's `config.json`."""
    read = json.loads((folder / "config.json").read_text())
    return Sizes(
        width=read["hidden_size"],
        vocabulary=read["vocab_size"],
        intermediate=read["intermediate_size"],
        heads=read["num_attention_heads"],
        kv_heads=read["num_key_value_heads"],
        epsilon=read["rms_norm_eps"],
        theta=read.get("rope_theta", 10000.0),
    )


def medusa_state(
    sizes: Sizes, heads: int = 5, layers: int = 1, *, own_output: bool = True
) -> State:
    """Random Medusa heads by tensor name."""
    draw, state = _Draw(), State()
    for head in range(heads):
        for layer in range(layers):
            draw.linear(state, f"{head}.{layer}.linear", sizes.width, sizes.width)
        if own_output:
            name = f"{head}.{layers}.weight"
            state[name] = draw(sizes.vocabulary, sizes.width)
    return state


def hydra_state(sizes: Sizes, arch: str, heads: int = 4, layers: int = 4) -> State:
    """Random Hydra heads by tensor name; blocks after the first are one module."""
    draw, state, width = _Draw(), State(), sizes.width
    is_prefix = arch == "prefix-mlp"
    for head in range(heads):
        numbers = [2 * n + 1 if is_prefix else n for n in range(layers)]
        for part in ("linear", "res_connection"):
            name = f"hydra_mlp.{head}.{numbers[0]}.{part}"
            draw.linear(state, name, width, (head + 2) * width)
        block = State()
        draw.linear(block, "", width, width)
        for number in numbers[1:]:
            for name, tensor in block.items():
                state[f"hydra_mlp.{head}.{number}.linear{name}"] = tensor
        name = f"hydra_lm_head.{head}" + (".1" if is_prefix else "")
        draw.linear(state, name, sizes.vocabulary, width)
    if is_prefix:
        kv = width // sizes.heads * sizes.kv_heads
        layer = f"{PREFIX}.layers.0"
        shapes = {
            "self_attn.q_proj": (width, width),
            "self_attn.k_proj": (kv, width),
            "self_attn.v_proj": (kv, width),
            "self_attn.o_proj": (width, width),
            "mlp.gate_proj": (sizes.intermediate, width),
            "mlp.up_proj": (sizes.intermediate, width),
            "mlp.down_proj": (width, sizes.intermediate),
        }
        for name, shape in shapes.items():
            state[f"{layer}.{name}.weight"] = draw(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            state[f"{layer}.{name}.weight"] = 1 + draw(width)
        state[f"{PREFIX}.norm.weight"] = 1 + draw(width)
        state[f"{PREFIX}.embed_tokens.weight"] = draw(sizes.vocabulary, width)
    state["input_embed_fn.weight"] = draw(sizes.vocabulary, width)
    return state


class _Draw:
    """Draws tensors; a row's product with a row of ones has deviation 1."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)

    def __call__(self, *shape: int) -> torch.Tensor:
        drawn = torch.randn(*shape, generator=self._generator)
        return drawn / math.sqrt(shape[-1])

    def linear(self, state: State, name: str, rows: int, columns: int) -> None:
        state[f"{name}.weight"] = self(rows, columns)
        state[f"{name}.bias"] = self(rows)


def write_heads(
    folder: Path, kind: str, state: State, fields: dict[str, Any], suffix: str = "pt"
) -> Path:
    """Writes a folder as the official code does, or the same as safetensors."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields))
    path = folder / f"{kind}_lm_head.{suffix}"
    if suffix == "pt":
        torch.save(state, path)
    else:
        from safetensors.torch import save_file

        save_file({name: tensor.clone() for name, tensor in state.items()}, path)
    return folder


def write_medusa(folder: Path, state: State, suffix: str = "pt", **fields: Any) -> Path:
    """Medusa heads, whose `config.json` says two as the published ones do."""
    common = {"medusa_num_heads": 2, "base_model_name_or_path": "lmsys/some-model"}
    return write_heads(folder, "medusa", state, common | fields, suffix)


def write_hydra(folder: Path, state: State, arch: str, **fields: Any) -> Path:
    """Hydra heads."""
    common = {
        "hydra_num_heads": 4,
        "hydra_num_layers": 4,
        "hydra_head_arch": arch,
        "grounded_heads": True,
        "hidden_state_offset": 0,
        "base_model_name_or_path": "lmsys/some-model",
    }
    return write_heads(folder, "hydra", state, common | fields)


def _linear(state: State, name: str, x: torch.Tensor) -> torch.Tensor:
    return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]


def medusa_logits(
    state: State, head: int, hidden: torch.Tensor, lm_head: torch.Tensor
) -> torch.Tensor:
    """The logits `[V]` of a head that reads `hidden` `[E]`."""
    x, layer = hidden, 0
    while f"{head}.{layer}.linear.weight" in state:
        x = x + silu(_linear(state, f"{head}.{layer}.linear", x))
        layer += 1
    return state.get(f"{head}.{layer}.weight", lm_head) @ x


def hydra_logits(state: State, head: int, inputs: torch.Tensor) -> torch.Tensor:
    """The logits `[V]` of a head that reads `inputs` `[(head + 2) * E]`."""
    is_prefix = f"{PREFIX}.norm.weight" in state
    number, step = (1, 2) if is_prefix else (0, 1)
    name = f"hydra_mlp.{head}.{number}"
    x = _linear(state, f"{name}.res_connection", inputs)
    x = x + silu(_linear(state, f"{name}.linear", inputs))
    while f"hydra_mlp.{head}.{number + step}.linear.weight" in state:
        number += step
        x = x + silu(_linear(state, f"hydra_mlp.{head}.{number}.linear", x))
    return _linear(state, f"hydra_lm_head.{head}" + (".1" if is_prefix else ""), x)


def hydra_prefix(state: State, sizes: Sizes, hidden: torch.Tensor) -> torch.Tensor:
    """What the prefix layer makes of all hidden states `[T, E]`: `[T, E]`."""
    layer, num_tokens = f"{PREFIX}.layers.0", len(hidden)
    dim = sizes.width // sizes.heads

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        mean = (x * x).mean(-1, keepdim=True)
        return x / torch.sqrt(mean + sizes.epsilon) * state[name]

    def project(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ state[f"{layer}.{name}_proj.weight"].T

    angles = torch.arange(num_tokens)[:, None] / sizes.theta ** (
        torch.arange(0, dim, 2) / dim
    )
    turns = torch.polar(torch.ones_like(angles), angles)  # [T, A / 2]

    def rotated(x: torch.Tensor) -> torch.Tensor:  # [T, A]
        half = torch.complex(x[:, : dim // 2], x[:, dim // 2 :]) * turns
        return torch.cat([half.real, half.imag], dim=-1)

    normed = norm(hidden, f"{layer}.input_layernorm.weight")
    query, key, value = (project(normed, f"self_attn.{n}") for n in "qkv")
    mixed = []
    for head in range(sizes.heads):
        group = head * sizes.kv_heads // sizes.heads
        mine, its = (slice(n * dim, (n + 1) * dim) for n in (head, group))
        scores = rotated(query[:, mine]) @ rotated(key[:, its]).T / math.sqrt(dim)
        later = torch.triu(torch.ones(num_tokens, num_tokens), diagonal=1).bool()
        weights = torch.softmax(scores.masked_fill(later, -math.inf), dim=-1)
        mixed.append(weights @ value[:, its])
    x = hidden + project(torch.cat(mixed, dim=-1), "self_attn.o")
    normed = norm(x, f"{layer}.post_attention_layernorm.weight")
    inner = silu(project(normed, "mlp.gate")) * project(normed, "mlp.up")
    return norm(x + project(inner, "mlp.down"), f"{PREFIX}.norm.weight")
