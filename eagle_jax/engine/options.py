"""The options that XLA compiles a program with."""

import functools

import jax
import jax.numpy as jnp

_FEW_ROWS = range(3, 64)
"""The small numbers of rows that Eigen multiplies sooner."""

_MANY_ROWS = 2048
"""The least of the large numbers of rows that it multiplies sooner."""


def options_of(rows: int) -> dict[str, str | bool] | None:
    """Returns the options of a program whose products are of so many rows."""
    return _by_eigen() if rows in _FEW_ROWS or rows >= _MANY_ROWS else None


@functools.cache
def _by_eigen() -> dict[str, str | bool] | None:
    """Returns options that multiply by Eigen; `None` where XLA has them not.

    XLA:CPU multiplies by YNNPACK, which takes a third longer for 4 to 32 rows than
    Eigen does, a tenth for thousands, and as long for one or hundreds. Other platforms
    ignore these options.
    """
    options: dict[str, str | bool] = {"xla_cpu_experimental_ynn_fusion_type": ""}
    try:
        jax.jit(jnp.negative).lower(0.0).compile(options)
    except jax.errors.JaxRuntimeError:
        return None
    return options
