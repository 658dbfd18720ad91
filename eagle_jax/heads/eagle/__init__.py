"""EAGLE-1/2 heads, which are the same: EAGLE-2 draws other trees with them.

A head is one decoder layer that predicts the target's next feature. Input pair `i` is
the embedding of token `i + 1` beside the target's feature `i`, at position `i`; the
output predicts feature `i + 1`, which the target's own output head turns into a
distribution for token `i + 2` (EAGLE-1, section 3.1).
"""

import dataclasses
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct

from eagle_jax.checkpoints.export_files import Export
from eagle_jax.checkpoints.hf_fields import Fields
from eagle_jax.checkpoints.names import LAYER
from eagle_jax.checkpoints.weights import open_weights
from eagle_jax.drafting.model import target_tokens
from eagle_jax.errors import InputError
from eagle_jax.heads.eagle.loss import EagleLoss, eagle_loss
from eagle_jax.heads.feature import FeatureHead
from eagle_jax.heads.head import HeadParams
from eagle_jax.heads.hf_config import common_fields, read_sizes
from eagle_jax.heads.settings import LayerSettings
from eagle_jax.models.layers import LayerConfig, LayerParams, init_layer
from eagle_jax.models.linear import init_matrix, linear
from eagle_jax.models.transformer import (
    TransformerConfig,
    output_columns,
    unembed_by,
)
from eagle_jax.prng import own_keys

_NAMES = {
    "embedding": "embed_tokens.weight",
    "fc": "fc.weight",
    "fc_bias": "fc.bias",
    **{f"layer.{ours}": f"layers.0.{hf}" for ours, hf in LAYER.items()},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleHeadConfig:
    """The sizes of an EAGLE-1/2 head; nothing here is derived from the target.

    Attributes:
        layer: The sizes of its one layer.
        vocab_size: The number of tokens the target knows, `V`.
        max_positions: The number of positions that the head was trained for.
        fc_bias: Whether the fusing layer has a bias.
    """

    layer: LayerConfig
    vocab_size: int
    max_positions: int
    fc_bias: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleSettings(LayerSettings):
    """The settings of a new EAGLE-1/2 head; for its layer see `LayerSettings`.

    Attributes:
        fc_bias: Whether the fusing layer has a bias.
        include_embedding: Export the target's embedding table with the head, as the
            official code expects.
    """

    kind: Literal["eagle2"] = "eagle2"
    fc_bias: bool = True
    include_embedding: bool = True


@struct.dataclass(kw_only=True)
class EagleHeadParams:
    """The weights of an EAGLE-1/2 head.

    Attributes:
        fc: `[2 * E, E]`, the matrix that fuses embedding and feature, in this order.
        layer: The decoder layer, without input norm.
        fc_bias: `[E]`, the bias of the fusing layer; `None` for none.
        embedding: `[V, E]`, the head's own embedding table; `None` where it is the
            target's.
    """

    fc: jax.Array
    layer: LayerParams
    fc_bias: jax.Array | None = None
    embedding: jax.Array | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleHead(FeatureHead):
    """An EAGLE-1/2 head, which predicts the target's last hidden state, `F = E`."""

    name = "eagle2"
    title = "an EAGLE-1/2 head"
    Config, Settings, Loss = EagleHeadConfig, EagleSettings, EagleLoss
    config: EagleHeadConfig
    loss = eagle_loss

    @classmethod
    def matches(cls, fields: Fields) -> bool:
        # Its settings are those of a whole Llama.
        return _NAMES["fc"] in open_weights(fields.path.parent).names()

    @classmethod
    def read_config(
        cls, folder: Path, target: TransformerConfig | None = None
    ) -> EagleHeadConfig:
        fields = Fields.read(folder)
        sizes = read_sizes(fields)
        num_layers = fields.values.get("num_hidden_layers", 1)
        if num_layers != 1:
            raise fields.refusal(
                f"num_hidden_layers = {num_layers}; an EAGLE-1/2 head has 1 layer"
            )
        return EagleHeadConfig(**sizes, fc_bias=fields.flag("bias", default=True))

    @classmethod
    def default_config(
        cls, target: TransformerConfig, settings: EagleSettings, length: int
    ) -> EagleHeadConfig:
        return EagleHeadConfig(
            layer=settings.layer(target.layer),
            vocab_size=target.vocab_size,
            max_positions=length,
            fc_bias=settings.fc_bias,
        )

    def tensor_names(self) -> dict[str, dict[str, str]]:
        return {"layers.0": _NAMES}

    def to_hf_config(self, how: Export) -> dict[str, Any]:
        layer = self.config.layer
        if layer.head_dim * layer.num_heads != layer.hidden_size:
            raise InputError(
                f"a head of width {layer.hidden_size} with {layer.num_heads} attention "
                f"heads of width {layer.head_dim} cannot be exported: the official "
                "layout has no head_dim, it divides the width by the number of heads"
            )
        return common_fields(self.config, how.dtype) | {"bias": self.config.fc_bias}

    def init(self, key: jax.Array, dtype: str = "float32") -> EagleHeadParams:
        fc_key, layer_key = jax.random.split(own_keys(key))
        width, kind = self.config.layer.hidden_size, jnp.dtype(dtype)
        return EagleHeadParams(
            fc=init_matrix(fc_key, (2 * width, width), kind),
            fc_bias=jnp.zeros(width, kind) if self.config.fc_bias else None,
            layer=init_layer(layer_key, self.config.layer, kind, input_norm=False),
        )

    @staticmethod
    def narrow(params: HeadParams, tokens: jax.Array) -> HeadParams:
        """Returns weights that draft some of the target's tokens alone (FR-Spec).

        Args:
            params: The drafter's weights, from `join`.
            tokens: `[W]` int32, the tokens in ascending order, none twice.
        """
        return dataclasses.replace(
            params,
            output_head=output_columns(params, tokens),
            offsets=(tokens - jnp.arange(tokens.size)).astype(jnp.int32),
        )

    def layer_inputs(
        self, params: EagleHeadParams, embeddings: jax.Array, features: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        features = features.astype(embeddings.dtype)
        fused = jnp.concatenate([embeddings, features], axis=-1)
        x = linear(fused, params.fc, params.fc_bias)
        return x, x

    def recycle(self, params: Any, outputs: jax.Array) -> jax.Array:
        # HASS lets no gradient through from level to level.
        return jax.lax.stop_gradient(outputs)

    def logits(
        self, params: HeadParams, outputs: jax.Array, *, level: int
    ) -> jax.Array:
        return unembed_by(params, outputs)

    def tokens(self, params: HeadParams, choices: jax.Array) -> jax.Array:
        # `W = V` unless the output head is narrowed.
        return target_tokens(params.offsets, choices)
