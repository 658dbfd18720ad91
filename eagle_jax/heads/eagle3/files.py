"""EAGLE-3 heads as they are stored, by SpecForge and by speculators.

An EAGLE-3 head has tensors beside those of an EAGLE-1/2 head:

    fc, midlayer.*, norm, lm_head    floating-point weights; `layers.0.*` elsewhere
    layers.1.*                       a layer of Llama after that, and so on
    fc_norm.{i}                      EAGLE-3.1: a norm for each of the features
    input_norm                       a norm of all of them, where `norm_before_fc`
    embed_tokens                     only where the head's width is not the target's
    d2t [W] integers                 token i of the head is the target's i + d2t[i]
    t2d [V] bool                     whether the head has this token of the target

The last two are absent where both vocabularies are the same, and so may `lm_head` be:
such a head borrows the target's. The number of layers, norms of queries and keys, and
the width of an attention head are known by the tensors, whatever `config.json` says:
many heads name the target's layers.

Every head normalises what its output head reads. `norm_output` says that the next step
reads the normalised state, too (EAGLE-3.1). Older heads of SpecForge meant the output
alone by it, and nothing in their files tells them apart but that they lack `fc_norm`.

The layers that `eagle_aux_hidden_state_layer_ids` names are counted in two ways: as the
layers whose outputs are read, where the first is 1, as published; else, and in the own
field of speculators, as those whose inputs are. The published features are the inputs
of 2, L // 2 and L - 3. Who wrote a head is known by fields of speculators, which nests
the sizes in `transformer_layer_config`.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from eagle_jax.checkpoints.export_files import Export
from eagle_jax.checkpoints.hf_fields import Fields, warn_once
from eagle_jax.checkpoints.names import LAYER
from eagle_jax.checkpoints.weights import open_weights
from eagle_jax.heads.feature import FeatureHead
from eagle_jax.heads.hf_config import SLIDING, common_fields, read_sizes, read_window
from eagle_jax.heads.settings import FeatureSettings
from eagle_jax.models.layers import LayerConfig
from eagle_jax.models.transformer import TransformerConfig

# What the names of the layer's tensors begin with, the published ones first.
_PREFIXES = ("midlayer", "layers.0")
# The field by which a head's `config.json` is known as one of speculators.
_SPECULATORS = "speculators_model_type"
_LAYERS = "eagle_aux_hidden_state_layer_ids"
_FIELDS = f"""{_LAYERS} draft_vocab_size target_hidden_size eagle_config fc_norm
    norm_before_fc norm_before_residual norm_output num_aux_hidden_states"""
# The one `eagle_config` that asks for what we do anyway; others name the layers, too.
_USUAL_FEATURES: dict[str, Any] = {"use_aux_hidden_state": True}
_NESTED = "transformer_layer_config"
_MOST_FEATURES = 16
# What speculators says of itself, of the target and of serving.
_NO_SIZES = {
    _SPECULATORS,
    "speculators_config",
    "speculators_version",
    "architectures",
    "model_type",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3HeadConfig:
    """The sizes of an EAGLE-3 head; nothing here is derived from the target.

    Attributes:
        layer: The sizes of its layers; `E` is the head's width, which need not be the
            target's.
        vocab_size: The number of tokens the target knows, `V`.
        draft_vocab_size: The number of these tokens that the head can draft, `W`.
        max_positions: The number of positions that the head was trained for.
        feature_size: The width of the features, `F`, the target's width times their
            number.
        feature_layers: The indices of the target's layers whose inputs are the
            features; `None` for the three published ones, see `feature_layers`.
        has_feature_norms: Whether each feature is normalised before they are fused
            (EAGLE-3.1).
        norm_before_fc: Whether they are normalised together before they are fused.
        norm_before_residual: Whether the layer's residual stream begins with the
            normalised feature.
        recycles_normed: Whether a draft is continued from the output as the output head
            reads it, after `norm` (EAGLE-3.1).
        has_output_head: Whether it has an output head of its own; one that borrows the
            target's knows all of the target's tokens.
        sliding_window: The number of pairs that a pair sees, itself included; `None`
            for all before it.
        num_layers: The number of its layers.
    """

    layer: LayerConfig
    vocab_size: int
    draft_vocab_size: int
    max_positions: int
    feature_size: int
    feature_layers: tuple[int, ...] | None = None
    has_feature_norms: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    recycles_normed: bool = False
    has_output_head: bool = True
    sliding_window: int | None = None
    num_layers: int = 1

    @property
    def num_features(self) -> int:
        """The number of layers of the target that it reads."""
        return 3 if self.feature_layers is None else len(self.feature_layers)


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


def feature_layers(num_layers: int) -> tuple[int, int, int]:
    """Returns the indices of the layers whose inputs the head reads, as published.

    >>> feature_layers(32)
    (2, 16, 29)

    Args:
        num_layers: The number of the target's layers, `L`; from 7 on the three indices
            differ.
    """
    return 2, num_layers // 2, num_layers - 3


class StoredEagle3Head(FeatureHead):
    """What is stored of an EAGLE-3 head."""

    config: Eagle3HeadConfig

    @classmethod
    def matches(cls, fields: Fields) -> bool:
        marks = {"draft_vocab_size", "eagle_config", _SPECULATORS}
        return not marks.isdisjoint(fields.values)

    @classmethod
    def read_config(
        cls, folder: Path, target: TransformerConfig | None = None
    ) -> Eagle3HeadConfig:
        files, fields = open_weights(folder), Fields.read(folder)
        shapes = {name: files.shape(name) for name in files.names()}
        is_theirs = not {_SPECULATORS, "speculators_config"}.isdisjoint(fields.values)
        if is_theirs:
            if (kind := fields.get(_SPECULATORS, "eagle3")) != "eagle3":
                raise fields.refusal(
                    f"{_SPECULATORS} = {kind!r} is not supported, only eagle3"
                )
            fields = fields.unnested(_NESTED, *_NO_SIZES)
        sizes = read_sizes(fields, *_FIELDS.split())
        layer, vocab_size = sizes.pop("layer"), sizes["vocab_size"]
        known = fields.size("draft_vocab_size", default=vocab_size)
        if known > vocab_size:
            raise fields.refusal(
                f"draft_vocab_size = {known} is more than vocab_size = {vocab_size}"
            )
        layers = _read_layers(fields, is_theirs=is_theirs)
        num_features = 3 if layers is None else len(layers)
        count = fields.size("num_aux_hidden_states", default=num_features)
        if count != num_features:
            raise fields.refusal(
                f"num_aux_hidden_states = {count}, but {num_features} layers are read, "
                f"see {_LAYERS}"
            )
        width = fields.size("target_hidden_size", default=layer.hidden_size)
        has_norms, recycles = fields.flag("fc_norm"), fields.flag("norm_output")
        if recycles and not (has_norms or is_theirs):
            warn_once(
                f"{fields.path}: norm_output = true is read as EAGLE-3.1's: drafts go "
                "on from the normalised output; set it to false where an older head of "
                "SpecForge drafts badly"
            )
        names = [name.split(".") for name in shapes]
        later = {name[1] for name in names if name[0] == "layers"} - {"0"}
        return Eagle3HeadConfig(
            **sizes,
            layer=_layer_of(layer, fields, shapes),
            draft_vocab_size=known,
            feature_size=count * width,
            feature_layers=layers,
            has_feature_norms=has_norms,
            norm_before_fc=fields.flag(
                "norm_before_fc", default="input_norm.weight" in shapes
            ),
            norm_before_residual=fields.flag("norm_before_residual"),
            recycles_normed=recycles,
            has_output_head="lm_head.weight" in shapes or known < vocab_size,
            sliding_window=read_window(fields),
            num_layers=1 + len(later),
        )

    def tensor_names(self) -> dict[str, dict[str, str]]:
        # speculators names the layer otherwise.
        return {prefix: self._names(prefix) for prefix in _PREFIXES}

    def _names(self, prefix: str) -> dict[str, str]:
        """Returns the names where those of the first layer begin with a prefix."""
        norms = [f"fc_norm.{number}" for number in range(self.config.num_features)]
        later = {
            f"later_layers.{number - 1}.{ours}": f"layers.{number}.{hf}"
            for number in range(1, self.config.num_layers)
            for ours, hf in LAYER.items()
        }
        return {
            "embedding": "embed_tokens.weight",
            "fc": "fc.weight",
            "embedding_norm": f"{prefix}.input_layernorm.weight",
            "feature_norm": f"{prefix}.hidden_norm.weight",
            "norm": "norm.weight",
            "output_head": "lm_head.weight",
            "input_norm": "input_norm.weight",
            **{name: f"{name}.weight" for name in norms},
            **{f"layer.{ours}": f"{prefix}.{hf}" for ours, hf in LAYER.items()},
            **later,
        }

    def to_hf_config(self, how: Export) -> dict[str, Any]:
        # What SpecForge's fields cannot say, or not to every reader, is said in those
        # of speculators; what these say about target and serving is left out.
        config, layer = self.config, self.config.layer
        fields = common_fields(config, how.dtype)
        fields["architectures"] = ["LlamaForCausalLMEagle3"]
        if layer.head_dim * layer.num_heads != layer.hidden_size or layer.qk_norm:
            fields["head_dim"] = layer.head_dim
        if (window := config.sliding_window) is not None:
            fields |= {"sliding_window": window, "use_sliding_window": True}
            fields["layer_types"] = [SLIDING] * config.num_layers
        own: dict[str, Any] = {"draft_vocab_size": config.draft_vocab_size}
        layers = config.feature_layers
        width = config.feature_size // config.num_features
        if width != layer.hidden_size:
            own["target_hidden_size"] = width
        if config.has_feature_norms:
            own["fc_norm"] = True
        norms = {
            name: getattr(config, name)
            for name in ("norm_before_residual", "norm_before_fc")
        }
        norms["norm_output"] = config.recycles_normed
        if not any(norms.values()) and (layers is None or layers[0] != 1):
            if layers is not None:
                shift = 1 if layers[0] == 2 else 0
                named = [layer - shift for layer in layers]
                own["eagle_config"] = _USUAL_FEATURES | {_LAYERS: named}
            return fields | own
        if layers is not None:
            own[_LAYERS] = list(layers)
        outer = {name: fields.pop(name) for name in ("torch_dtype", "written_by")}
        return {_SPECULATORS: "eagle3"} | norms | own | outer | {_NESTED: fields}


def _layer_of(
    layer: LayerConfig, fields: Fields, shapes: Mapping[str, tuple[int, ...]]
) -> LayerConfig:
    """Returns the sizes of the layer as its tensors have them."""
    for prefix in _PREFIXES:
        if f"{prefix}.self_attn.q_norm.weight" in shapes:
            layer = dataclasses.replace(layer, qk_norm=True)
        query = shapes.get(f"{prefix}.self_attn.q_proj.weight", ())
        if len(query) != 2:  # `check_shapes` refuses other shapes, and none.
            continue
        half, rest = divmod(query[0], 2 * layer.num_heads)
        head_dim = 2 * half
        if head_dim not in (0, layer.head_dim) and not rest:
            warn_once(
                f"{fields.path}: head_dim = {layer.head_dim}, but {layer.num_heads} "
                f"query heads have {query[0]} outputs; taking {head_dim}"
            )
            layer = dataclasses.replace(layer, head_dim=head_dim)
    return layer


def _read_layers(fields: Fields, *, is_theirs: bool) -> tuple[int, ...] | None:
    """Returns the layers whose inputs are read; `None` for the published ones."""
    features = fields.get("eagle_config") or _USUAL_FEATURES
    layers = features.get(_LAYERS) if isinstance(features, dict) else None
    named = {} if layers is None else {_LAYERS: layers}
    if features != _USUAL_FEATURES | named:
        raise fields.refusal(
            f"eagle_config = {features!r} is not supported: features are read where "
            f"the published heads read them, or at layers named as {_LAYERS}"
        )
    if layers is None:
        layers = fields.get(_LAYERS)
    if layers is None:
        return None
    is_some = isinstance(layers, list) and 1 <= len(layers) <= _MOST_FEATURES
    if not is_some or any(type(layer) is not int for layer in layers):
        raise fields.refusal(f"{_LAYERS} = {layers!r} must be a list of layers")
    are_outputs = layers[0] == 1 and not is_theirs
    return tuple(layer + are_outputs for layer in layers)
