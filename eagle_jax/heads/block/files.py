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
from collections.abc import Mapping
from typing import Any

from eagle_jax.checkpoints.hf_fields import MOST_POSITIONS, Fields
from eagle_jax.checkpoints.names import LAYER
from eagle_jax.errors import InputError
from eagle_jax.heads.block.model import BlockHeadConfig, DSparkHeadConfig
from eagle_jax.heads.hf_config import common_fields, read_sizes

NAMES = {
    "fc": "fc.weight",
    "feature_norm": "hidden_norm.weight",
    "norm": "norm.weight",
    "markov.before": "markov_head.markov_w1.weight",
    "markov.after": "markov_head.markov_w2.weight",
    "confidence.linear": "confidence_head.proj.weight",
    "confidence.linear_bias": "confidence_head.proj.bias",
    **{f"layers.{{}}.{ours}": f"layers.{{}}.{hf}" for ours, hf in LAYER.items()},
}
"""The tensor names by path in `BlockHeadParams`."""

BORROWED = {
    "target.embedding": "embed_tokens.weight",
    "target.output_head": "lm_head.weight",
}
"""The target's tables, of which DSpark's files hold copies that nobody trained."""

ARCHITECTURES: dict[type, str] = {
    BlockHeadConfig: "DFlashDraftModel",
    DSparkHeadConfig: "Qwen3DSparkModel",
}
"""The architecture of either kind, by the class of its sizes."""

_NESTED, _LAYERS, _MASK = "dflash_config", "target_layer_ids", "mask_token_id"
_FULL, _SLIDING = "full_attention", "sliding_attention"
_FIELDS = [
    "block_size",
    "num_target_layers",
    "dflash_config",
    "target_layer_ids",
    "mask_token_id",
    "is_causal",
    "causal_head",
    "num_anchors",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "use_sliding_window",
    "attention_bias",
    "max_window_layers",
    "target_hidden_size",
    "sample_from_anchor",
]
# What other block heads do, at which value nothing is done.
_OTHERS = {
    "conv_kernel_size": 0,
    "selector_rank": 0,
    "selector_top_k": 0,
    "output_multiplier": 1.0,
    "input_embedding_scale": 1.0,
    "final_logit_softcapping": None,
}
_MOST_LAYERS, _MOST_ROWS = 64, 256


def read_fields(
    fields: Fields,
    shapes: Mapping[str, tuple[int, ...]],
    kind: type[BlockHeadConfig],
) -> BlockHeadConfig:
    """Reads the sizes of a head.

    Args:
        fields: The fields of its `config.json`.
        shapes: The shapes of its tensors by name.
        kind: The class of its sizes.

    Raises:
        InputError: If a field is missing or asks for something that is not
            implemented.
    """
    nested = fields.get(_NESTED, {})
    if not isinstance(nested, dict):
        raise fields.refusal(f"{_NESTED} = {nested!r} must be an object")
    outer = {name: x for name, x in fields.values.items() if name != _NESTED}
    fields = Fields(outer | nested, fields.path)
    for name, neutral in _OTHERS.items():
        if fields.get(name, neutral) != neutral:
            raise fields.refusal(
                f"{name} = {fields.get(name)!r} is not supported: known are heads of "
                "DFlash and DSpark, not those of DFlash-2"
            )
    name, is_next = "sample_from_anchor", kind is DSparkHeadConfig
    if fields.flag(name, default=is_next) != is_next:
        raise fields.refusal(f"{name} = {not is_next} contradicts its architecture")
    markov = fields.get("markov_head_type", "vanilla")
    rank = fields.size("markov_rank", default=0, least=0)
    if rank and markov != "vanilla":
        raise fields.refusal(
            f"markov_head_type = {markov!r} is not supported, only 'vanilla'"
        )
    has_norms = "layers.0.self_attn.q_norm.weight" in shapes
    sizes = read_sizes(fields, *_FIELDS, *_OTHERS)
    sizes["layer"] = dataclasses.replace(sizes["layer"], qk_norm=has_norms)
    window = _read_window(fields)
    return kind(
        **sizes,
        block_size=fields.size("block_size", least=2, most=_MOST_ROWS),
        mask_token=fields.size(_MASK, least=0, most=sizes["vocab_size"] - 1),
        feature_layers=_read_layers(fields),
        num_target_layers=fields.size("num_target_layers"),
        num_layers=fields.size("num_hidden_layers", most=_MOST_LAYERS),
        sliding_window=window,
        is_causal=fields.flag(
            "causal_head", default=fields.flag("is_causal", default=window is not None)
        ),
        markov_rank=rank,
        has_confidence=fields.flag("enable_confidence_head"),
    )


def written_fields(config: BlockHeadConfig, dtype: str) -> dict[str, Any]:
    """Returns the `config.json` of a head in the published fields.

    Args:
        config: The head's sizes.
        dtype: The dtype of the stored weights.
    """
    layer, count = config.layer, config.num_layers
    own: dict[str, Any] = {
        _LAYERS: [number - 1 for number in config.feature_layers],
        _MASK: config.mask_token,
    }
    fields = common_fields(config, dtype) | {
        "architectures": [ARCHITECTURES[type(config)]],
        "model_type": "qwen3" if layer.qk_norm else "llama",
        "head_dim": layer.head_dim,
        "num_hidden_layers": count,
        "num_target_layers": config.num_target_layers,
        "block_size": config.block_size,
        "is_causal": config.is_causal,
        "layer_types": [_SLIDING if config.sliding_window else _FULL] * count,
    }
    if config.sliding_window is not None:
        fields |= {"sliding_window": config.sliding_window, "use_sliding_window": True}
    if not config.predicts_next:
        return fields | {_NESTED: own}
    return (
        fields
        | own
        | {
            "markov_rank": config.markov_rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": config.has_confidence,
            "confidence_head_with_markov": True,
        }
    )


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


def _read_window(fields: Fields) -> int | None:
    """Returns the sliding window of all layers; `None` for none."""
    types = fields.get("layer_types", [_FULL])
    if not isinstance(types, list) or any(one != types[0] for one in types):
        raise fields.refusal(f"layer_types = {types!r} must name one kind of layer")
    if _SLIDING not in types:
        return None
    return fields.size("sliding_window", most=MOST_POSITIONS)


def check_layers(config: BlockHeadConfig, num_layers: int) -> None:
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
