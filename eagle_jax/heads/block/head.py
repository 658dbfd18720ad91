"""Block heads: their settings, their files, and where their parts are."""

import dataclasses
from pathlib import Path
from typing import Any, ClassVar, Literal

import jax

from eagle_jax.checkpoints.export_files import Export
from eagle_jax.checkpoints.hf_fields import Fields
from eagle_jax.checkpoints.weights import open_weights
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
    BlockHeadParams,
    DSparkHeadConfig,
    init_params,
)
from eagle_jax.heads.loss import Batch, Metrics
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


class DFlashHead(BlockHead):
    """A head of DFlash, whose rows predict their own token."""

    name = "dflash"
    title = "a DFlash head"
    Config, Settings, Loss = BlockHeadConfig, DFlashSettings, BlockLoss
    block_size: ClassVar[int] = 16

    @classmethod
    def matches(cls, fields: Fields) -> bool:
        # The architecture says how rows are read.
        return fields.get("architectures") == [ARCHITECTURES[cls.Config]]

    @classmethod
    def read_config(
        cls, folder: Path, target: TransformerConfig | None = None
    ) -> BlockHeadConfig:
        del target
        files = open_weights(folder)
        shapes = {name: files.shape(name) for name in files.names()}
        fields = Fields.read(folder)
        return read_fields(fields, shapes, cls.Config)

    def check_target(self, target: TransformerConfig) -> None:
        super().check_target(target)
        check_layers(self.config, target.num_layers)

    def describe(self, target: TransformerConfig) -> str:
        config = self.config
        layers = ", ".join(map(str, config.feature_layers))
        says = "the next token" if config.predicts_next else "its own token"
        return (
            f"{self.title} that reads the inputs of layers {layers} of the target's "
            f"{target.num_layers}, has {config.num_layers} layers and blocks of "
            f"{config.block_size} rows, each of which predicts {says}"
        )

    @classmethod
    def default_config(
        cls, target: TransformerConfig, settings: BlockSettings, length: int
    ) -> BlockHeadConfig:
        known, mask = target.vocab_size, settings.mask_token
        holds = mask is None or mask < known
        require(holds, "mask_token", mask, f"one of the target's {known} tokens")
        layer = dataclasses.replace(
            settings.layer(target.layer), qk_norm=settings.qk_norm
        )
        rank = getattr(settings, "markov_rank", 0)
        config = cls.Config(
            layer=layer,
            vocab_size=known,
            max_positions=length,
            block_size=settings.block_size or cls.block_size,
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

    def tensor_names(self) -> dict[str, dict[str, str]]:
        return {"layers": NAMES | BORROWED}

    def to_hf_config(self, how: Export) -> dict[str, Any]:
        return written_fields(self.config, how.dtype)

    def init(self, key: jax.Array, dtype: str = "float32") -> BlockHeadParams:
        return init_params(key, self.config, dtype)

    def loss(
        self, params: BlockHeadParams, batch: Batch, settings: BlockLoss
    ) -> tuple[jax.Array, Metrics]:
        return block_loss(params, batch, self.config, settings)

    def with_features(self, target: TransformerConfig) -> TransformerConfig:
        """Returns the target, whose features are the inputs of some layers."""
        return dataclasses.replace(target, feature_layers=self.config.feature_layers)


class DSparkHead(DFlashHead):
    """A head of DSpark, whose rows predict the next token."""

    name = "dspark"
    title = "a DSpark head"
    Config, Settings, Loss = DSparkHeadConfig, DSparkSettings, DSparkLoss
    block_size = 7
