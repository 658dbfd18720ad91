"""Pairs with random weights and without a tokenizer, for timing."""

import re
from typing import Any

import jax

from eagle_jax import checkpoints
from eagle_jax.errors import InputError
from eagle_jax.generation.config import GenerateConfig
from eagle_jax.generation.devices import on_cpu
from eagle_jax.generation.memory import check_memory
from eagle_jax.generation.pairs import DraftSource, PairSource
from eagle_jax.generation.placement import draft_shardings
from eagle_jax.heads import HEADS
from eagle_jax.methods import SMALL_MODEL, Weights
from eagle_jax.models import transformer
from eagle_jax.models.layers import LayerConfig
from eagle_jax.models.quantized import quantize_layers
from eagle_jax.models.rope import RopeConfig
from eagle_jax.models.transformer import TransformerConfig, TransformerParams
from eagle_jax.parallel import PairSharding

RANDOM_SIZES = {
    "tiny": "hidden=64,layers=2,heads=4,intermediate=172,vocabulary=258",
    "50m": "hidden=512,layers=8,heads=8,intermediate=1408,vocabulary=32000",
    "llama2-7b": "hidden=4096,layers=32,heads=32,intermediate=11008,vocabulary=32000",
    "llama2-13b": "hidden=5120,layers=40,heads=40,intermediate=13824,vocabulary=32000",
    "llama3-8b": "hidden=4096,layers=32,heads=32,kv_heads=8,intermediate=14336,"
    "vocabulary=128256",
}
"""The sizes of random pairs by name."""

_REQUIRED_SIZES = ("hidden", "layers", "heads", "vocabulary")


def open_random(sizes: str, settings: GenerateConfig) -> PairSource:
    """Opens a pair whose weights will be random.

    Args:
        sizes: The sizes: a name of `RANDOM_SIZES`, or `hidden=512,layers=8,...`.
        settings: The method and its settings. The dtype "auto" is float32 on CPUs and
            bfloat16 elsewhere; there is no random small model, and a draft vocabulary
            is a file or nothing.

    Raises:
        InputError: If a size is missing, unknown or impossible, or the draft vocabulary
            cannot be used.
    """
    decoding, method = settings.decoding, settings.method
    if method.weights is SMALL_MODEL:
        raise InputError(
            "`random` makes heads, no small model; give `target` FOLDER and `draft` "
            "FOLDER"
        )
    config = _random_config(sizes)
    dtype, bits = decoding.dtype, decoding.bits
    if dtype == "auto":
        dtype = "float32" if on_cpu() else "bfloat16"
    checkpoints.check_bits(config, bits)
    check_memory(config, dtype, bits)
    draft = method.weights and _random_draft(config, dtype, method.weights)

    def make_target(shardings: Any) -> TransformerParams:
        make = jax.jit(
            _random_target, static_argnums=(1, 2, 3), out_shardings=shardings
        )
        return make(jax.random.key(0), config, dtype, bits)

    return PairSource(
        config=config,
        dtype=dtype,
        method=method,
        draft=draft,
        read_target=make_target,
        read_tokenizer=lambda: None,
        stop_tokens=(),
        bits=bits,
    ).with_settings(settings)


def _random_draft(
    target: TransformerConfig, dtype: str, weights: Weights
) -> DraftSource:
    """Returns heads, as many as are published, with layers of the target's."""
    # Of a family with several kinds, the one that reads any target.
    kinds = [head for head in HEADS.values() if head.family == weights.kind]
    head = kinds[-1]
    sizes = head.new(target, head.settings(), target.max_positions)
    model = head.model(sizes, dtype)

    def make_heads(
        target_params: TransformerParams, sharding: PairSharding | None
    ) -> Any:
        shardings = draft_shardings(sharding, head.init, sizes)
        make = jax.jit(head.init, static_argnums=(1, 2), out_shardings=shardings)
        return model.join(make(jax.random.key(1), sizes, dtype), target_params)

    return DraftSource(model=model, read=make_heads)


def _random_target(
    key: jax.Array, config: TransformerConfig, dtype: str, bits: int | None
) -> TransformerParams:
    params = transformer.init_params(key, config, dtype)
    return params if bits is None else quantize_layers(params, bits)


def _random_config(sizes: str) -> TransformerConfig:
    text = RANDOM_SIZES.get(sizes, sizes)
    pairs = re.findall(r"(\w+)=(\d{1,9})", text)  # Fits into int32.
    values = {name: int(value) for name, value in pairs}
    known = (*_REQUIRED_SIZES, "kv_heads", "intermediate")
    well_formed = ",".join(f"{name}={value}" for name, value in pairs) == text
    is_complete = set(_REQUIRED_SIZES) <= set(values) <= set(known)
    if not well_formed or not is_complete or 0 in values.values():
        raise InputError(
            f"`random` {sizes[:100]!r} must be one of {', '.join(RANDOM_SIZES)} or "
            "sizes of up to nine digits like hidden=512,layers=8,heads=8,"
            f"vocabulary=32000; known are {', '.join(known)}"
        )
    hidden, heads = values["hidden"], values["heads"]
    kv_heads = values.get("kv_heads", heads)
    if hidden % (2 * heads) or heads % kv_heads:
        raise InputError(
            f"`random` {sizes!r}: hidden must be an even multiple of heads, and heads "
            "a multiple of kv_heads"
        )
    layer = LayerConfig(
        hidden_size=hidden,
        intermediate_size=values.get("intermediate", 4 * hidden),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=10000.0),
    )
    return TransformerConfig(
        layer=layer,
        num_layers=values["layers"],
        vocab_size=values["vocabulary"],
        max_positions=4096,
    )
