"""The tensors of a layer's experts, as one tensor with the expert as its first axis.

Files hold one tensor for each expert, or all of them with gate and up side by side:

    X.experts.3.gate_proj.weight    `[out, in]`, as published
    X.experts.gate_up_proj          `[experts, 2 * out, in]`, of transformers 5
    X.experts.down_proj             `[experts, out, in]`, of transformers 5

Either way it is named as a stack, `X.experts.{}.gate_proj.weight`.
"""

import dataclasses
import re
from collections.abc import Callable

import numpy as np

from eagle_jax.checkpoints.tensors import Part, StoredTensor
from eagle_jax.errors import InputError

_ONE = re.compile(r"(.*\.experts\.)(\d+)(\..*)")
_ALL = re.compile(r"(.*\.experts\.)(gate_up|down)_proj")


def stacked(stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Returns tensors by name, those of experts as stacks.

    Args:
        stored: The tensors of a checkpoint by name.

    Raises:
        InputError: If an expert between others is missing, or has other shapes.
    """
    found: dict[str, StoredTensor] = {}
    stacks: dict[str, dict[int, StoredTensor]] = {}
    for name, tensor in stored.items():
        if one := _ONE.fullmatch(name):
            stack = stacks.setdefault(f"{one[1]}{{}}{one[3]}", {})
            stack[int(one[2])] = tensor
        elif (every := _ALL.fullmatch(name)) and len(tensor.shape) == 3:
            halves = ["gate", "up"] if every[2] == "gate_up" else ["down"]
            for number, half in enumerate(halves):
                rows = tensor.shape[1] // len(halves)
                cut = _rows(tensor, number * rows, rows)
                found[f"{every[1]}{{}}.{half}_proj.weight"] = cut
        else:
            found[name] = tensor
    return found | {name: _stack(name, stack) for name, stack in stacks.items()}


def _rows(tensor: StoredTensor, start: int, count: int) -> StoredTensor:
    """Returns a few rows of each matrix."""

    def read_part(part: Part) -> np.ndarray:
        number, (first, last), columns = part
        return tensor.read_part((number, (start + first, start + last), columns))

    shape = (tensor.shape[0], count, tensor.shape[2])
    return dataclasses.replace(tensor, shape=shape, read_part=read_part)


def _stack(name: str, experts: dict[int, StoredTensor]) -> StoredTensor:
    tensors = [experts.get(number) for number in range(len(experts))]
    for number, tensor in enumerate(tensors):
        if tensor is None:
            raise InputError(
                f"{name.format(number)} is missing, and later ones are not"
            )
        if tensor.shape != experts[0].shape:
            raise InputError(
                f"{name.format(number)} has shape {tensor.shape}, but the first expert "
                f"has {experts[0].shape}"
            )
    readers: list[Callable[[Part], np.ndarray]] = [
        experts[number].read_part for number in range(len(experts))
    ]

    def read_part(part: Part) -> np.ndarray:
        (first, last), *others = part
        return np.stack([read(tuple(others)) for read in readers[first:last]])

    shape = (len(readers), *experts[0].shape)
    return dataclasses.replace(experts[0], shape=shape, read_part=read_part)
