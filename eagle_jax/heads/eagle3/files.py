"""EAGLE-3 heads as they are stored, by SpecForge and by speculators.

An EAGLE-3 head has tensors beside those of an EAGLE-1/2 head:

    fc, midlayer.*, norm, lm_head    floating-point weights; `layers.0.*` elsewhere
    fc_norm.{0,1,2}                  EAGLE-3.1: a norm for each of the three features
    embed_tokens                     only where the head's width is not the target's
    d2t [W] integers                 token i of the head is the target's i + d2t[i]
    t2d [V] bool                     whether the head has this token of the target

The last two are absent where both vocabularies are the same.

Every head normalises what its output head reads. `norm_output` has two meanings:
SpecForge's says this alone, and the state that the next step reads is not normalised;
speculators' says that the next step reads the normalised state, too. Who wrote a head
is known by fields of speculators, which nests the sizes in `transformer_layer_config`.

Nor do they count layers alike where `eagle_aux_hidden_state_layer_ids` names three: the
published features are the outputs of layers 1, L // 2 - 1 and L - 4 in SpecForge's
`eagle_config`, and the inputs of 2, L // 2 and L - 3 in speculators' own field.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.checkpoints.export_files import Tensors
from eagle_jax.checkpoints.hf_fields import Fields
from eagle_jax.checkpoints.names import LAYER, MAPS
from eagle_jax.checkpoints.weights import Weights
from eagle_jax.errors import InputError
from eagle_jax.heads.eagle.files import common_fields, read_sizes
from eagle_jax.heads.eagle3.model import Eagle3HeadConfig

SPECULATORS = "speculators_model_type"
"""The field by which a head's `config.json` is known as one of speculators."""

_FIELDS = (
    "draft_vocab_size",
    "target_hidden_size",
    "eagle_config",
    "fc_norm",
    "norm_output",
)
# The one `eagle_config` that asks for what we do anyway; others name the layers, too.
_USUAL_FEATURES = {"use_aux_hidden_state": True}
_LAYERS = "eagle_aux_hidden_state_layer_ids"
_NESTED = "transformer_layer_config"
# What speculators says of itself, of the target and of serving.
_NO_SIZES = {
    SPECULATORS,
    "speculators_config",
    "speculators_version",
    "architectures",
    "model_type",
    _NESTED,
}


def tensor_names(prefix: str) -> dict[str, str]:
    """Returns the tensor names of heads by path in `Eagle3HeadParams`.

    Args:
        prefix: What the names of the layer begin with.
    """
    layer = {ours: hf for ours, hf in LAYER.items() if ours != "input_norm"}
    return {
        "embedding": "embed_tokens.weight",
        "fc": "fc.weight",
        "embedding_norm": f"{prefix}.input_layernorm.weight",
        "feature_norm": f"{prefix}.hidden_norm.weight",
        "norm": "norm.weight",
        "output_head": "lm_head.weight",
        **{f"fc_norm.{number}": f"fc_norm.{number}.weight" for number in range(3)},
        **{f"layer.{ours}": f"{prefix}.{hf}" for ours, hf in layer.items()},
    }


def read_fields(fields: Fields) -> Eagle3HeadConfig:
    """Reads the sizes of a head.

    Its `num_hidden_layers` is not read: published heads name the target's.

    Args:
        fields: The fields of its `config.json`.

    Raises:
        InputError: If a field is missing or asks for something that is not
            implemented.
    """
    is_theirs = not {SPECULATORS, "speculators_config"}.isdisjoint(fields.values)
    if is_theirs:
        fields = _flat(fields)
    sizes = read_sizes(fields, *_FIELDS, *([_LAYERS] if is_theirs else []))
    norms = fields.flag("norm_output", default=not is_theirs)
    if not norms and not is_theirs:
        raise fields.refusal(
            "norm_output = false is not supported: what the output head reads is "
            "always normalised; leave the field out if this head does so, too"
        )
    vocab_size = sizes["vocab_size"]
    known = fields.size("draft_vocab_size", default=vocab_size)
    if known > vocab_size:
        raise fields.refusal(
            f"draft_vocab_size = {known} is more than vocab_size = {vocab_size}"
        )
    width = fields.size("target_hidden_size", default=sizes["layer"].hidden_size)
    return Eagle3HeadConfig(
        **sizes,
        draft_vocab_size=known,
        feature_size=3 * width,
        feature_layers=_read_layers(fields, is_theirs=is_theirs),
        has_feature_norms=fields.flag("fc_norm"),
        recycles_normed=norms and is_theirs,
    )


