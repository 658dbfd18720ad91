"""Block heads as they are stored, by z-lab (DFlash) and by DeepSpec (DSpark).

    fc.weight [E, F], hidden_norm.weight [E], norm.weight [E]
    layers.{i}.*    layers of Qwen3 or Llama, with input norms
    markov_head.markov_w1.weight, markov_head.markov_w2.weight [V, r]    DSpark's
    confidence_head.proj.weight [1, E + r], confidence_head.proj.bias [1]
    embed_tokens.weight, lm_head.weight [V, E]    DSpark's copies of the target's

Nothing in the tensors tells whether rows predict their own token or the next one: the
architecture does. `target_layer_ids` counts the target's layers from 0 by their
*outputs*, and -1 is the embedding; the sizes here count layers by their inputs.
"""

import dataclasses
from pathlib import Path
from typing import Any, ClassVar

from eagle_jax.checkpoints.export_files import Export
from eagle_jax.checkpoints.hf_fields import Fields
from eagle_jax.checkpoints.names import LAYER
from eagle_jax.checkpoints.weights import open_weights
from eagle_jax.config import require
from eagle_jax.errors import InputError
from eagle_jax.heads.head import Head
from eagle_jax.heads.hf_config import SLIDING, common_fields, read_sizes, read_window
from eagle_jax.heads.settings import FeatureSettings
from eagle_jax.models.layers import LayerConfig
from eagle_jax.models.transformer import TransformerConfig

_NAMES = {
    "fc": "fc.weight",
    "feature_norm": "hidden_norm.weight",
    "norm": "norm.weight",
    "markov.before": "markov_head.markov_w1.weight",
    "markov.after": "markov_head.markov_w2.weight",
    "confidence.linear": "confidence_head.proj.weight",
    "confidence.linear_bias": "confidence_head.proj.bias",
    **{f"layers.{{}}.{ours}": f"layers.{{}}.{hf}" for ours, hf in LAYER.items()},
    # DSpark's files hold copies of the target's tables, which nobody trained.
    "target.embedding": "embed_tokens.weight",
    "target.output_head": "lm_head.weight",
}
_NESTED, _LAYERS, _MASK = "dflash_config", "target_layer_ids", "mask_token_id"
_FIELDS = f"""{_LAYERS} {_MASK} block_size num_target_layers is_causal causal_head
    num_anchors markov_rank markov_head_type enable_confidence_head
    confidence_head_with_markov attention_bias target_hidden_size sample_from_anchor"""
# What other block heads do, at which value nothing is done.
_OTHERS = {
    "conv_kernel_size": 0,
    "selector_rank": 0,
    "selector_top_k": 0,
    "output_multiplier": 1.0,
    "input_embedding_scale": 1.0,
    "final_logit_softcapping": None,
}
_MOST_LAYERS, _MOST_ROWS, _NUM_FEATURES = 64, 256, 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockHeadConfig:
    """The sizes of a block head.

    Attributes:
        layer: The sizes of each layer; its width is the target's.
        vocab_size: The number of tokens the target knows, `V`.
        max_positions: The number of positions that it was trained for.
        block_size: The rows of a block, the root's included.
        mask_token: The token whose embedding stands for a token to be predicted.
        feature_layers: The indices of the target's layers whose inputs are read.
        num_target_layers: The number of the target's layers.
        num_layers: The number of its own.
        predicts_next: Whether rows predict the token after them (DSpark), not their
            own.
        sliding_window: The number of positions of the text that a row sees, up to its
            own; `None` for all.
        is_causal: Whether a row sees those before it and itself alone of its block.
        markov_rank: The rank of the Markov head, `r`; 0 for none.
        has_confidence: Whether there is a confidence head, which reads the token before
            where there is a Markov head.
    """

    layer: LayerConfig
    vocab_size: int
    max_positions: int
    block_size: int
    mask_token: int
    feature_layers: tuple[int, ...]
    num_target_layers: int
    num_layers: int = 1
    predicts_next: bool = False
    sliding_window: int | None = None
    is_causal: bool = False
    markov_rank: int = 0
    has_confidence: bool = False

    @property
    def num_levels(self) -> int:
        """The number of tokens after the root that a block predicts."""
        return self.block_size if self.predicts_next else self.block_size - 1

    @property
    def first_row(self) -> int:
        """The row that predicts the token after the root."""
        return 0 if self.predicts_next else 1

    @property
    def feature_size(self) -> int:
        """The width of the target's features, `F`."""
        return self.layer.hidden_size * len(self.feature_layers)


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


