"""The devices at hand: which there are, and what fits into their memory.

What cannot be in memory is refused before anything large is made. Weights and caches
are counted, and they are compared with all memory that there is: no sizes are refused
that would run.
"""

import dataclasses
import functools
import glob
from pathlib import Path
from typing import Any, NoReturn

import jax
from jax.extend import backend

from eagle_jax.errors import InputError
from eagle_jax.interface import Drafter
from eagle_jax.models import transformer
from eagle_jax.models.quantized import num_bytes, quantize_layers
from eagle_jax.models.transformer import Transformer, TransformerConfig
from eagle_jax.prng import make_key

_MEMINFO = Path("/proc/meminfo")

_TPU_FILES = ("/dev/accel*", "/dev/vfio/[0-9]*")
"""Files that drivers of TPU chips make; other devices may have such files, too."""


def leave_out_tpus() -> None:
    """Keeps JAX from loading libtpu where there is no TPU; to be called before it runs.

    Without a TPU libtpu prints warnings and reports of its own. Nothing changes where
    platforms are chosen: by the user in `JAX_PLATFORMS`, or by JAX, which looks for the
    chips when it is imported.
    """
    is_chosen = jax.config.values["jax_platforms"]
    if is_chosen or any(glob.glob(files) for files in _TPU_FILES):
        return
    # As if libtpu were not installed: other devices are found as ever.
    backend.register_backend_factory("tpu", _find_no_tpu, fail_quietly=True)


def _find_no_tpu() -> NoReturn:
    raise RuntimeError("this machine has no TPU")


def on_cpu() -> bool:
    """Returns whether the default device is a CPU, on which bfloat16 is slow."""
    return jax.devices()[0].platform == "cpu"


def check_memory(
    target: TransformerConfig,
    dtype: str,
    bits: int | None = None,
    drafter: Drafter | None = None,
    *,
    batch_size: int = 0,
    num_slots: int = 1,
) -> None:
    """Refuses a target, or the caches of a batch beside it, that memory cannot hold.

    Args:
        target: The target's sizes.
        dtype: The type of weights and caches; not "auto".
        bits: The bits of quantized matrices, `None` where there are none.
        drafter: The drafter; `None` for plain decoding.
        batch_size: The number of rows, `B`; 0 for the target's weights alone.
        num_slots: The number of cache slots per row, `S`.
    """
    weights, row = _num_bytes(target, dtype, bits, drafter, num_slots)
    size, memory = weights + batch_size * row, _memory()
    if memory is not None and size > memory:
        raise InputError(
            f"hidden = {target.layer.hidden_size}, layers = {target.num_layers}, "
            f"vocabulary = {target.vocab_size} in {dtype}, batch_size = {batch_size}, "
            f"{num_slots} cache slots: a run takes at least {size / 2**30:,.1f} GiB, "
            f"but there are {memory / 2**30:,.1f} GiB of memory; lower one of them"
        )


# Every call of `Pair.generate` asks, and tracing takes some milliseconds.
@functools.lru_cache(maxsize=16)
def _num_bytes(
    target: TransformerConfig,
    dtype: str,
    bits: int | None,
    drafter: Drafter | None,
    num_slots: int,
) -> tuple[int, int]:
    """Returns the bytes of the target's weights and of one row's caches."""
    one_layer = dataclasses.replace(target, num_layers=1)
    layer = Transformer(config=one_layer, dtype=dtype)

    def make() -> tuple[Any, Any, Any]:
        params = transformer.init_params(make_key(0), one_layer, dtype)
        params = params if bits is None else quantize_layers(params, bits)
        drafted = () if drafter is None else drafter.init_state(1, num_slots)
        return params, layer.init_cache(1, num_slots), drafted

    params, cache, drafted = jax.eval_shape(make)
    other_layers = target.num_layers - 1
    weights = num_bytes(params) + other_layers * num_bytes(params.layers)
    return weights, num_bytes((cache, drafted)) + other_layers * num_bytes(cache.layers)


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
