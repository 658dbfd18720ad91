"""The tensors of a layer's experts, as one tensor with the expert as its first axis."""

import dataclasses
import re

import numpy as np

from eagle_jax.checkpoints.tensors import Part, StoredTensor
from eagle_jax.errors import InputError

_ONE = re.compile(r"(.*\.experts\.)(\d+)(\..*)")


def stacked(stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Returns tensors by name, those of experts as stacks.

    `X.experts.3.up_proj.weight` is a part of `X.experts.{}.up_proj.weight`.

    Args:
        stored: The tensors of a checkpoint by name.

    Raises:
        InputError: If an expert between others is missing, or has another shape.
    """
    found: dict[str, StoredTensor] = {}
    stacks: dict[str, dict[int, StoredTensor]] = {}
    for name, tensor in stored.items():
        if one := _ONE.fullmatch(name):
            stacks.setdefault(f"{one[1]}{{}}{one[3]}", {})[int(one[2])] = tensor
        else:
            found[name] = tensor
    return found | {name: _stack(name, stack) for name, stack in stacks.items()}


def _stack(name: str, experts: dict[int, StoredTensor]) -> StoredTensor:
    listed: list[StoredTensor] = []
    for number in range(len(experts)):
        if number not in experts:
            raise InputError(
                f"{name.format(number)} is missing, and later ones are not"
            )
        listed.append(experts[number])
        if listed[-1].shape != listed[0].shape:
            raise InputError(
                f"{name.format(number)} has shape {listed[-1].shape}, but the first "
                f"expert has {listed[0].shape}"
            )

    def read_part(part: Part) -> np.ndarray:
        (first, last), *others = part
        return np.stack([one.read_part(tuple(others)) for one in listed[first:last]])

    shape = (len(listed), *listed[0].shape)
    return dataclasses.replace(listed[0], shape=shape, read_part=read_part)
