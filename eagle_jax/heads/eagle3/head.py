"""The EAGLE-3 head: its settings, the features that it reads, and its vocabulary."""

import dataclasses
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

from eagle_jax.checkpoints.export_files import Export
from eagle_jax.checkpoints.hf_fields import Fields
from eagle_jax.checkpoints.weights import open_weights
from eagle_jax.config import require
from eagle_jax.errors import InputError
from eagle_jax.heads.eagle3.draft import Eagle3Draft
from eagle_jax.heads.eagle3.files import (
    PREFIXES,
    SPECULATORS,
    read_fields,
    tensor_names,
    written_fields,
)
from eagle_jax.heads.eagle3.loss import Eagle3Loss, eagle3_loss
from eagle_jax.heads.eagle3.model import (
    Eagle3HeadConfig,
    Eagle3HeadParams,
    feature_layers,
    init_params,
)
from eagle_jax.heads.head import check_size
from eagle_jax.heads.loss import Batch, Metrics
from eagle_jax.heads.settings import FeatureSettings
from eagle_jax.models.transformer import Tables, TransformerConfig, output_head

_FEWEST_LAYERS = 7
_DRAFT_VOCAB_SIZE = 32_000
# What a new head has as it is set, and what it does then.
_VARIANTS = {
    "has_feature_norms": "normalises each of them",
    "norm_before_fc": "normalises them together",
    "norm_before_residual": "begins its stream with the normalised feature",
    "recycles_normed": "goes on from its normalised output",
    "sliding_window": "sees {:,} pairs at most",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3Settings(FeatureSettings):
    """The settings of a new EAGLE-3 head; for its layer see `FeatureSettings`.

    Attributes:
        draft_vocab_size: The number of tokens that an EAGLE-3 head knows, those most
            frequent in its data; `None` for 32,000, or all where there are fewer.
        has_feature_norms: Whether an EAGLE-3 head normalises each feature before they
            are fused, as EAGLE-3.1 does.
        norm_before_fc: Whether it normalises them together.
        norm_before_residual: Whether its residual stream begins with the normalised
            feature.
        recycles_normed: Whether it continues drafts from its normalised output, as
            EAGLE-3.1 does.
        qk_norm: Whether its layer normalises queries and keys, as Qwen3's do.
        sliding_window: The number of pairs that a pair sees; `None` for all.
        num_layers: The number of its layers; those after the first are Llama's. Block
            heads have 5 where it is left out.
    """

    kind: Literal["eagle3"] = "eagle3"
    draft_vocab_size: int | None = None
    has_feature_norms: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    recycles_normed: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    num_layers: int = 1


class Eagle3Head(Eagle3Draft):
    """An EAGLE-3 head, see `Eagle3Draft`."""

    name = "eagle3"
    title = "an EAGLE-3 head"
    Config, Settings, Loss = Eagle3HeadConfig, Eagle3Settings, Eagle3Loss

    @classmethod
    def matches(cls, fields: Fields) -> bool:
        marks = {"draft_vocab_size", "eagle_config", SPECULATORS}
        return not marks.isdisjoint(fields.values)

    @classmethod
    def read_config(
        cls, folder: Path, target: TransformerConfig | None = None
    ) -> Eagle3HeadConfig:
        del target
        files = open_weights(folder)
        shapes = {name: files.shape(name) for name in files.names()}
        return read_fields(Fields.read(folder), shapes)

    def check_target(self, target: TransformerConfig) -> None:
        config, width = self.config, self.with_features(target).feature_size
        if config.feature_size != width:
            raise InputError(
                f"the head reads features of width {config.feature_size}, "
                f"{config.num_features} hidden states of the target have {width}; give "
                "the head that was trained for this target"
            )
        check_size("vocab_size", config.vocab_size, target.vocab_size)

    def describe(self, target: TransformerConfig) -> str:
        """Returns in words how it was read; variants have no names of their own."""
        config, layers = self.config, self.with_features(target).feature_layers
        known, everything = config.draft_vocab_size, config.vocab_size
        said = [
            f"reads the inputs of layers {', '.join(map(str, layers))} of the target's "
            f"{target.num_layers}",
            *(
                text.format(getattr(config, name))
                for name, text in _VARIANTS.items()
                if getattr(config, name)
            ),
            *(["normalises queries and keys"] if config.layer.qk_norm else []),
            *([f"has {config.num_layers} layers"] if config.num_layers > 1 else []),
            *([] if config.has_output_head else ["borrows the target's output head"]),
            f"knows {known:,} of {everything:,} tokens",
            f"was trained to {config.max_positions:,} positions",
        ]
        return f"{self.title} that {', '.join(said)}"

    @classmethod
    def default_config(
        cls, target: TransformerConfig, settings: Eagle3Settings, length: int
    ) -> Eagle3HeadConfig:
        known, vocab_size = settings.draft_vocab_size, target.vocab_size
        wanted = f"at most the target's vocabulary of {vocab_size} tokens"
        require(known is None or known <= vocab_size, "draft_vocab_size", known, wanted)
        layers, layer = settings.layers, settings.layer(target.layer)
        head = Eagle3HeadConfig(
            layer=dataclasses.replace(layer, qk_norm=settings.qk_norm),
            vocab_size=vocab_size,
            draft_vocab_size=known or min(_DRAFT_VOCAB_SIZE, vocab_size),
            max_positions=length,
            feature_size=target.layer.hidden_size * (len(layers) if layers else 3),
            feature_layers=layers,
            num_layers=settings.num_layers,
            **{name: getattr(settings, name) for name in _VARIANTS},
        )
        cls(config=head).with_features(target)
        return head

    def tensor_names(self) -> dict[str, dict[str, str]]:
        # speculators names the layer otherwise.
        sizes = self.config.num_features, self.config.num_layers
        return {prefix: tensor_names(prefix, *sizes) for prefix in PREFIXES}

    def to_hf_config(self, how: Export) -> dict[str, Any]:
        return written_fields(self.config, how.dtype)

    def init(self, key: jax.Array, dtype: str = "float32") -> Eagle3HeadParams:
        return init_params(key, self.config, dtype)

    def loss(
        self, params: Eagle3HeadParams, batch: Batch, settings: Eagle3Loss
    ) -> tuple[jax.Array, Metrics]:
        return eagle3_loss(self, params, batch, settings)

    def with_features(self, target: TransformerConfig) -> TransformerConfig:
        """Returns the target, whose features are the inputs of some layers."""
        layers, known = self.config.feature_layers, target.num_layers
        if layers is None and known < _FEWEST_LAYERS:
            raise InputError(
                f"the target has {known} layers, and an EAGLE-3 head needs one of at "
                f"least {_FEWEST_LAYERS}: with fewer, two of its three features are "
                "the same; name three layers (feature_layers), or give an EAGLE-1/2 "
                "head"
            )
        layers = layers or feature_layers(known)
        is_rising = sorted({*layers}) == list(layers)
        if not is_rising or layers[0] < 0 or layers[-1] >= known:
            raise InputError(
                f"feature_layers = {list(layers)} must be different layers of the "
                f"target's {known}, 0 to {known - 1}, ascending"
            )
        return dataclasses.replace(target, feature_layers=tuple(layers))

    def init_from_target(
        self, params: Eagle3HeadParams, tables: Tables, tokens: jax.Array | None
    ) -> Eagle3HeadParams:
        table, offsets = output_head(tables), params.offsets
        if tokens is not None:
            table = table[:, tokens]
            offsets = jnp.asarray(tokens - jnp.arange(len(tokens)), jnp.int32)
        table = jnp.array(table, params.fc.dtype)  # A copy, which steps may overwrite.
        return dataclasses.replace(params, output_head=table, offsets=offsets)
