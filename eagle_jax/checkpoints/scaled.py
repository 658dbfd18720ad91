"""Weights that others stored in eight bits with scales, read as the numbers they mean.

Each is a matrix `[out, in]` of FP8 or int8 with a tensor of scales beside it, by which
it is multiplied:

    X.weight_scale_inv    one for each block of `weight_block_size` (fp8)
    X.weight_scale        one for all, or for each of `out` (fbgemm, compressed-tensors)

Scales of activations and of caches are left out before: only weights are quantized.
"""

import dataclasses
from typing import Any

import numpy as np

from eagle_jax.checkpoints.hf_fields import Fields, warn_once
from eagle_jax.checkpoints.tensors import Part, StoredTensor
from eagle_jax.errors import InputError

_KINDS = ("float8_e4m3fn", "int8")
_FORMATS = ("float-quantized", "int-quantized", "naive-quantized")

Block = tuple[int, int]
"""The rows and columns that share a scale in a `weight_scale_inv`."""

LEFT_OUT = (".input_scale", ".input_scale_ub", ".k_scale", ".v_scale", ".output_scale")
"""The ends of the names of scales that are for no weight."""


def read_scheme(fields: Fields) -> Block | None:
    """Returns the blocks of a target's `quantization_config`; `None` without any.

    Raises:
        InputError: If its weights are quantized in a way that is not read.
    """
    given = fields.get("quantization_config")
    if given is None:
        return None
    config = Fields(given if isinstance(given, dict) else {}, fields.path)
    method, form = config.get("quant_method"), config.get("format")
    is_compressed = method == "compressed-tensors" and form in _FORMATS
    if method == "mxfp4":  # Names of tensors say where, see `stacks.parted`.
        return None
    if config.get("transform_config"):
        raise fields.refusal("quantization_config: transform_config is not read")
    if method not in ("fp8", "fbgemm_fp8") and not is_compressed:
        raise fields.refusal(
            f"quantization_config with quant_method {method!r} and format {form!r} is "
            "not read; known are fp8, fbgemm_fp8, compressed-tensors of 8 bits and "
            "mxfp4; give the checkpoint that is not quantized, with `quantization`"
        )
    sizes = config.get("weight_block_size", [128, 128])
    is_pair = isinstance(sizes, list) and [type(x) for x in sizes] == [int, int]
    if not is_pair or min(sizes) < 1:
        raise fields.refusal(f"weight_block_size = {sizes!r} must be two sizes")
    warn_once(
        f"{fields.path.parent} holds weights of 8 bits, which are read as what they "
        "stand for; activations are not rounded as where they were made for, so texts "
        "may differ from those of other programs"
    )
    return sizes[0], sizes[1]


def unscaled(stored: dict[str, StoredTensor], block: Block) -> dict[str, StoredTensor]:
    """Returns tensors as if they had been stored without scales.

    Args:
        stored: The tensors of a checkpoint by name.
        block: The rows and columns that share a scale.

    Raises:
        InputError: If a matrix of 8 bits has no scales, or scales of another shape.
    """
    found = dict(stored)
    for name, tensor in stored.items():
        if tensor.dtype not in _KINDS or not name.endswith(".weight"):
            continue
        scales = found.pop(f"{name}_scale", None)
        sizes = (tensor.shape[0], tensor.shape[-1])
        if scales is None:
            scales, sizes = found.pop(f"{name}_scale_inv", None), block
        elif np.prod(scales.shape) > 1:
            sizes = (1, tensor.shape[-1])
        if scales is None:
            raise InputError(f"{name} holds {tensor.dtype}, and no scales beside it")
        found[name] = _unscaled(name, tensor, scales, sizes)
    return found


def _unscaled(
    name: str, tensor: StoredTensor, scales: StoredTensor, sizes: Block
) -> StoredTensor:
    """Returns one matrix, each entry of whose scales is for a block of these sizes."""
    counts = tuple(-(-n // size) for n, size in zip(tensor.shape, sizes, strict=True))
    if np.prod(scales.shape) != np.prod(counts):
        raise InputError(
            f"{name} of shape {tensor.shape} has scales of shape {scales.shape}, and "
            f"{counts} are wanted"
        )

    def read_part(part: Part) -> np.ndarray:
        every: Any = tuple((0, size) for size in scales.shape)
        table = scales.read_part(every).astype(np.float32).reshape(counts)
        places = (
            np.arange(*ends) // size for ends, size in zip(part, sizes, strict=True)
        )
        return tensor.read_part(part).astype(np.float32) * table[np.ix_(*places)]

    return dataclasses.replace(tensor, dtype="bfloat16", read_part=read_part)
