"""Tensors that files hold otherwise than models do.

A layer's experts become one tensor with the expert as its first axis: most files hold
each expert's tensors, those of gpt-oss hold them together. The joined matrices of Phi-3
become those that they were joined from.
"""

import dataclasses
import math
import re

import ml_dtypes
import numpy as np

from eagle_jax.checkpoints.names import transposed
from eagle_jax.checkpoints.tensors import Part, StoredTensor
from eagle_jax.errors import InputError
from eagle_jax.models.layers import LayerConfig

Stored = dict[str, StoredTensor]
"""The tensors of a checkpoint by name."""

_JOINED = re.compile(r"(.*\.)(self_attn\.qkv|mlp\.gate_up)_proj\.weight")
_ONE = re.compile(r"(.*\.experts\.)(\d+)(\..*)")
_FUSED = re.compile(r"(.*\.experts\.)(gate_up|down)_proj(|_bias|_blocks)")

_GROUP = 32
"""The numbers of MXFP4 that share a scale; two of them share a byte."""

_HALF = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_BYTES = np.arange(256)
# What each byte of MXFP4 stands for, that of the lower bits first: two float32 as one
# word, as NumPy finds words in a table nine times as fast as pairs.
_PAIRS = np.concatenate([_HALF, -_HALF])[np.stack([_BYTES & 15, _BYTES >> 4], axis=-1)]
_PAIRS = _PAIRS.view(np.int64)[:, 0]


def split(stored: Stored, layer: LayerConfig) -> Stored:
    """Returns tensors by name, those of joined matrices as their parts.

    `X.qkv_proj.weight` holds the rows of `q_proj`, `k_proj` and `v_proj`, in this
    order, and `X.gate_up_proj.weight` those of `gate_proj` and `up_proj`.

    Raises:
        InputError: If a matrix has more or fewer rows.
    """
    query = layer.num_heads * layer.head_dim
    key = layer.num_kv_heads * layer.head_dim
    inner = layer.intermediate_size
    sizes = {
        "self_attn.qkv": {"self_attn.q": query, "self_attn.k": key, "self_attn.v": key},
        "mlp.gate_up": {"mlp.gate": inner, "mlp.up": inner},
    }
    found: Stored = {}
    for name, tensor in stored.items():
        one = _JOINED.fullmatch(name)
        if one is None:
            found[name] = tensor
            continue
        parts, start = sizes[one[2]], 0
        if tensor.shape[:1] != (sum(parts.values()),):
            raise InputError(
                f"tensor {name} has shape {tensor.shape}, but its sizes ask for "
                f"{sum(parts.values())} rows"
            )
        for part, rows in parts.items():
            found[f"{one[1]}{part}_proj.weight"] = _rows(tensor, start, rows)
            start += rows
    return found


def _rows(tensor: StoredTensor, start: int, count: int) -> StoredTensor:
    """Returns some rows of a tensor, which are read alone."""

    def read_part(part: Part) -> np.ndarray:
        (first, last), *others = part
        return tensor.read_part(((first + start, last + start), *others))

    shape = (count, *tensor.shape[1:])
    return dataclasses.replace(tensor, shape=shape, read_part=read_part)


def stacked(stored: Stored) -> Stored:
    """Returns tensors by name, those of experts as stacks.

    `X.experts.3.up_proj.weight` is a part of `X.experts.{}.up_proj.weight`.

    Raises:
        InputError: If an expert between others is missing, or has another shape.
    """
    found: Stored = {}
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


def parted(stored: Stored) -> Stored:
    """Returns the tensors of gpt-oss by the names that `stacked` gives to others.

    Its files hold gate and up as one, in even outputs and in odd ones. Matrices are
    `[X, in, out]`, or `[X, out, in]` of MXFP4 (Open Compute Project, Microscaling
    formats, 2023), of which `_blocks` hold two numbers in each byte, and `_scales` a
    power of two for each group.

    Raises:
        InputError: If a tensor of experts has not the scales that it needs.
    """
    found = {
        name.replace(".mlp.router.", ".mlp.gate."): tensor
        for name, tensor in stored.items()
    }
    for name in stored:
        if not (one := _FUSED.fullmatch(name)):
            continue
        prefix, matrix, kind = one.groups()
        whole = found.pop(name)
        if kind == "_blocks":
            scales = found.pop(f"{prefix}{matrix}_proj_scales", None)
            whole = _unpacked(name, whole, scales)
        elif not kind:
            whole = _swapped(whole)
        halves = {"down": whole}
        if matrix == "gate_up":
            halves = {"gate": _every_other(whole, 0), "up": _every_other(whole, 1)}
        for own, half in halves.items():
            suffix = "bias" if kind == "_bias" else "weight"
            found[f"{prefix}{{}}.{own}_proj.{suffix}"] = half
    return found


def _swapped(tensor: StoredTensor) -> StoredTensor:
    """Returns the transposes of a stack of matrices."""
    return dataclasses.replace(
        tensor,
        shape=transposed(tensor.shape),
        read_part=lambda part: tensor.read_part(transposed(part)).swapaxes(-1, -2),
    )


def _every_other(tensor: StoredTensor, first: int) -> StoredTensor:
    """Returns every other row, from the first one on, of each in a stack."""

    def read_part(part: Part) -> np.ndarray:
        stack, (start, stop), *others = part
        wide = tensor.read_part((stack, (2 * start, 2 * stop), *others))
        return wide[:, first::2]

    # Of an odd number of rows, one of the halves has a row too many and is refused.
    count = [(size + 1 - first) // 2 for size in tensor.shape[1:2]]
    shape = (*tensor.shape[:1], *count, *tensor.shape[2:])
    return dataclasses.replace(tensor, shape=shape, read_part=read_part)


def _unpacked(
    name: str, blocks: StoredTensor, scales: StoredTensor | None
) -> StoredTensor:
    """Returns the matrices `[X, out, in]` that MXFP4 stands for."""
    if scales is None or blocks.shape != (*scales.shape, _GROUP // 2):
        raise InputError(
            f"{name} has shape {blocks.shape}, and its scales have "
            f"{scales and scales.shape}"
        )

    def read_part(part: Part) -> np.ndarray:
        *others, (start, stop) = part
        groups = start // _GROUP, -(-stop // _GROUP)
        powers = scales.read_part((*others, groups)).view(ml_dtypes.float8_e8m0fnu)
        pairs = _PAIRS[blocks.read_part((*others, groups, (0, _GROUP // 2)))]
        wide = pairs.view(np.float32) * powers.astype(np.float32)[..., None]
        skipped = groups[0] * _GROUP
        wide = wide.reshape(*wide.shape[:-2], -1)
        return wide[..., start - skipped : stop - skipped]

    shape = (*blocks.shape[:-2], 2 * math.prod(blocks.shape[-2:]))
    return StoredTensor(dtype="bfloat16", shape=shape, read_part=read_part)
