"""Checks that a run can be in memory at all, before anything large is made.

Only arrays that are certain to be there at once are counted, and they are compared with
all memory that there is: no sizes are refused that would run.
"""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp

from eagle_jax.config import TreeConfig
from eagle_jax.decoding.growth import bucket_sizes
from eagle_jax.drafting import find_tree_drafter
from eagle_jax.errors import InputError
from eagle_jax.generation.devices import on_cpu
from eagle_jax.interface import Drafter
from eagle_jax.models import transformer
from eagle_jax.models.quantized import map_matrices, num_bytes
from eagle_jax.models.transformer import Transformer, TransformerConfig
from eagle_jax.tree.structure import empty_candidates

_MEMINFO = Path("/proc/meminfo")


def check_depth(tree: TreeConfig, target: TransformerConfig) -> None:
    """Refuses levels that no text of a target has room for.

    A dynamic tree drafts no more levels than it has nodes, so a depth like this is a
    number that was mistaken for another.

    Args:
        tree: The tree's settings.
        target: The target's sizes.

    Raises:
        InputError: If there are as many levels as positions.
    """
    if tree.depth >= target.max_positions:
        raise InputError(
            f"depth = {tree.depth} drafts further than the target's "
            f"{target.max_positions} positions reach (max_position_embeddings); lower "
            "depth"
        )


def check_weights(target: TransformerConfig, dtype: str, bits: int | None) -> None:
    """Refuses a target whose weights alone are more than the memory.

    Args:
        target: The target's sizes.
        dtype: The type of the weights; not "auto".
        bits: The bits of quantized matrices, `None` where there are none.

    Raises:
        InputError: If the target cannot fit.
    """
    _check_memory(
        _weight_bytes(target, dtype, bits),
        f"a model with hidden = {target.layer.hidden_size}, layers = "
        f"{target.num_layers} and vocabulary = {target.vocab_size} in {dtype}",
        "give a smaller one, or fewer bits with `dtype` or `quantization`",
    )


def check_rounds(
    target: TransformerConfig,
    dtype: str,
    bits: int | None,
    drafter: Drafter | None,
    *,
    batch_size: int,
    num_slots: int,
) -> None:
    """Refuses rounds that cannot be in memory, beside the target's weights.

    The caches are counted and, as they follow one another, the largest of the
    candidates of an expansion and the mask and the logits of a verification.

    Args:
        target: The target's sizes.
        dtype: The type of weights and caches; not "auto".
        bits: The bits of quantized matrices, `None` where there are none.
        drafter: The drafter; `None` for plain decoding.
        batch_size: The number of rows, `B`.
        num_slots: The number of cache slots per row, `S`.

    Raises:
        InputError: If the rounds cannot fit.
    """
    num_nodes = getattr(drafter, "num_nodes", 1)
    row = num_nodes * max(num_nodes, 4 * target.vocab_size)
    nodes = f"num_nodes = {num_nodes}"
    tree = getattr(find_tree_drafter(drafter), "tree", None)
    if isinstance(tree, TreeConfig) and tree.levels:
        one = num_bytes(jax.eval_shape(lambda: empty_candidates(1, 1)))
        row = max(row, (tree.width + (tree.levels - 1) * tree.width**2) * one)
        nodes += f", width = {tree.width}"
    layer = Transformer(config=_one_layer(target), dtype=dtype)
    cache = jax.eval_shape(lambda: layer.init_cache(1, num_slots))
    row += target.num_layers * num_bytes(cache.layers)
    if drafter is not None:
        row += num_bytes(jax.eval_shape(lambda: drafter.init_state(1, num_slots)))
    _check_memory(
        _weight_bytes(target, dtype, bits) + batch_size * row,
        f"{num_slots} cache slots, batch_size = {batch_size}, {nodes}",
    )


def check_training(
    target: TransformerConfig, dtype: str, *, batch_size: int, row_length: int
) -> None:
    """Refuses batches whose hidden states cannot be in memory beside the weights.

    Args:
        target: The sizes of the model that runs.
        dtype: The type of its weights; not "auto".
        batch_size: The number of rows, `B`.
        row_length: The number of tokens of a row, `T`.

    Raises:
        InputError: If the batches cannot fit.
    """
    hidden = jnp.dtype(dtype).itemsize * target.layer.hidden_size
    _check_memory(
        _weight_bytes(target, dtype, None) + batch_size * row_length * hidden,
        f"batch_size = {batch_size} rows of row_length = {row_length} tokens",
    )


def first_slots(max_length: int, drafter: Drafter | None) -> int:
    """Returns the least number of slots, `S`, of the cache that a text begins with.

    Args:
        max_length: The largest number of tokens of prompt and output together.
        drafter: The drafter; `None` for plain decoding.
    """
    depth = 0 if drafter is None else drafter.depth
    return bucket_sizes(max_length, prompt=1, depth=depth)[0]


def _weight_bytes(target: TransformerConfig, dtype: str, bits: int | None) -> int:
    shapes = jax.eval_shape(
        lambda: transformer.init_params(jax.random.key(0), _one_layer(target), dtype)
    )
    if bits is not None:

        def packed(matrix: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((matrix.size * bits // 8,), jnp.int8)

        shapes = map_matrices(packed, shapes)
    return num_bytes(shapes) + (target.num_layers - 1) * num_bytes(shapes.layers)


def _one_layer(target: TransformerConfig) -> TransformerConfig:
    return dataclasses.replace(target, num_layers=1)


def _check_memory(size: int, what: str, advice: str = "lower one of them") -> None:
    memory = _memory()
    if memory is not None and size > memory:
        raise InputError(
            f"{what}: a run takes at least {size / 2**30:,.1f} GiB, but there are "
            f"{memory / 2**30:,.1f} GiB of memory; {advice}"
        )


def _memory() -> int | None:
    """Returns the bytes of all devices together, `None` where they are not known."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] * jax.device_count()
    if not on_cpu() or not _MEMINFO.is_file():
        return None
    kibibytes = sum(
        int(line.split()[1])
        for line in _MEMINFO.read_text().splitlines()
        if line.startswith(("MemTotal:", "SwapTotal:"))
    )
    return 1024 * kibibytes * jax.process_count()
