"""Random weights of a small pair for the tests of checkpoints."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.models import eagle_head, transformer
from eagle_jax.models.eagle_head import EagleHeadConfig, EagleHeadParams
from eagle_jax.models.transformer import TransformerConfig
from tests.helpers import SMALL_LAYER

VOCABULARY = 64
HEAD = EagleHeadConfig(layer=SMALL_LAYER, vocab_size=VOCABULARY, max_positions=128)
TARGET = TransformerConfig(
    layer=SMALL_LAYER, num_layers=2, vocab_size=VOCABULARY, max_positions=128
)


def random_head(
    config: EagleHeadConfig = HEAD, dtype: str = "float32"
) -> EagleHeadParams:
    """Weights of a head without an embedding table of its own."""
    return _random(
        jax.eval_shape(
            lambda key: eagle_head.init_params(key, config), jax.random.key(0)
        ),
        dtype,
    )


def random_target(config: TransformerConfig = TARGET, dtype: str = "float32") -> Any:
    """Weights of a target."""
    return _random(
        jax.eval_shape(
            lambda key: transformer.init_params(key, config), jax.random.key(0)
        ),
        dtype,
    )


def random_table(dtype: str = "float32") -> jax.Array:
    """An embedding table that a head may have of its own."""
    return _random(
        jax.ShapeDtypeStruct((VOCABULARY, SMALL_LAYER.hidden_size), jnp.float32), dtype
    )


def file_bytes(folder: Path) -> dict[str, bytes]:
    """What each file of a folder holds, by name."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _random(shapes: Any, dtype: str = "float32") -> Any:
    """Weights of these shapes, none of them zero or one."""
    rng = np.random.default_rng(7)

    def draw(shape: jax.ShapeDtypeStruct) -> jax.Array:
        weights = rng.normal(size=shape.shape) * 0.3
        return jax.device_put(weights.astype(np.float32).astype(dtype))

    return jax.tree.map(draw, shapes)
