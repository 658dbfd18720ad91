"""Pairs with random weights and without a tokenizer, for timing."""

from typing import Any

import jax

from eagle_jax.engine import Pair, PairConfig
from eagle_jax.engine.open import Draft, make_pair
from eagle_jax.heads import HEADS
from eagle_jax.methods import Weights
from eagle_jax.models import transformer
from eagle_jax.models.devices import check_memory, on_cpu
from eagle_jax.models.transformer import (
    Transformer,
    TransformerConfig,
    TransformerParams,
)
from eagle_jax.parallel import PairSharding
from eagle_jax.parallel.placement import draft_shardings
from eagle_jax.prng import make_key


def open_random(config: TransformerConfig, settings: PairConfig) -> Pair:
    """Opens a pair whose weights will be random.

    Args:
        config: The target's sizes.
        settings: The method and its settings. The dtype "auto" is float32 on CPUs and
            bfloat16 elsewhere; weights are not quantized. It must not draft with a
            small model.

    Raises:
        InputError: If memory cannot hold the weights.
    """
    method, dtype = settings.method_row, settings.dtype
    if dtype == "auto":
        dtype = "float32" if on_cpu() else "bfloat16"
    check_memory(config, dtype)

    def make_target(shardings: Any) -> TransformerParams:
        params = transformer.init_params(make_key(0), config, dtype)
        return jax.device_put(params, shardings)

    draft = method.weights and _random_draft(config, dtype, method.weights)
    target = Transformer(config=config, dtype=dtype)
    return make_pair(target, settings, draft, read_target=make_target)


def _random_draft(target: TransformerConfig, dtype: str, weights: Weights) -> Draft:
    """Returns heads, as many as are published, with layers of the target's."""
    kind = HEADS[weights.kinds[-1]]  # Of several, the one that reads any target.
    sizes = kind.default_config(target, kind.Settings(), target.max_positions)
    model = kind(config=sizes, dtype=dtype)

    def make_heads(
        target_params: TransformerParams, sharding: PairSharding | None
    ) -> Any:
        shardings = draft_shardings(sharding, model.init, sizes)
        params = jax.device_put(model.init(make_key(1), dtype), shardings)
        return model.join(params, target_params)

    return Draft(model=model, read=make_heads)
