"""Refuses what cannot be in memory, before anything large is made.

Only arrays that are certain to be there at once are counted, and they are compared with
all memory that there is: no sizes are refused that would run.
"""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp

from eagle_jax.config import TreeConfig
from eagle_jax.drafting import find_tree_drafter
from eagle_jax.errors import InputError
from eagle_jax.generation.devices import on_cpu
from eagle_jax.interface import Drafter
from eagle_jax.models import transformer
from eagle_jax.models.quantized import num_bytes, quantize_layers
from eagle_jax.models.transformer import (
    Transformer,
    TransformerConfig,
    TransformerParams,
)
from eagle_jax.tree.structure import empty_candidates

_MEMINFO = Path("/proc/meminfo")


def check_memory(
    target: TransformerConfig,
    dtype: str,
    bits: int | None = None,
    drafter: Drafter | None = None,
    *,
    batch_size: int = 0,
    num_slots: int = 1,
) -> None:
    """Refuses a target, or rounds of a batch, that cannot be in memory.

    Weights and caches are counted and, as they follow one another, the largest of the
    candidates of an expansion and the mask and the logits of a verification.

    Args:
        target: The target's sizes.
        dtype: The type of weights and caches; not "auto".
        bits: The bits of quantized matrices, `None` where there are none.
        drafter: The drafter; `None` for plain decoding.
        batch_size: The number of rows, `B`; 0 for the target's weights alone.
        num_slots: The number of cache slots per row, `S`.
    """
    what, row = "", 0
    if batch_size:
        num_nodes = getattr(drafter, "num_nodes", 1)
        what = f", batch_size = {batch_size}, {num_slots} cache slots, "
        what += f"num_nodes = {num_nodes}"
        row = num_nodes * max(num_nodes, 4 * target.vocab_size)
        tree = getattr(find_tree_drafter(drafter), "tree", None)
        if isinstance(tree, TreeConfig) and tree.levels:
            one = num_bytes(jax.eval_shape(lambda: empty_candidates(1, 1)))
            row = max(row, (tree.width + (tree.levels - 1) * tree.width**2) * one)
            what += f", width = {tree.width}"
        layer = Transformer(config=_one_layer(target), dtype=dtype)
        cache = jax.eval_shape(lambda: layer.init_cache(1, num_slots))
        row += target.num_layers * num_bytes(cache.layers)
        if drafter is not None:
            row += num_bytes(jax.eval_shape(lambda: drafter.init_state(1, num_slots)))
    _check(target, dtype, bits, batch_size * row, what)


def check_training(
    target: TransformerConfig, dtype: str, *, batch_size: int, row_length: int
) -> None:
    """Refuses batches whose hidden states cannot be in memory beside the weights.

    Args:
        target: The sizes of the model that runs.
        dtype: The type of its weights; not "auto".
        batch_size: The number of rows, `B`.
        row_length: The number of tokens of a row, `T`.
    """
    hidden = jnp.dtype(dtype).itemsize * target.layer.hidden_size
    what = f", batch_size = {batch_size} rows of row_length = {row_length} tokens"
    _check(target, dtype, None, batch_size * row_length * hidden, what)


def _weight_bytes(target: TransformerConfig, dtype: str, bits: int | None) -> int:
    def make() -> TransformerParams:
        one = _one_layer(target)
        params = transformer.init_params(jax.random.key(0), one, dtype)
        return params if bits is None else quantize_layers(params, bits)

    shapes = jax.eval_shape(make)
    return num_bytes(shapes) + (target.num_layers - 1) * num_bytes(shapes.layers)


def _one_layer(target: TransformerConfig) -> TransformerConfig:
    return dataclasses.replace(target, num_layers=1)


def _check(
    target: TransformerConfig, dtype: str, bits: int | None, others: int, what: str
) -> None:
    """Compares weights and other arrays, in bytes, with the memory."""
    size, memory = _weight_bytes(target, dtype, bits) + others, _memory()
    if memory is not None and size > memory:
        raise InputError(
            f"hidden = {target.layer.hidden_size}, layers = {target.num_layers}, "
            f"vocabulary = {target.vocab_size} in {dtype}{what}: a run takes at least "
            f"{size / 2**30:,.1f} GiB, but there are {memory / 2**30:,.1f} GiB of "
            "memory; lower one of them"
        )


def _memory() -> int | None:
    """Returns the bytes of all devices together, `None` where they are not known."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] * jax.device_count()
    if not on_cpu() or not _MEMINFO.is_file():
        return None
    told = (line.split() for line in _MEMINFO.read_text().splitlines())
    counted = ("MemTotal:", "SwapTotal:")
    sizes = (int(size) for name, size, *_ in told if name in counted)
    return 1024 * sum(sizes) * jax.process_count()
