"""Block heads in the published layouts, and plain PyTorch that runs them.

Written from the formulas of DFlash and DSpark; nothing here is shared with what it
judges.
"""

import heapq
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import silu

from tests.heads.judged_heads import Sizes

State = dict[str, torch.Tensor]

LAYERS, HEAD_DIM, RANK, THETA, EPSILON = 2, 16, 5, 5000.0, 1e-6


def block_state(sizes: Sizes, features: int, *, has_markov: bool) -> State:
    """A random head by tensor name; queries and keys are normalised."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        drawn = torch.randn(*shape, generator=generator)
        return 3 * drawn / math.sqrt(shape[-1])

    def norm(width: int) -> torch.Tensor:
        return 1 + torch.randn(width, generator=generator) / 4

    width, middle = sizes.width, sizes.intermediate
    state = {
        "fc.weight": draw(width, features * width),
        "hidden_norm.weight": norm(width),
        "norm.weight": norm(width),
    }
    shapes = {
        "self_attn.q_proj": (sizes.heads * HEAD_DIM, width),
        "self_attn.k_proj": (sizes.kv_heads * HEAD_DIM, width),
        "self_attn.v_proj": (sizes.kv_heads * HEAD_DIM, width),
        "self_attn.o_proj": (width, sizes.heads * HEAD_DIM),
        "mlp.gate_proj": (middle, width),
        "mlp.up_proj": (middle, width),
        "mlp.down_proj": (width, middle),
    }
    for number in range(LAYERS):
        for name, shape in shapes.items():
            state[f"layers.{number}.{name}.weight"] = draw(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            state[f"layers.{number}.{name}.weight"] = norm(width)
        for name in ("q_norm", "k_norm"):
            state[f"layers.{number}.self_attn.{name}.weight"] = norm(HEAD_DIM)
    if has_markov:
        vocabulary = sizes.vocabulary
        state["markov_head.markov_w1.weight"] = draw(vocabulary, RANK)
        state["markov_head.markov_w2.weight"] = draw(vocabulary, RANK)
        state["confidence_head.proj.weight"] = draw(1, width + RANK)
        state["confidence_head.proj.bias"] = draw(1)
        state["embed_tokens.weight"] = draw(vocabulary, width)  # Nobody reads them.
        state["lm_head.weight"] = draw(vocabulary, width)
    return state


def write_block(
    folder: Path, state: State, sizes: Sizes, block_size: int, **fields: Any
) -> Path:
    """Writes a head's folder as its authors do."""
    from safetensors.torch import save_file

    folder.mkdir()
    common = {
        "model_type": "qwen3",
        "hidden_size": sizes.width,
        "intermediate_size": sizes.intermediate,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": LAYERS,
        "vocab_size": sizes.vocabulary,
        "rms_norm_eps": EPSILON,
        "rope_theta": THETA,
        "max_position_embeddings": 512,
        "block_size": block_size,
        "layer_types": ["full_attention"] * LAYERS,
    }
    (folder / "config.json").write_text(json.dumps(common | fields))
    save_file(state, folder / "model.safetensors")
    return folder


def block_rows(
    state: State,
    sizes: Sizes,
    features: torch.Tensor,
    embedded: torch.Tensor,
    lm_head: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The states `[R, E]` and logits `[R, V]` of a block's rows.

    Args:
        state: The head.
        sizes: The target's sizes.
        features: `[s, F]`, of all tokens before the root.
        embedded: `[R, E]`, of the root and the masks.
        lm_head: `[V, E]`.
    """
    text = _norm(state, "hidden_norm", features @ state["fc.weight"].T)
    start, x = len(features), embedded
    places = torch.arange(start), start + torch.arange(len(embedded))
    for number in range(LAYERS):
        name = f"layers.{number}"

        def heads(what: str, rows: torch.Tensor, name: str = name) -> torch.Tensor:
            made = rows @ state[f"{name}.self_attn.{what}_proj.weight"].T
            return made.reshape(len(rows), -1, HEAD_DIM)

        a = _norm(state, f"{name}.input_layernorm", x)
        query = _turn(
            _norm(state, f"{name}.self_attn.q_norm", heads("q", a)), places[1]
        )
        keys, values = [], []
        for rows, place in zip((text, a), places, strict=True):
            key = _norm(state, f"{name}.self_attn.k_norm", heads("k", rows))
            keys.append(_turn(key, place))
            values.append(heads("v", rows))
        key, value = torch.cat(keys), torch.cat(values)
        group, mixed = sizes.heads // sizes.kv_heads, []
        for head in range(sizes.heads):
            scores = query[:, head] @ key[:, head // group].T / math.sqrt(HEAD_DIM)
            mixed.append(scores.softmax(-1) @ value[:, head // group])
        x = x + torch.cat(mixed, -1) @ state[f"{name}.self_attn.o_proj.weight"].T
        m = _norm(state, f"{name}.post_attention_layernorm", x)
        gate = silu(m @ state[f"{name}.mlp.gate_proj.weight"].T)
        up = m @ state[f"{name}.mlp.up_proj.weight"].T
        x = x + (gate * up) @ state[f"{name}.mlp.down_proj.weight"].T
    x = _norm(state, "norm", x)
    return x, x @ lm_head.T


def markov(state: State, token: int) -> torch.Tensor:
    """What the Markov head adds to logits after a token, `[V]`; 0 without one."""
    if "markov_head.markov_w1.weight" not in state:
        return torch.zeros(())
    row = state["markov_head.markov_w1.weight"][token]
    return state["markov_head.markov_w2.weight"] @ row


def best_tree(
    root: int, depth: int, num_nodes: int, log_probs: Callable[[int, int], torch.Tensor]
) -> set[tuple[int, ...]]:
    """The paths of the most probable prefixes, best first from a heap (DDTree).

    Args:
        root: The root's token.
        depth: The most tokens of a path.
        num_nodes: How many there are, the root not counted.
        log_probs: Returns `[V]` for a level, counted from 0, and the token before.
    """
    waiting: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    found: list[tuple[int, ...]] = []
    while waiting and len(found) <= num_nodes:
        cost, path = heapq.heappop(waiting)
        found.append(path)
        if len(path) < depth:
            chances = log_probs(len(path), path[-1] if path else root)
            for token, chance in enumerate(chances.tolist()):
                heapq.heappush(waiting, (cost - chance, (*path, token)))
    return {path for path in found if path}


def _norm(state: State, name: str, x: torch.Tensor) -> torch.Tensor:
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPSILON)
    return x * scale * state[f"{name}.weight"]


def _turn(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Rotary embeddings `[T, heads, A]`, by halves."""
    half = HEAD_DIM // 2
    angles = places[:, None] * THETA ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    one, other = x[..., :half], x[..., half:]
    return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)
