"""The peaks of the machine at hand, measured where none is published."""

import math
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from eagle_jax.benchmarks.peaks import Chip, Machine

_READ_BYTES = 512 * 2**20
_SIDE = 1024


def time_reads() -> Callable[[], float]:
    """Returns a function that times reading 512 MiB once, in seconds."""
    values = jnp.ones(_READ_BYTES // 4, jnp.float32)

    @jax.jit
    def read(values: jax.Array) -> jax.Array:
        return jnp.max(values)

    def run() -> float:
        started = time.perf_counter()
        read(values).block_until_ready()
        return time.perf_counter() - started

    return run


def time_products(dtype: str) -> Callable[[], float]:
    """Returns a function that times a product of two `[1024, 1024]`, in seconds.

    Args:
        dtype: The type of both. Static.
    """
    matrix = jnp.ones((_SIDE, _SIDE), dtype)

    @jax.jit
    def multiply(matrix: jax.Array) -> jax.Array:
        return matrix @ matrix

    def run() -> float:
        started = time.perf_counter()
        multiply(matrix).block_until_ready()
        return time.perf_counter() - started

    return run


def own_machine(read_seconds: float, product_seconds: float) -> Machine:
    """Returns the machine at hand by what `time_reads` and `time_products` took."""
    return Machine(
        chip=Chip(
            name="this machine",
            flops=2 * _SIDE**3 / product_seconds,
            bandwidth=_READ_BYTES / read_seconds,
            link=math.inf,
            memory_gib=math.inf,
            near=0.0,
            counts=(1,),
            source="measured in the same run",
        )
    )
