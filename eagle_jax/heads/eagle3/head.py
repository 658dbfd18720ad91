"""The EAGLE-3 head: its settings, the features that it reads, and its vocabulary."""

import dataclasses
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.checkpoints.export_files import Export
from eagle_jax.checkpoints.hf_fields import Fields
from eagle_jax.checkpoints.weights import Weights
from eagle_jax.config import require
from eagle_jax.errors import InputError
from eagle_jax.heads.eagle3.draft import Eagle3Head
from eagle_jax.heads.eagle3.files import (
    SPECULATORS,
    read_fields,
    read_offsets,
    tensor_names,
    token_maps,
    written_fields,
)
from eagle_jax.heads.eagle3.loss import Eagle3Loss, eagle3_loss
from eagle_jax.heads.eagle3.model import (
    Eagle3HeadConfig,
    Eagle3HeadParams,
    feature_layers,
    init_params,
)
from eagle_jax.heads.head import Head, check_size
from eagle_jax.heads.rows import PackedRows
from eagle_jax.heads.settings import LayerSettings
from eagle_jax.models.transformer import Tables, TransformerConfig, output_head

_FEWEST_LAYERS = 7
_DRAFT_VOCAB_SIZE = 32_000
_LAYOUTS = {prefix: tensor_names(prefix) for prefix in ("midlayer", "layers.0")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3Settings(LayerSettings):
    """The settings of a new EAGLE-3 head; for its layer see `LayerSettings`.

    Attributes:
        draft_vocab_size: The number of tokens that an EAGLE-3 head knows, those most
            frequent in its data; `None` for 32,000, or all where there are fewer.
        feature_layers: The indices, such as "1 2 4", of the three layers of the target
            whose inputs an EAGLE-3 head reads; `None` for the published ones, 2, half
            of the layers, and three before their end.
        recycles_normed: Whether an EAGLE-3 head continues drafts from its normalised
            output, as some heads of speculators do.
    """

    kind: Literal["eagle3"] = "eagle3"
    draft_vocab_size: int | None = None
    feature_layers: str | None = None
    recycles_normed: bool = False

    def __post_init__(self) -> None:
        """Refuses sizes below one, and what does not name three layers."""
        super().__post_init__()
        layers = self.feature_layers
        words = [] if layers is None else layers.split()
        holds = len(words) == 3 and all(word.isdecimal() for word in words)
        wanted = 'three layers, such as "1 2 4"'
        require(layers is None or holds, "feature_layers", layers, wanted)

    @property
    def layers(self) -> tuple[int, ...] | None:
        """The indices of `feature_layers`."""
        layers = self.feature_layers
        return None if layers is None else tuple(map(int, layers.split()))


class Eagle3(Head):
    """See `Head`."""

    name, family = "eagle3", "eagle"
    title = "an EAGLE-3 head"
    config, settings, loss_settings = Eagle3HeadConfig, Eagle3Settings, Eagle3Loss
    reads_hidden = True
    init = staticmethod(init_params)
    loss = staticmethod(eagle3_loss)

    def is_in(self, fields: Fields) -> bool:
        """See `Head.is_in`."""
        marks = {"draft_vocab_size", "eagle_config", SPECULATORS}
        return not marks.isdisjoint(fields.values)

    def read_config(
        self, folder: Path, target: TransformerConfig | None = None
    ) -> Eagle3HeadConfig:
        """See `Head.read_config`."""
        del target
        return read_fields(Fields.read(folder))

    def check(self, target: TransformerConfig, config: Eagle3HeadConfig) -> None:
        """See `Head.check`."""
        width = self.target(target, config).feature_size
        if config.feature_size != width:
            raise InputError(
                f"the head reads features of width {config.feature_size}, three hidden "
                f"states of the target have {width}; give the head that was trained "
                "for this target"
            )
        check_size("vocab_size", config.vocab_size, target.vocab_size)

    def model(self, config: Eagle3HeadConfig, dtype: str = "float32") -> Eagle3Head:
        """See `Head.model`."""
        return Eagle3Head(config=config, dtype=dtype)

    def new(
        self, target: TransformerConfig, settings: Eagle3Settings, length: int
    ) -> Eagle3HeadConfig:
        """See `Head.new`."""
        known, vocab_size = settings.draft_vocab_size, target.vocab_size
        wanted = f"at most the target's vocabulary of {vocab_size} tokens"
        require(known is None or known <= vocab_size, "draft_vocab_size", known, wanted)
        head = Eagle3HeadConfig(
            layer=settings.layer(target.layer),
            vocab_size=vocab_size,
            draft_vocab_size=known or min(_DRAFT_VOCAB_SIZE, vocab_size),
            max_positions=length,
            feature_size=3 * target.layer.hidden_size,
            feature_layers=settings.layers,
            recycles_normed=settings.recycles_normed,
        )
        self.target(target, head)
        return head

    def layouts(self, config: Eagle3HeadConfig) -> dict[str, dict[str, str]]:
        """See `Head.layouts`; speculators names the layer otherwise."""
        del config
        return _LAYOUTS

    def fields(self, config: Eagle3HeadConfig, how: Export) -> dict[str, Any]:
        """See `Head.fields`."""
        return written_fields(config, how.dtype)

    def target(
        self, target: TransformerConfig, config: Eagle3HeadConfig
    ) -> TransformerConfig:
        """See `Head.target`; its features are the inputs of three layers."""
        layers, known = config.feature_layers, target.num_layers
        if layers is None and known < _FEWEST_LAYERS:
            raise InputError(
                f"the target has {known} layers, and an EAGLE-3 head needs one of at "
                f"least {_FEWEST_LAYERS}: with fewer, two of its three features are "
                "the same; name three layers (feature_layers), or give an EAGLE-1/2 "
                "head"
            )
        layers = layers or feature_layers(known)
        is_rising = len(layers) == 3 and sorted({*layers}) == list(layers)
        if not is_rising or layers[0] < 0 or layers[-1] >= known:
            raise InputError(
                f"feature_layers = {list(layers)} must be three different layers of "
                f"the target's {known}, 0 to {known - 1}, ascending"
            )
        return dataclasses.replace(target, feature_layers=tuple(layers))

    def read_offsets(
        self, files: Weights, config: Eagle3HeadConfig
    ) -> jax.Array | None:
        """See `Head.read_offsets`."""
        return read_offsets(files, config)

    def maps(
        self, config: Eagle3HeadConfig, offsets: jax.Array | None
    ) -> dict[str, np.ndarray]:
        """See `Head.maps`."""
        return token_maps(config, offsets)

    def vocabulary(
        self, rows: PackedRows, config: Eagle3HeadConfig
    ) -> np.ndarray | None:
        """See `Head.vocabulary`.

        They are the most frequent of those to be predicted; ties, and places that are
        left, go to the lowest ids.
        """
        if config.draft_vocab_size == config.vocab_size:
            return None
        wanted = rows.tokens[rows.loss_mask & (rows.segments > 0)]
        if not wanted.size:
            raise InputError(
                "the data have no token that is to be predicted, so a draft vocabulary "
                "cannot be counted; give data with answers"
            )
        counts = np.bincount(wanted, minlength=config.vocab_size)
        order = np.argsort(-counts, kind="stable").astype(np.int32)
        return np.sort(order[: config.draft_vocab_size])

    def begin(
        self, params: Eagle3HeadParams, tables: Tables, tokens: jax.Array | None
    ) -> Eagle3HeadParams:
        """See `Head.begin`."""
        table, offsets = output_head(tables), params.offsets
        if tokens is not None:
            table = table[:, tokens]
            offsets = jnp.asarray(tokens - jnp.arange(len(tokens)), jnp.int32)
        table = jnp.asarray(table, params.output_head.dtype)
        return dataclasses.replace(params, output_head=table, offsets=offsets)
