"""Block heads: their settings, their files, and where their parts are."""

import dataclasses
from pathlib import Path
from typing import Any, ClassVar, Literal

from eagle_jax.checkpoints.export_files import Export
from eagle_jax.checkpoints.hf_fields import Fields
from eagle_jax.checkpoints.weights import Weights, open_weights
from eagle_jax.config import require
from eagle_jax.heads.block.draft import BlockHead
from eagle_jax.heads.block.files import (
    ARCHITECTURES,
    BORROWED,
    NAMES,
    check_layers,
    read_fields,
    written_fields,
)
from eagle_jax.heads.block.loss import BlockLoss, DSparkLoss, block_loss
from eagle_jax.heads.block.model import (
    BlockHeadConfig,
    DSparkHeadConfig,
    init_params,
)
from eagle_jax.heads.head import Head, check_size
from eagle_jax.heads.settings import FeatureSettings
from eagle_jax.models.transformer import TransformerConfig

_NUM_FEATURES = 5


def feature_layers(num_layers: int) -> tuple[int, ...]:
    """Returns the indices of the layers whose inputs a head reads, as published.

    They are five, and fewer of a shallow target.

    >>> feature_layers(36)
    (2, 10, 18, 26, 34)

    Args:
        num_layers: The number of the target's layers.
    """
    step = max(num_layers - 4, 0) / (_NUM_FEATURES - 1)
    outputs = {round(1 + number * step) for number in range(_NUM_FEATURES)}
    return tuple(sorted(min(one + 1, num_layers - 1) for one in outputs))


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockSettings(FeatureSettings):
    """The settings of a new block head; for its layers see `FeatureSettings`.

    Attributes:
        block_size: The rows of a block, the root's included; `None` for 16, and 7 of
            DSpark's.
        num_layers: The number of its layers.
        mask_token: The token whose embedding stands for a token to be predicted; `None`
            for the last of the vocabulary.
        qk_norm: Whether its layers normalise queries and keys, as Qwen3's do.
    """

    block_size: int | None = None
    num_layers: int = 5
    mask_token: int | None = None
    qk_norm: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class DFlashSettings(BlockSettings):
    """The settings of a new head of DFlash, see `BlockSettings`."""

    kind: Literal["dflash"] = "dflash"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DSparkSettings(BlockSettings):
    """The settings of a new head of DSpark; see also `BlockSettings`.

    Attributes:
        markov_rank: The rank of its Markov head.
    """

    kind: Literal["dspark"] = "dspark"
    markov_rank: int = 256


class DFlash(Head):
    """See `Head`."""

    name = family = "dflash"
    title = "a DFlash head"
    config, settings, loss_settings = BlockHeadConfig, DFlashSettings, BlockLoss
    reads_hidden = True
    init = staticmethod(init_params)
    loss = staticmethod(block_loss)
    block_size: ClassVar[int] = 16

    def is_in(self, fields: Fields) -> bool:
        """See `Head.is_in`; the architecture says how rows are read."""
        return fields.get("architectures") == [ARCHITECTURES[self.config]]

    def read_config(
        self, folder: Path, target: TransformerConfig | None = None
    ) -> BlockHeadConfig:
        """See `Head.read_config`."""
        del target
        files = open_weights(folder)
        shapes = {name: files.shape(name) for name in files.names()}
        fields = Fields.read(folder)
        return read_fields(fields, shapes, self.config)

    def check(self, target: TransformerConfig, config: BlockHeadConfig) -> None:
        """See `Head.check`."""
        width = target.layer.hidden_size
        check_size("hidden_size", config.layer.hidden_size, width)
        check_size("vocab_size", config.vocab_size, target.vocab_size)
        check_layers(config, target.num_layers)

    def describe(self, target: TransformerConfig, config: BlockHeadConfig) -> str:
        """See `Head.describe`."""
        layers = ", ".join(map(str, config.feature_layers))
        says = "the next token" if config.predicts_next else "its own token"
        return (
            f"{self.title} that reads the inputs of layers {layers} of the target's "
            f"{target.num_layers}, has {config.num_layers} layers and blocks of "
            f"{config.block_size} rows, each of which predicts {says}"
        )

    def model(self, config: BlockHeadConfig, dtype: str = "float32") -> BlockHead:
        """See `Head.model`."""
        return BlockHead(config=config, dtype=dtype)

    def new(
        self, target: TransformerConfig, settings: BlockSettings, length: int
    ) -> BlockHeadConfig:
        """See `Head.new`."""
        known, mask = target.vocab_size, settings.mask_token
        holds = mask is None or mask < known
        require(holds, "mask_token", mask, f"one of the target's {known} tokens")
        layer = dataclasses.replace(
            settings.layer(target.layer), qk_norm=settings.qk_norm
        )
        rank = getattr(settings, "markov_rank", 0)
        config = self.config(
            layer=layer,
            vocab_size=known,
            max_positions=length,
            block_size=settings.block_size or self.block_size,
            mask_token=known - 1 if mask is None else mask,
            feature_layers=settings.layers or feature_layers(target.num_layers),
            num_target_layers=target.num_layers,
            num_layers=settings.num_layers,
            markov_rank=rank,
            has_confidence=rank > 0,
        )
        require(config.num_levels >= 1, "block_size", config.block_size, "2 or more")
        check_layers(config, target.num_layers)
        return config

    def layouts(self, config: BlockHeadConfig) -> dict[str, dict[str, str]]:
        """See `Head.layouts`."""
        del config
        return {"layers": NAMES}

    def fields(self, config: BlockHeadConfig, how: Export) -> dict[str, Any]:
        """See `Head.fields`."""
        return written_fields(config, how.dtype)

    def forget(self, files: Weights) -> None:
        """See `Head.forget`; both tables are the target's."""
        files.leave_out(BORROWED, "the target has these tables")

    def target(
        self, target: TransformerConfig, config: BlockHeadConfig
    ) -> TransformerConfig:
        """See `Head.target`; its features are the inputs of some layers."""
        return dataclasses.replace(target, feature_layers=config.feature_layers)


class DSpark(DFlash):
    """See `Head`."""

    name = family = "dspark"
    title = "a DSpark head"
    config, settings, loss_settings = DSparkHeadConfig, DSparkSettings, DSparkLoss
    block_size = 7
