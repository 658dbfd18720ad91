"""The EAGLE-3 head: features of several layers, fused, and mostly its own output head.

Input pair `i` is the embedding of token `i + 1` beside feature `i`, at position `i`, as
in EAGLE-1 and EAGLE-2. The target's feature is the residual stream before some of its
layers, three as published, brought to the head's width by `fuse`; where a draft is
continued, the head's own output for the parent takes its place as it is (EAGLE-3,
section 3.1), or normalised where a head was trained so (EAGLE-3.1), see `recycle`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from eagle_jax.config import require
from eagle_jax.drafting.model import target_tokens
from eagle_jax.errors import InputError
from eagle_jax.heads.eagle3.files import (
    Eagle3HeadConfig,
    Eagle3Settings,
    StoredEagle3Head,
    feature_layers,
)
from eagle_jax.heads.eagle3.loss import Eagle3Loss, eagle3_loss
from eagle_jax.heads.head import HeadParams, check_size
from eagle_jax.models.layers import LayerParams, init_layer, rms_norm
from eagle_jax.models.linear import init_matrix, linear
from eagle_jax.models.transformer import (
    Tables,
    TransformerConfig,
    output_head,
    unembed,
    unembed_by,
)
from eagle_jax.prng import own_keys

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


@struct.dataclass(kw_only=True)
class Eagle3HeadParams:
    """The weights of an EAGLE-3 head.

    Attributes:
        fc: `[F, E]`, the matrix that fuses the target's features.
        embedding_norm: `[E]`, the norm of the token's embedding.
        feature_norm: `[E]`, the norm of the feature.
        layer: The first layer, without input norm, whose q, k and v read both.
        norm: `[E]`, the norm before the output head.
        output_head: `[E, W]`, the head's own output head; `None` where it is the
            target's.
        offsets: `[W]` int32, how much higher each token is in the target's
            vocabulary, never less than for the one before it; `None` where both
            vocabularies are the same.
        embedding: `[V, E]`, the head's own embedding table; `None` where it is the
            target's.
        fc_norm: A norm `[F / n]` for each of the target's `n` features; `None` for
            none.
        input_norm: `[F]`, the norm of all of them together; `None` for none.
        later_layers: Those after the first, which read the residual stream alone.
    """

    fc: jax.Array
    embedding_norm: jax.Array
    feature_norm: jax.Array
    layer: LayerParams
    norm: jax.Array
    output_head: jax.Array | None = None
    offsets: jax.Array | None = None
    embedding: jax.Array | None = None
    fc_norm: tuple[jax.Array, ...] | None = None
    input_norm: jax.Array | None = None
    later_layers: tuple[LayerParams, ...] = ()


class Eagle3Head(StoredEagle3Head):
    """An EAGLE-3 head, which reads several features and may know fewer tokens.

    The target must give the features of `with_features`. For drafted tokens the head's
    own outputs take their place, without being fused.
    """

    name = "eagle3"
    title = "an EAGLE-3 head"
    Config, Settings, Loss = Eagle3HeadConfig, Eagle3Settings, Eagle3Loss
    loss = eagle3_loss

    @classmethod
    def default_config(
        cls, target: TransformerConfig, settings: Eagle3Settings, length: int
    ) -> Eagle3HeadConfig:
        known, vocab_size = settings.draft_vocab_size, target.vocab_size
        wanted = f"at most the target's vocabulary of {vocab_size} tokens"
        require(known is None or known <= vocab_size, "draft_vocab_size", known, wanted)
        layers, layer = settings.layers, settings.layer(target.layer)
        config = Eagle3HeadConfig(
            layer=dataclasses.replace(layer, qk_norm=settings.qk_norm),
            vocab_size=vocab_size,
            draft_vocab_size=known or min(_DRAFT_VOCAB_SIZE, vocab_size),
            max_positions=length,
            feature_size=target.layer.hidden_size * (len(layers) if layers else 3),
            feature_layers=layers,
            num_layers=settings.num_layers,
            **{name: getattr(settings, name) for name in _VARIANTS},
        )
        cls(config=config).with_features(target)
        return config

    def check_target(self, target: TransformerConfig) -> None:
        config, width = self.config, self.with_features(target).feature_size
        if config.feature_size != width:
            raise InputError(
                f"the head reads features of width {config.feature_size}, "
                f"{config.num_features} hidden states of the target have {width}; give "
                "the head that was trained for this target"
            )
        check_size("vocab_size", config.vocab_size, target.vocab_size)

    def with_features(self, target: TransformerConfig) -> TransformerConfig:
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

    def describe(self, target: TransformerConfig) -> str:
        # Variants are published without a name of their own.
        config, layers = self.config, self.with_features(target).feature_layers
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
            f"knows {config.draft_vocab_size:,} of {config.vocab_size:,} tokens",
            f"was trained to {config.max_positions:,} positions",
        ]
        return f"{self.title} that {', '.join(said)}"

    def init(self, key: jax.Array, dtype: str = "float32") -> Eagle3HeadParams:
        # The tokens of a smaller vocabulary are taken evenly from the target's.
        config, kind = self.config, jnp.dtype(dtype)
        fc_key, layer_key, head_key = jax.random.split(own_keys(key), 3)
        keys = jax.random.split(layer_key, config.num_layers)
        width, known = config.layer.hidden_size, config.draft_vocab_size
        offsets = norms = table = None
        if known < config.vocab_size:
            places = np.arange(known, dtype=np.int64)
            offsets = places * config.vocab_size // known - places
            offsets = jnp.asarray(offsets, jnp.int32)
        if config.has_feature_norms:  # Not one array three times: it could be donated.
            size = config.feature_size // config.num_features
            norms = tuple(jnp.ones(size, kind) for _ in range(config.num_features))
        if config.has_output_head:
            table = init_matrix(head_key, (width, known), kind)
        first = init_layer(
            keys[0], config.layer, kind, input_norm=False, input_size=2 * width
        )
        return Eagle3HeadParams(
            fc=init_matrix(fc_key, (config.feature_size, width), kind),
            embedding_norm=jnp.ones(width, kind),
            feature_norm=jnp.ones(width, kind),
            layer=first,
            norm=jnp.ones(width, kind),
            output_head=table,
            offsets=offsets,
            fc_norm=norms,
            input_norm=jnp.ones(config.feature_size, kind)
            if config.norm_before_fc
            else None,
            later_layers=tuple(
                init_layer(one, config.layer, kind, input_norm=True) for one in keys[1:]
            ),
        )

    def init_from_target(
        self, params: Eagle3HeadParams, tables: Tables, tokens: jax.Array | None
    ) -> Eagle3HeadParams:
        table, offsets = output_head(tables), params.offsets
        if tokens is not None:
            table = table[:, tokens]
            offsets = jnp.asarray(tokens - jnp.arange(len(tokens)), jnp.int32)
        table = jnp.array(table, params.fc.dtype)  # A copy, which steps may overwrite.
        return dataclasses.replace(params, output_head=table, offsets=offsets)

    @property
    def feature_size(self) -> int:
        return self.config.feature_size

    @property
    def num_layers(self) -> int:
        return self.config.num_layers

    def fuse(self, params: Eagle3HeadParams, features: jax.Array) -> jax.Array:
        # The norms have the epsilon of the layer's.
        features = features.astype(params.norm.dtype)
        if params.input_norm is not None:
            features = self._norm(features, params.input_norm)
        if params.fc_norm is not None:
            parts = jnp.split(features, len(params.fc_norm), axis=-1)
            normed = map(self._norm, parts, params.fc_norm)
            features = jnp.concatenate([*normed], axis=-1)
        return linear(features, params.fc)

    def layer_inputs(
        self, params: Eagle3HeadParams, embeddings: jax.Array, features: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        features = features.astype(embeddings.dtype)
        embedded = self._norm(embeddings, params.embedding_norm)
        normed = self._norm(features, params.feature_norm)
        stream = normed if self.config.norm_before_residual else features
        return stream, jnp.concatenate([embedded, normed], axis=-1)

    def recycle(self, params: Eagle3HeadParams, outputs: jax.Array) -> jax.Array:
        if not self.config.recycles_normed:
            return outputs
        return self._norm(outputs, params.norm)

    def logits(
        self, params: HeadParams, outputs: jax.Array, *, level: int
    ) -> jax.Array:
        # The head's own output head gives `W` of them.
        own, states = params.head.output_head, self._norm(outputs, params.head.norm)
        return unembed_by(params, states) if own is None else unembed(own, states)

    def tokens(self, params: HeadParams, choices: jax.Array) -> jax.Array:
        return target_tokens(params.head.offsets, choices)

    def _norm(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        return rms_norm(x, weight, self.config.layer.rms_norm_eps)
