"""The published EAGLE-1/2 heads: their settings give the sizes of their files."""

import json
from pathlib import Path
from typing import Any

import jax
import pytest

from eagle_jax.checkpoints import head_config
from eagle_jax.heads.eagle import model as eagle_head
from eagle_jax.heads.eagle.model import EagleHeadConfig

_LLAMA3 = {"vocab_size": 128256, "bias": False, "rope_theta": 500000.0}
_QWEN2 = {"vocab_size": 152064, "qkv_bias": True, "rope_theta": 1000000.0}
_FAMILY = {"max_position_embeddings": 4096}


def _sizes(width: int, inner: int, heads: int, kv_heads: int) -> dict[str, int]:
    return {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": 32000,
        "num_hidden_layers": 1,
    }


# Settings, bytes per weight, and the file's size in gigabytes.
_HEADS: dict[str, tuple[dict[str, Any], int, float]] = {
    "EAGLE-Vicuna-7B-v1.3": (_sizes(4096, 11008, 32, 32), 4, 1.468),
    "EAGLE-Vicuna-13B-v1.3": (_sizes(5120, 13824, 40, 40), 4, 2.134),
    # Grouped, though its target is not; and no width of a position table.
    "EAGLE-Vicuna-33B-v1.3": (
        _sizes(6656, 17920, 52, 13) | {"max_sequence_length": 2048},
        4,
        3.081,
    ),
    "EAGLE-llama2-chat-7B": (_sizes(4096, 11008, 32, 32) | _FAMILY, 4, 1.468),
    "EAGLE-llama2-chat-13B": (_sizes(5120, 13824, 40, 40) | _FAMILY, 4, 2.134),
    "EAGLE-llama2-chat-70B": (_sizes(8192, 28672, 64, 8) | _FAMILY, 4, 5.008),
    # Not grouped, though its target is.
    "EAGLE-mixtral-instruct-8x7B": (_sizes(4096, 14336, 32, 32) | _FAMILY, 4, 1.632),
    "EAGLE-LLaMA3-Instruct-8B": (_sizes(4096, 14336, 32, 8) | _LLAMA3, 2, 1.554),
    "EAGLE-LLaMA3-Instruct-70B": (_sizes(8192, 28672, 64, 8) | _LLAMA3, 2, 4.081),
    "EAGLE-Qwen2-7B-Instruct": (_sizes(3584, 18944, 28, 28) | _QWEN2, 2, 1.652),
    "EAGLE-Qwen2-72B-Instruct": (_sizes(8192, 29568, 64, 64) | _QWEN2, 2, 4.750),
}


def _num_weights(config: EagleHeadConfig) -> int:
    """Of a head with a copy of its target's embedding table, as all of these are."""
    shapes = jax.eval_shape(
        lambda key: eagle_head.init_params(key, config), jax.random.key(0)
    )
    table = config.vocab_size * config.layer.hidden_size
    return table + sum(leaf.size for leaf in jax.tree.leaves(shapes))


@pytest.mark.parametrize("name", _HEADS)
def test_published_heads_have_the_size_of_their_files(
    tmp_path: Path, name: str
) -> None:
    fields, num_bytes, gigabytes = _HEADS[name]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields | {"model_type": "llama"}))
    config = head_config(tmp_path)
    size = _num_weights(config) * num_bytes / 1e9
    assert size == pytest.approx(gigabytes, abs=6e-4)
    assert config.layer.num_kv_heads == fields["num_key_value_heads"]
    assert config.fc_bias == fields.get("bias", True)
