"""EAGLE-3 heads as they are stored: read, and written in the published layout.

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

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Sharding

from eagle_jax.checkpoints import names
from eagle_jax.checkpoints.export import plain_head_fields
from eagle_jax.checkpoints.export_files import host_tensors, write_export
from eagle_jax.checkpoints.heads import check_eagle3_pair, load_weights, with_table
from eagle_jax.checkpoints.hf_config import SPECULATORS, check_head_keys, head_sizes
from eagle_jax.checkpoints.hf_fields import Fields
from eagle_jax.checkpoints.hub import refuse_other_heads
from eagle_jax.checkpoints.load import shapes_of
from eagle_jax.checkpoints.token_maps import read_offsets, token_maps
from eagle_jax.checkpoints.weights import Weights, open_weights
from eagle_jax.errors import InputError
from eagle_jax.models import eagle3_head
from eagle_jax.models.eagle3_head import Eagle3HeadConfig, Eagle3HeadParams
from eagle_jax.models.transformer import TransformerConfig, TransformerParams

_FIELDS = (
    *("draft_vocab_size", "target_hidden_size", "eagle_config"),
    *("fc_norm", "norm_output"),
)
# The one `eagle_config` that asks for what we do anyway; others name the layers, too.
_USUAL_FEATURES = {"use_aux_hidden_state": True}
_LAYERS = "eagle_aux_hidden_state_layer_ids"
_NESTED = "transformer_layer_config"
# What speculators says of itself, of the target and of serving.
_NO_SIZES = {
    *(SPECULATORS, "speculators_config", "speculators_version"),
    *("architectures", "model_type", _NESTED),
}


def eagle3_config(folder: Path) -> Eagle3HeadConfig:
    """Reads the sizes of an EAGLE-3 head; nothing is derived from a target.

    Args:
        folder: The head's folder, which holds `config.json`. Its `num_hidden_layers`
            is not read: published ones name the target's.

    Returns:
        The head's sizes.

    Raises:
        InputError: If a field is missing or asks for something that is not
            implemented.
    """
    fields = Fields.read(folder)
    refuse_other_heads(folder)
    is_theirs = not {SPECULATORS, "speculators_config"}.isdisjoint(fields.values)
    if is_theirs:
        fields = _flat(fields)
    check_head_keys(fields, *_FIELDS, *([_LAYERS] if is_theirs else []))
    norms = fields.flag("norm_output", default=not is_theirs)
    if not norms and not is_theirs:
        raise fields.refusal(
            "norm_output = false is not supported: what the output head reads is "
            "always normalised; leave the field out if this head does so, too"
        )
    vocab_size = fields.size("vocab_size")
    known = fields.size("draft_vocab_size", default=vocab_size)
    if known > vocab_size:
        raise fields.refusal(
            f"draft_vocab_size = {known} is more than vocab_size = {vocab_size}"
        )
    sizes = head_sizes(fields)
    width = fields.size("target_hidden_size", default=sizes["layer"].hidden_size)
    return Eagle3HeadConfig(
        **sizes,
        draft_vocab_size=known,
        feature_size=3 * width,
        feature_layers=_read_layers(fields, is_theirs=is_theirs),
        has_feature_norms=fields.flag("fc_norm"),
        recycles_normed=norms and is_theirs,
    )


def load_eagle3_head(
    folder: Path,
    target: TransformerConfig,
    target_params: TransformerParams,
    dtype: str | None = "float32",
    shardings: Any = None,
) -> tuple[Eagle3HeadConfig, Eagle3HeadParams]:
    """Loads an EAGLE-3 head.

    A head's own copy of the target's embedding table is dropped where it is equal.

    Args:
        folder: The head's folder, from `resolve`.
        target: The target's sizes.
        target_params: The target's weights.
        dtype: The dtype of the weights; `None` for the one they are stored in.
        shardings: A `jax.sharding.Sharding` for all weights, or one for each in an
            `Eagle3HeadParams`; `None` for the default device. An embedding table for
            which it names none is sharded as the target's.

    Returns:
        The head's sizes and weights.

    Raises:
        InputError: If the head cannot be used, or does not fit the target.
    """
    config = eagle3_config(folder)
    check_eagle3_pair(target, config)
    files = open_weights(folder)
    width = config.layer.hidden_size
    table = names.EAGLE3_HEAD["embedding"]
    if table not in files.names() and width != target.layer.hidden_size:
        raise InputError(
            f"{folder} lacks {table}: the target's table is "
            f"{target.layer.hidden_size} wide and does not fit a head of {width}"
        )
    embedding = target_params.embedding
    return config, _load(files, config, dtype, shardings, embedding)


def read_eagle3_head(
    folder: Path, dtype: str | None = None
) -> tuple[Eagle3HeadConfig, Eagle3HeadParams]:
    """Loads an EAGLE-3 head as it is stored, without its target.

    Args:
        folder: The head's folder, from `resolve`.
        dtype: The dtype of the weights; `None` for the one they are stored in.

    Returns:
        The head's sizes and weights, with the embedding table if it has one.

    Raises:
        InputError: If the head cannot be used.
    """
    config = eagle3_config(folder)
    return config, _load(open_weights(folder), config, dtype)


def export_eagle3(
    folder: Path,
    config: Eagle3HeadConfig,
    params: Eagle3HeadParams,
    *,
    dtype: str = "float32",
    prefix: str = "midlayer",
    embedding: jax.Array | None = None,
    with_bin: bool | None = None,
    also: Callable[[Path], object] | None = None,
    overwrite: bool = False,
) -> None:
    """Writes an EAGLE-3 head in the layout of the published ones, and reads it back.

    The same weights give the same bytes, whatever the folder's name. A head that
    recycles its normalised state has the `config.json` of speculators, the only one
    that can say so; what that says about target and serving is left out.

    Args:
        folder: The folder to write: `config.json`, `model.safetensors` and
            `pytorch_model.bin`.
        config: The head's sizes.
        params: The head's weights.
        dtype: The dtype of the files: "float32", "bfloat16" or "float16".
        prefix: What the names of its layer begin with: "midlayer" in published heads,
            "layers.0" in those of speculators.
        embedding: The target's embedding table, `[V, E]`, written where the head has
            none of its own; `None` leaves it out then, as published heads do.
        with_bin: Whether to write `pytorch_model.bin`, which needs torch; `None`
            writes it where torch is installed.
        also: A function that is called with the unfinished folder, to add a
            calibration.
        overwrite: Whether to replace an earlier export.

    Raises:
        InputError: If the layout cannot express the head, a weight does not fit into
            `dtype`, or the folder cannot be written.
    """
    table = names.EAGLE3_HEADS.get(prefix)
    if table is None:
        known = " or ".join(names.EAGLE3_HEADS)
        raise InputError(f"prefix = {prefix!r} must be {known}")
    if params.embedding is None and embedding is not None:
        params = dataclasses.replace(params, embedding=embedding)
    maps = token_maps(config, params.offsets)
    shapes = _weights(shapes_of(eagle3_head.init_params, config))
    if params.embedding is not None:
        shapes = with_table(shapes, config)
    write_export(
        folder,
        eagle3_fields(config, dtype),
        host_tensors(_weights(params), shapes, table, dtype) | maps,
        config,
        eagle3_config,
        with_pickle=with_bin,
        also=also,
        overwrite=overwrite,
    )


def eagle3_fields(config: Eagle3HeadConfig, dtype: str) -> dict[str, Any]:
    """Returns the `config.json` of an EAGLE-3 head in the published fields.

    Args:
        config: The head's sizes.
        dtype: The dtype of the stored weights.
    """
    layer = config.layer
    fields = plain_head_fields(config, dtype) | {
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


def eagle3_tensors(
    config: Eagle3HeadConfig, params: Eagle3HeadParams
) -> dict[str, Any]:
    """Returns weights and maps by the names that they have in published heads.

    Args:
        config: The head's sizes.
        params: The head's weights, in any dtype.

    Raises:
        InputError: If the maps do not fit the sizes.
    """
    maps = token_maps(config, params.offsets)
    return names.by_name(_weights(params), names.EAGLE3_HEAD) | maps


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


def _load(
    files: Weights,
    config: Eagle3HeadConfig,
    dtype: str | None,
    shardings: Any = None,
    target_table: jax.Array | None = None,
) -> Eagle3HeadParams:
    """Loads maps and weights; for the arguments see `heads.load_weights`."""
    offsets = read_offsets(files, config)
    if shardings is not None and offsets is not None:
        is_one = isinstance(shardings, Sharding)
        offsets = jax.device_put(offsets, shardings if is_one else shardings.offsets)
    if not isinstance(shardings, Sharding | None):
        shardings = _weights(shardings)
    stored = files.names()
    is_official = any(name.startswith("midlayer.") for name in stored)
    table = names.EAGLE3_HEADS["midlayer" if is_official else "layers.0"]
    if table["output_head"] not in stored:
        raise InputError(
            f"{files.folder} lacks {table['output_head']}: an EAGLE-3 head predicts "
            "with an output head of its own"
        )
    shapes = _weights(shapes_of(eagle3_head.init_params, config))
    params = load_weights(files, table, shapes, config, dtype, shardings, target_table)
    return dataclasses.replace(params, offsets=offsets)


def _weights(params: Any) -> Any:
    """Returns an `Eagle3HeadParams` of weights alone: the map holds no weights."""
    return dataclasses.replace(params, offsets=None)
