"""A random target of 7 layers and an EAGLE-3 head for it, in the official layout."""

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

Tensors = dict[str, np.ndarray]

LAYERS, HIDDEN, VOCABULARY, KNOWN = 7, 32, 300, 150
_FILE = "model.safetensors"


def write_pair(folder: Path, shallow: Path) -> None:
    """Writes `target/`, which is `shallow` with more layers, and `head/`."""
    rng = np.random.default_rng(3)
    shutil.copytree(shallow, folder / "target")
    path = folder / "target" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"num_hidden_layers": LAYERS}))
    target = load_file(shallow / _FILE)
    first = {name: x for name, x in target.items() if ".layers.0." in name}
    for number in range(config["num_hidden_layers"], LAYERS):
        for name, x in first.items():
            own = name.replace(".layers.0.", f".layers.{number}.")
            target[own] = _matrix(rng, *x.shape) if x.ndim > 1 else x
    save_file(target, folder / "target" / _FILE)
    head = folder / "head"
    head.mkdir()
    # Another width of the feed-forward layer and other heads: nothing is the target's.
    own_sizes = {"intermediate_size": 40, "num_key_value_heads": 4}
    own = config | own_sizes | {"draft_vocab_size": KNOWN, "num_hidden_layers": LAYERS}
    del own["rope_theta"]
    (head / "config.json").write_text(json.dumps(own))
    save_file(_head(rng), head / _FILE)


def _head(rng: np.random.Generator) -> Tensors:
    shapes = {
        "fc": (HIDDEN, 3 * HIDDEN),
        "midlayer.self_attn.q_proj": (HIDDEN, 2 * HIDDEN),
        "midlayer.self_attn.k_proj": (HIDDEN, 2 * HIDDEN),
        "midlayer.self_attn.v_proj": (HIDDEN, 2 * HIDDEN),
        "midlayer.self_attn.o_proj": (HIDDEN, HIDDEN),
        "midlayer.mlp.gate_proj": (40, HIDDEN),
        "midlayer.mlp.up_proj": (40, HIDDEN),
        "midlayer.mlp.down_proj": (HIDDEN, 40),
        "lm_head": (KNOWN, HIDDEN),
    }
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    tokens = np.sort(rng.choice(VOCABULARY, size=KNOWN, replace=False))
    return {
        **{f"{name}.weight": _matrix(rng, *shape) for name, shape in shapes.items()},
        **{f"midlayer.{name}.weight": _norm(rng) for name in norms},
        "norm.weight": _norm(rng),
        "d2t": tokens - np.arange(KNOWN),
        "t2d": np.isin(np.arange(VOCABULARY), tokens),
    }


def _matrix(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return (rng.normal(size=shape) * 0.2).astype(np.float32)


def _norm(rng: np.random.Generator) -> np.ndarray:
    return (1 + 0.1 * rng.normal(size=HIDDEN)).astype(np.float32)
