"""What the devices at hand are good for."""

import jax
import jax.numpy as jnp

from eagle_jax.errors import InputError
from eagle_jax.models.linear import linear
from eagle_jax.models.quantised import GROUP_SIZE, quantise


def on_cpu() -> bool:
    """Returns whether float32 is the quicker choice: bfloat16 is slow on CPUs."""
    return jax.devices()[0].platform == "cpu"


def check_product(bits: int | None, dtype: str) -> None:
    """Tries a tiny product, before the long work of a whole model.

    Args:
        bits: Of quantised matrices, `None` where there are none.
        dtype: Of what they are multiplied with.

    Raises:
        InputError: If this device cannot compute it.
    """
    if bits is None:
        return
    try:
        weight = quantise(jnp.ones((GROUP_SIZE, 8)), bits)
        jax.block_until_ready(jax.jit(linear)(jnp.ones((1, GROUP_SIZE), dtype), weight))
    except Exception as error:  # Compilers have many kinds.
        reason = str(error).partition("\n")[0]
        raise InputError(
            f"{jax.devices()[0].device_kind} cannot multiply {dtype} with int{bits} "
            f"weights: {reason}; choose another --quantization or --dtype"
        ) from error