class StoredBlockHead(Head):
    """What is stored of a block head, and what its sizes are.

    Attributes:
        architecture: How the published files call this kind.
        block_size: The published rows of a block.
    """

    architecture: ClassVar[str]
    block_size: ClassVar[int]
    Config: ClassVar[type[BlockHeadConfig]]

    @classmethod
    def matches(cls, fields: Fields) -> bool:
        # The architecture says how rows are read.
        return fields.get("architectures") == [cls.architecture]

    @classmethod
    def read_config(
        cls, folder: Path, target: TransformerConfig | None = None
    ) -> BlockHeadConfig:
        has_norms = "layers.0.self_attn.q_norm.weight" in open_weights(folder).names()
        fields = Fields.read(folder).unnested(_NESTED)
        for name, neutral in _OTHERS.items():
            if fields.get(name, neutral) != neutral:
                raise fields.refusal(
                    f"{name} = {fields.get(name)!r} is not supported: known are heads "
                    "of DFlash and DSpark, not those of DFlash-2"
                )
        name, is_next = "sample_from_anchor", cls.Config.predicts_next
        if fields.flag(name, default=is_next) != is_next:
            raise fields.refusal(f"{name} = {not is_next} contradicts its architecture")
        markov = fields.get("markov_head_type", "vanilla")
        rank = fields.size("markov_rank", default=0, least=0)
        if rank and markov != "vanilla":
            raise fields.refusal(
                f"markov_head_type = {markov!r} is not supported, only 'vanilla'"
            )
        sizes = read_sizes(fields, *_FIELDS.split(), *_OTHERS)
        sizes["layer"] = dataclasses.replace(sizes["layer"], qk_norm=has_norms)
        window = read_window(fields)
        return cls.Config(
            **sizes,
            block_size=fields.size("block_size", least=2, most=_MOST_ROWS),
            mask_token=fields.size(_MASK, least=0, most=sizes["vocab_size"] - 1),
            feature_layers=_read_layers(fields),
            num_target_layers=fields.size("num_target_layers"),
            num_layers=fields.size("num_hidden_layers", most=_MOST_LAYERS),
            sliding_window=window,
            is_causal=fields.flag(
                "causal_head",
                default=fields.flag("is_causal", default=window is not None),
            ),
            markov_rank=rank,
            has_confidence=fields.flag("enable_confidence_head"),
        )

    @classmethod
    def default_config(
        cls, target: TransformerConfig, settings: BlockSettings, length: int
    ) -> BlockHeadConfig:
        known, mask = target.vocab_size, settings.mask_token
        holds = mask is None or mask < known
        require(holds, "mask_token", mask, f"one of the target's {known} tokens")
        layer, rank = settings.layer(target.layer), getattr(settings, "markov_rank", 0)
        config = cls.Config(
            layer=dataclasses.replace(layer, qk_norm=settings.qk_norm),
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
        _check_layers(config, target.num_layers)
        return config

    def check_target(self, target: TransformerConfig) -> None:
        super().check_target(target)
        _check_layers(self.config, target.num_layers)

    def with_features(self, target: TransformerConfig) -> TransformerConfig:
        return dataclasses.replace(target, feature_layers=self.config.feature_layers)

    def describe(self, target: TransformerConfig) -> str:
        config = self.config
        layers = ", ".join(map(str, config.feature_layers))
        says = "the next token" if config.predicts_next else "its own token"
        return (
            f"{self.title} that reads the inputs of layers {layers} of the target's "
            f"{target.num_layers}, has {config.num_layers} layers and blocks of "
            f"{config.block_size} rows, each of which predicts {says}"
        )

    def tensor_names(self) -> dict[str, dict[str, str]]:
        return {"layers": _NAMES}

    def to_hf_config(self, how: Export) -> dict[str, Any]:
        config, count = self.config, self.config.num_layers
        layer, window = config.layer, config.sliding_window
        own: dict[str, Any] = {
            _LAYERS: [number - 1 for number in config.feature_layers],
            _MASK: config.mask_token,
        }
        fields = common_fields(config, how.dtype) | {
            "architectures": [self.architecture],
            "head_dim": layer.head_dim,
            "num_target_layers": config.num_target_layers,
            "block_size": config.block_size,
            "is_causal": config.is_causal,
            "layer_types": [SLIDING if window else "full_attention"] * count,
        }
        if window is not None:
            fields |= {"sliding_window": window, "use_sliding_window": True}
        if not config.predicts_next:
            return fields | {_NESTED: own}
        own |= {
            "markov_rank": config.markov_rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": config.has_confidence,
            "confidence_head_with_markov": True,
        }
        return fields | own


def _read_layers(fields: Fields) -> tuple[int, ...]:
    """Returns the layers whose inputs are read."""
    layers = fields.get(_LAYERS)
    is_some = isinstance(layers, list) and 0 < len(layers) <= _MOST_LAYERS
    if not is_some or any(type(one) is not int or one < -1 for one in layers):
        raise fields.refusal(
            f"{_LAYERS} = {layers!r} must be a list of layers, -1 or more"
        )
    if sorted({*layers}) != layers:
        raise fields.refusal(f"{_LAYERS} = {layers} must be different ones, ascending")
    return tuple(one + 1 for one in layers)


def _check_layers(config: BlockHeadConfig, num_layers: int) -> None:
    """Refuses a head that reads layers which a target of `num_layers` lacks."""
    if config.num_target_layers != num_layers:
        raise InputError(
            f"the head's num_target_layers is {config.num_target_layers}, the target "
            f"has {num_layers}; give the head that was trained for this target"
        )
    if config.feature_layers[-1] >= num_layers:
        named = [number - 1 for number in config.feature_layers]
        raise InputError(
            f"{_LAYERS} = {named} must be layers of the target's {num_layers} before "
            f"the last, at most {num_layers - 2}"
        )
