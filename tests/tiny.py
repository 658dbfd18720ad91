"""Tiny random models, of few sizes: what is compiled for one test serves others."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import numpy as np

from eagle_jax.checkpoints.load import shapes_of
from eagle_jax.config import TreeConfig
from eagle_jax.drafting import TreeDrafter
from eagle_jax.heads import HEADS
from eagle_jax.heads.block import BlockHead, DFlashHead, DSparkHead
from eagle_jax.heads.eagle import EagleHead, EagleHeadConfig
from eagle_jax.heads.hydra import HydraConfig, HydraHeads
from eagle_jax.heads.medusa import MedusaConfig, MedusaHeads
from eagle_jax.interface import Params
from eagle_jax.models import transformer
from eagle_jax.models.layers import LayerConfig
from eagle_jax.models.rope import RopeConfig
from eagle_jax.models.transformer import Transformer, TransformerConfig
from eagle_jax.tree import Topology

LAYER = LayerConfig(
    hidden_size=32,
    intermediate_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=10000.0),
)
_LAYER_FIELDS = {field.name for field in dataclasses.fields(LayerConfig)}
LLAMA3_ROPE = RopeConfig(
    theta=500000.0,
    kind="llama3",
    factor=8.0,
    low_freq_factor=1.5,
    high_freq_factor=5.0,
    original_max_positions=64,
)
ROPES = [
    RopeConfig(theta=10000.0),
    RopeConfig(theta=5e5),
    RopeConfig(theta=1e4, kind="linear", factor=2.5),
    LLAMA3_ROPE,
]
# What the layers of gpt-oss have that those of Llama have not.
GPT_OSS: dict[str, Any] = dict.fromkeys(
    ["qkv_bias", "output_bias", "has_sinks", "mlp_bias"], True
) | {"activation": "clamped_swiglu", "num_experts": 4, "experts_per_token": 2}


class Pair(NamedTuple):
    """A target, what drafts for it, and the weights of both."""

    target: Transformer
    drafter: TreeDrafter
    params: Params


def sizes(**changes: Any) -> dict[str, Any]:
    """Sizes of any model; `changes` name fields of it or of its layer."""
    layer = {name: changes.pop(name) for name in _LAYER_FIELDS & changes.keys()}
    usual = {"vocab_size": 64, "max_positions": 512}
    return {"layer": dataclasses.replace(LAYER, **layer)} | usual | changes


def target_config(**changes: Any) -> TransformerConfig:
    """A target of one layer, but for `changes`, see `sizes`."""
    return TransformerConfig(**sizes(**({"num_layers": 1} | changes)))


def head_config(**changes: Any) -> EagleHeadConfig:
    """An EAGLE-1/2 head, but for `changes`, see `sizes`."""
    return EagleHeadConfig(**sizes(**changes))


TARGET = target_config()
HEAD = head_config()


def sharp(params: Any) -> Any:
    """Ten times the usual deviation: drafts differ and are tried, texts vary."""
    return jax.tree.map(lambda x: x * 10 if x.ndim > 1 else x, params)


@functools.cache
def target_params(
    config: TransformerConfig = TARGET, seed: int = 0, dtype: str = "float32"
) -> Any:
    """Weights of a target, with sharp distributions."""
    return sharp(transformer.init_params(jax.random.key(seed), config, dtype))


def head_params(config: EagleHeadConfig, target: Any, dtype: str = "float32") -> Any:
    """Weights of a head that borrows its target's tables."""
    return EagleHead.join(_own_params(config, dtype), target)


@functools.cache
def _own_params(config: EagleHeadConfig, dtype: str) -> Any:
    return EagleHead(config=config).init(jax.random.key(1), dtype)


def head_of(config: Any) -> Any:
    """A head of these sizes."""
    kinds = {kind.Config: kind for kind in HEADS.values()}
    return kinds[type(config)](config=config)


def medusa(vocab_size: int, *, has_output_heads: bool = True) -> MedusaHeads:
    """Three Medusa heads for a target of `LAYER`."""
    return MedusaHeads(
        config=MedusaConfig(
            num_heads=3,
            num_layers=2,
            hidden_size=LAYER.hidden_size,
            vocab_size=vocab_size,
            has_output_heads=has_output_heads,
        )
    )


def hydra(vocab_size: int, *, has_prefix: bool) -> HydraHeads:
    """Three Hydra heads for a target of `LAYER`, maybe behind such a layer."""
    return HydraHeads(
        config=HydraConfig(
            num_heads=3,
            num_layers=2,
            hidden_size=LAYER.hidden_size,
            vocab_size=vocab_size,
            layer=LAYER if has_prefix else None,
        )
    )


def block(vocab_size: int, *, is_next: bool, **changes: Any) -> BlockHead:
    """A block head of two layers that drafts four levels for a target of one layer.

    Rows predict their own token, or the next one, with a Markov head, too.
    """
    usual: dict[str, Any] = {
        "block_size": 4 if is_next else 5,
        "mask_token": 7,
        "feature_layers": (0,),
        "num_target_layers": 1,
        "num_layers": 2,
    }
    if is_next:
        usual |= {"markov_rank": 3, "has_confidence": True}
    kind = DSparkHead if is_next else DFlashHead
    config = kind.Config(**sizes(vocab_size=vocab_size, **(usual | changes)))
    return kind(config=config)


def heads_params(heads: Any, target: Any) -> Any:
    """Weights of heads that borrow their target's tables, none of them zero or one."""
    return heads.join(random_like(shapes_of(heads.init)), target)


def pair(
    target: TransformerConfig,
    head: EagleHeadConfig,
    tree: TreeConfig | Topology,
    dtype: str = "float32",
) -> Pair:
    """A target with sharp distributions and a head that knows nothing of it."""
    weights = target_params(target, dtype=dtype)
    return Pair(
        target=Transformer(config=target, dtype=dtype),
        drafter=TreeDrafter(model=EagleHead(config=head, dtype=dtype), tree=tree),
        params=Params(target=weights, drafter=head_params(head, weights, dtype)),
    )


def random_like(shapes: Any, dtype: str | None = None) -> Any:
    """Weights of these shapes, none of them zero or one."""
    rng = np.random.default_rng(7)

    def draw(leaf: Any) -> jax.Array:
        weights = (rng.normal(size=leaf.shape) * 0.3).astype(np.float32)
        return jax.device_put(weights.astype(dtype or leaf.dtype))

    return jax.tree.map(draw, shapes)


def random_target(config: TransformerConfig = TARGET, dtype: str = "float32") -> Any:
    """Weights of a target, none of them zero or one."""
    key = jax.random.key(0)
    shapes = jax.eval_shape(lambda key: transformer.init_params(key, config), key)
    return random_like(shapes, dtype)
