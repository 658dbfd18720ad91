"""The options that XLA compiles a program with."""

import functools

import jax
import jax.numpy as jnp

_FEW_ROWS = range(3, 64)
"""The numbers of rows that Eigen multiplies sooner."""


def options_of(rows: int) -> dict[str, str | bool] | None:
    """Returns the options of a program whose products are of so many rows."""
    return _few_rows() if rows in _FEW_ROWS else None


@functools.cache
def _few_rows() -> dict[str, str | bool] | None:
    """Returns options that multiply few rows sooner; `None` where XLA has them not.

    XLA:CPU multiplies by YNNPACK, which takes a third longer for 4 to 32 rows than
    Eigen does, and as long for one or many. Other platforms ignore these options.
    """
    options: dict[str, str | bool] = {"xla_cpu_experimental_ynn_fusion_type": ""}
    try:
        jax.jit(jnp.negative).lower(0.0).compile(options)
    except jax.errors.JaxRuntimeError:
        return None
    return options
