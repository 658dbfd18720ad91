"""The EAGLE-1/2 head: its settings, its files, and where its parts are."""

import dataclasses
from pathlib import Path
from typing import Any, Literal

from eagle_jax.checkpoints.export_files import Export
from eagle_jax.checkpoints.hf_fields import Fields
from eagle_jax.checkpoints.names import LAYER
from eagle_jax.checkpoints.weights import open_weights
from eagle_jax.errors import InputError
from eagle_jax.heads.eagle.draft import EagleHead
from eagle_jax.heads.eagle.files import common_fields, read_sizes
from eagle_jax.heads.eagle.loss import EagleLoss, eagle_loss
from eagle_jax.heads.eagle.model import EagleHeadConfig, init_params
from eagle_jax.heads.head import Head, check_size
from eagle_jax.heads.settings import LayerSettings
from eagle_jax.models.transformer import TransformerConfig

_NAMES = {
    "embedding": "embed_tokens.weight",
    "fc": "fc.weight",
    "fc_bias": "fc.bias",
    **{f"layer.{ours}": f"layers.0.{hf}" for ours, hf in LAYER.items()},
}


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


class Eagle(Head):
    """See `Head`."""

    name, family = "eagle2", "eagle"
    title = "an EAGLE-1/2 head"
    has_published_table = True
    config, settings, loss_settings = EagleHeadConfig, EagleSettings, EagleLoss
    init = staticmethod(init_params)
    loss = staticmethod(eagle_loss)

    def is_in(self, fields: Fields) -> bool:
        """See `Head.is_in`; its settings are those of a whole Llama."""
        return _NAMES["fc"] in open_weights(fields.path.parent).names()

    def read_config(
        self, folder: Path, target: TransformerConfig | None = None
    ) -> EagleHeadConfig:
        """See `Head.read_config`."""
        del target
        fields = Fields.read(folder)
        sizes = read_sizes(fields)
        num_layers = fields.values.get("num_hidden_layers", 1)
        if num_layers != 1:
            raise fields.refusal(
                f"num_hidden_layers = {num_layers}; an EAGLE-1/2 head has 1 layer"
            )
        return EagleHeadConfig(**sizes, fc_bias=fields.flag("bias", default=True))

    def check(self, target: TransformerConfig, config: EagleHeadConfig) -> None:
        """See `Head.check`."""
        width = target.layer.hidden_size
        check_size("hidden_size", config.layer.hidden_size, width)
        check_size("vocab_size", config.vocab_size, target.vocab_size)

    def model(self, config: EagleHeadConfig, dtype: str = "float32") -> EagleHead:
        """See `Head.model`."""
        return EagleHead(config=config, dtype=dtype)

    def new(
        self, target: TransformerConfig, settings: EagleSettings, length: int
    ) -> EagleHeadConfig:
        """See `Head.new`."""
        return EagleHeadConfig(
            layer=settings.layer(target.layer),
            vocab_size=target.vocab_size,
            max_positions=length,
            fc_bias=settings.fc_bias,
        )

    def layouts(self, config: EagleHeadConfig) -> dict[str, dict[str, str]]:
        """See `Head.layouts`."""
        del config
        return {"layers.0": _NAMES}

    def fields(self, config: EagleHeadConfig, how: Export) -> dict[str, Any]:
        """See `Head.fields`."""
        layer = config.layer
        if layer.head_dim * layer.num_heads != layer.hidden_size:
            raise InputError(
                f"a head of width {layer.hidden_size} with {layer.num_heads} attention "
                f"heads of width {layer.head_dim} cannot be exported: the official "
                "layout has no head_dim, it divides the width by the number of heads"
            )
        return common_fields(config, how.dtype) | {"bias": config.fc_bias}