def written_fields(config: Eagle3HeadConfig, dtype: str) -> dict[str, Any]:
    """Returns the `config.json` of a head in the published fields.

    A head that recycles its normalised state has the `config.json` of speculators, the
    only one that can say so; what that says about target and serving is left out.

    Args:
        config: The head's sizes.
        dtype: The dtype of the stored weights.
    """
    layer = config.layer
    fields = common_fields(config, dtype) | {
        "architectures": ["LlamaForCausalLMEagle3"]
    }
    if layer.head_dim * layer.num_heads != layer.hidden_size:
        fields["head_dim"] = layer.head_dim
    own: dict[str, Any] = {"draft_vocab_size": config.draft_vocab_size}
    if config.feature_size != 3 * layer.hidden_size:
        own["target_hidden_size"] = config.feature_size // 3
    if config.has_feature_norms:
        own["fc_norm"] = True
    layers = config.feature_layers
    if not config.recycles_normed:
        if layers is not None:
            outputs = [layer - 1 for layer in layers]
            own["eagle_config"] = _USUAL_FEATURES | {_LAYERS: outputs}
        return fields | own
    if layers is not None:
        own[_LAYERS] = list(layers)
    outer = {name: fields.pop(name) for name in ("torch_dtype", "written_by")}
    theirs = {SPECULATORS: "eagle3", "norm_before_residual": False, "norm_output": True}
    return theirs | own | outer | {_NESTED: fields}


def _read_layers(fields: Fields, *, is_theirs: bool) -> tuple[int, ...] | None:
    """Returns the layers whose inputs are read; `None` for the published ones."""
    features = fields.get("eagle_config") or _USUAL_FEATURES
    layers = features.get(_LAYERS) if isinstance(features, dict) else None
    named = {} if layers is None else {_LAYERS: layers}
    if features != _USUAL_FEATURES | named:
        raise fields.refusal(
            f"eagle_config = {features!r} is not supported: features are read where "
            f"the published heads read them, or at three layers named as {_LAYERS}"
        )
    if layers is None and is_theirs:
        layers = fields.get(_LAYERS)
    if layers is None:
        return None
    if not isinstance(layers, list) or [type(x) for x in layers] != [int] * 3:
        raise fields.refusal(f"{_LAYERS} = {layers!r} must be three layers")
    return tuple(layer + (0 if is_theirs else 1) for layer in layers)


def _flat(fields: Fields) -> Fields:
    """Returns what speculators wrote with the sizes beside the other fields."""
    kind, nested = fields.get(SPECULATORS, "eagle3"), fields.get(_NESTED, {})
    if kind != "eagle3":
        raise fields.refusal(f"{SPECULATORS} = {kind!r} is not supported, only eagle3")
    if not isinstance(nested, dict):
        raise fields.refusal(f"{_NESTED} = {nested!r} must be an object")
    outer = {k: v for k, v in fields.values.items() if k not in _NO_SIZES}
    return Fields(outer | nested, fields.path)


def token_maps(config: Eagle3HeadConfig, offsets: jax.Array | None) -> Tensors:
    """Returns `d2t`, `[W]` int64, and `t2d`, `[V]` bool, by name.

    Args:
        config: The head's sizes.
        offsets: `[W]` integers, how much higher each token is in the target's
            vocabulary; `None` where both vocabularies are the same, which have no maps.
    """
    if offsets is None:
        return {}
    to_target = np.asarray(offsets, np.int64)
    tokens = np.arange(len(to_target)) + to_target
    is_known = np.isin(np.arange(config.vocab_size), tokens)
    return dict(zip(MAPS, (to_target, is_known), strict=True))


def read_offsets(files: Weights, config: Eagle3HeadConfig) -> jax.Array | None:
    """Returns `d2t`, `[W]` int32, or `None` where both vocabularies are the same.

    Neither map is left in `files`.

    Args:
        files: The head's files.
        config: The head's sizes.

    Raises:
        InputError: If `d2t` is missing, does not fit the sizes, or does not name the
            tokens that `t2d` does.
    """
    num_known, vocab_size = config.draft_vocab_size, config.vocab_size
    offsets, is_known = (
        files.read(name) if name in files.names() else None for name in MAPS
    )
    for name in MAPS:
        files.forget(name)
    if offsets is None:
        if num_known == vocab_size:
            return None
        raise InputError(
            f"{files.folder} lacks d2t, which says where the head's {num_known} tokens "
            f"stand among the target's {vocab_size}"
        )
    if offsets.shape != (num_known,) or offsets.dtype.kind not in "iu":
        raise InputError(
            f"{files.folder}: d2t holds {offsets.dtype} {offsets.shape}, no integer "
            f"for each of draft_vocab_size = {num_known} tokens"
        )
    tokens = np.arange(num_known) + offsets.astype(np.int64)
    if tokens[0] < 0 or tokens[-1] >= vocab_size or (np.diff(tokens) <= 0).any():
        raise InputError(
            f"{files.folder}: d2t must lead to ascending tokens of the target, 0 to "
            f"{vocab_size - 1}; it holds offsets, not tokens"
        )
    in_head = np.isin(np.arange(vocab_size), tokens)
    if is_known is not None and not np.array_equal(is_known.astype(bool), in_head):
        raise InputError(
            f"{files.folder}: d2t and t2d name different tokens; the checkpoint is "
            "damaged"
        )
    return None if num_known == vocab_size else jnp.asarray(offsets, jnp.int32)
