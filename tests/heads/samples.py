"""Heads of every kind, their weights, and folders that hold them."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.checkpoints import Export
from eagle_jax.checkpoints.load import shapes_of
from eagle_jax.heads import export_head, open_head
from eagle_jax.heads.eagle3 import Eagle3HeadConfig
from eagle_jax.models.transformer import TransformerConfig
from tests import tiny

TARGET = tiny.head_of(
    Eagle3HeadConfig(draft_vocab_size=40, feature_size=96, **tiny.sizes())
).with_features(tiny.target_config(num_layers=7))
USUAL = Eagle3HeadConfig(
    draft_vocab_size=40,
    feature_size=TARGET.feature_size,
    **tiny.sizes(num_kv_heads=1, intermediate_size=40),
)
SAME = dataclasses.replace(USUAL, draft_vocab_size=64)
NORMS = dataclasses.replace(USUAL, has_feature_norms=True)
RECYCLING = dataclasses.replace(USUAL, recycles_normed=True)
BOTH = dataclasses.replace(NORMS, recycles_normed=True, feature_layers=(0, 1, 3))
NARROW = dataclasses.replace(
    USUAL, feature_layers=(2, 3, 6), layer=tiny.sizes(hidden_size=24)["layer"]
)
BORROWING = dataclasses.replace(SAME, has_output_head=False)
NORMED_STREAM = dataclasses.replace(USUAL, norm_before_residual=True)
NORMED_FEATURES = dataclasses.replace(USUAL, norm_before_fc=True)
WINDOWED = dataclasses.replace(USUAL, sliding_window=2)
QWEN3 = dataclasses.replace(
    USUAL, layer=tiny.sizes(qk_norm=True, num_kv_heads=1)["layer"]
)
LAYERED = dataclasses.replace(
    QWEN3, num_layers=3, sliding_window=2, recycles_normed=True
)
EAGLE3: dict[str, Eagle3HeadConfig] = {
    "eagle3": USUAL,
    "eagle3, same vocabulary": SAME,
    "eagle3, feature norms": NORMS,
    "eagle3, recycling": RECYCLING,
    "eagle3, both, with layers": BOTH,
    "eagle3, narrow, with layers": NARROW,
    "eagle3, from the first layer": dataclasses.replace(
        USUAL, feature_layers=(0, 1, 3)
    ),
    "eagle3, from the second layer": dataclasses.replace(
        USUAL, feature_layers=(1, 3, 4)
    ),
    "eagle3, two features": dataclasses.replace(
        NORMS, feature_layers=(1, 4), feature_size=64
    ),
    "eagle3, borrowing": BORROWING,
    "eagle3, norm before residual": NORMED_STREAM,
    "eagle3, norm before fc": NORMED_FEATURES,
    "eagle3, window": WINDOWED,
    "eagle3, qwen3 layer": QWEN3,
    "eagle3, three layers": LAYERED,
}


def block(**changes: Any) -> Any:
    """A block head for a target of seven layers."""
    usual = {"num_target_layers": 7, "feature_layers": (0, 3, 5)}
    return tiny.block(64, **(usual | changes)).config


SAMPLES: dict[str, Any] = {
    "eagle2": tiny.HEAD,
    "eagle2, biases": tiny.head_config(qkv_bias=True, fc_bias=False, num_kv_heads=1),
    **EAGLE3,
    "medusa": tiny.medusa(64).config,
    "medusa, borrowing": tiny.medusa(64, has_output_heads=False).config,
    "hydra": tiny.hydra(64, has_prefix=True).config,
    "hydra, mlp": tiny.hydra(64, has_prefix=False).config,
    "dflash": block(is_next=False),
    "dflash, qwen3 layers, window": block(
        is_next=False, qk_norm=True, sliding_window=9, is_causal=True
    ),
    "dspark": block(is_next=True),
    "dspark, no Markov head": block(is_next=True, markov_rank=0, has_confidence=False),
}
KNOWN = np.setdiff1d(np.arange(64), np.arange(3, 51, 2))
"""The tokens that an EAGLE-3 head knows, with gaps between them."""


def weights(config: Any, dtype: str = "float32") -> Any:
    """Weights none of which is zero or one."""
    shapes = shapes_of(tiny.head_of(config).init)
    if not hasattr(shapes, "offsets"):
        return tiny.random_like(shapes, dtype)
    params = tiny.random_like(dataclasses.replace(shapes, offsets=None), dtype)
    if config.layer.hidden_size != TARGET.layer.hidden_size:
        params = dataclasses.replace(params, embedding=table(config, dtype))
    if shapes.offsets is None:
        return params
    offsets = jax.device_put((KNOWN - np.arange(len(KNOWN))).astype(np.int32))
    return dataclasses.replace(params, offsets=offsets)


def table(config: Any, dtype: str = "float32") -> jax.Array:
    """An embedding table that a head may have of its own."""
    return tiny.random_like(jnp.zeros((64, config.layer.hidden_size)), dtype)


def write(
    folder: Path, config: Any, params: Any = None, layout: str | None = None, **how: Any
) -> Path:
    """Exports a head; without a pickle, unless it is asked for."""
    fields: dict[str, Any] = {"with_pickle": False} | how
    given = Export(**fields)
    params = weights(config) if params is None else params
    export_head(folder, tiny.head_of(config), params, given, layout)
    return folder


def read(folder: Path, dtype: str | None = None, target: Any = TARGET) -> Any:
    """The sizes and weights of a head as it is stored."""
    opened = open_head(folder, target)
    return opened.head.config, opened.load(None, dtype)


def load_head(
    folder: Path,
    target: TransformerConfig,
    target_params: Any,
    dtype: str | None = "float32",
    shardings: Any = None,
) -> tuple[Any, Any]:
    """The sizes and weights of a head, read for its target."""
    opened = open_head(folder, target)
    return opened.head.config, opened.load(target_params, dtype, shardings)
