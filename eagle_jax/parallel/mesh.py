"""The mesh: the axes along which the devices of a run share the work.

    data    each device has its own rows of the batch
    tensor  each device has its own part of every row's work: two mesh axes, `kv` whose
            devices hold different key/value heads, and `query` whose devices hold the
            same ones and different queries of them

A model with fewer key/value heads than the tensor axis has devices has each of them on
`query` devices, and no device has more than it needs.
"""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from eagle_jax.errors import InputError
from eagle_jax.models.mlp import splits_experts
from eagle_jax.models.transformer import TransformerConfig

DATA = "data"
TENSOR = ("kv", "query")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshShape:
    """The number of devices that share a batch, and of those that share each row.

    Attributes:
        data: The number of devices over which the batch is split.
        tensor: The number of devices over which each row's work is split.
    """

    data: int = 1
    tensor: int = 1

    @property
    def num_devices(self) -> int:
        """The number of devices of the whole mesh."""
        return self.data * self.tensor

    def __str__(self) -> str:
        """Returns the text that `parse_mesh` reads."""
        return f"data={self.data},tensor={self.tensor}"


def parse_mesh(text: str) -> MeshShape:
    """Reads the shape of a mesh.

    >>> parse_mesh("tensor=4")
    MeshShape(data=1, tensor=4)

    Args:
        text: The axes' sizes, as `data=2,tensor=4`; an axis left out has size 1.
    """
    known = [field.name for field in dataclasses.fields(MeshShape)]
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        is_new = name in known and name not in sizes
        if not is_new or not re.fullmatch(r"[1-9][0-9]{0,8}", size):
            raise InputError(
                f"mesh {text!r}: {part!r} is no size of an axis; give each of "
                f"{' and '.join(known)} once at most, such as data=2,tensor=4"
            )
        sizes[name] = int(size)
    return MeshShape(**sizes)


def check_mesh(
    shape: MeshShape, target: TransformerConfig, *, batch_size: int, num_devices: int
) -> None:
    """Refuses a mesh that cannot split a target evenly, before any weight is read.

    Args:
        shape: The mesh's shape.
        target: The target's sizes.
        batch_size: The number of rows of a batch, `B`.
        num_devices: The number of devices that there are.
    """
    if shape.num_devices != num_devices:
        raise InputError(
            f"mesh {shape} is for {shape.num_devices} devices, but there are "
            f"{num_devices}; give sizes whose product is {num_devices}"
        )
    if batch_size % shape.data:
        raise InputError(
            f"mesh {shape}: data = {shape.data} does not divide the batch of "
            f"{batch_size}; give a batch size that is a multiple of it"
        )
    layer, tensor = target.layer, shape.tensor
    sizes = {
        "query heads": layer.num_heads,
        "tokens of the vocabulary": target.vocab_size,
    }
    if not splits_experts(layer.num_experts, layer.inner_size, tensor):
        sizes["intermediate features"] = layer.inner_size
    if tensor % layer.num_kv_heads:  # Else several devices share a head.
        sizes["key/value heads"] = layer.num_kv_heads
    for name, size in sizes.items():
        if size % tensor:
            raise InputError(
                f"mesh {shape}: tensor = {tensor} does not divide the target's {size} "
                f"{name}; give a divisor, such as {math.gcd(tensor, size)}"
            )


def make_mesh(
    shape: MeshShape,
    num_kv_heads: int,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """Returns the mesh of a shape.

    Args:
        shape: The mesh's shape, which `check_mesh` has checked.
        num_kv_heads: The target's number of key/value heads, `G`.
        devices: The devices, as many as `shape` asks for; `None` for all.

    Returns:
        A mesh with the axes `DATA` and `TENSOR`.
    """
    kv = math.gcd(shape.tensor, num_kv_heads)
    grid = mesh_utils.create_device_mesh(
        (shape.data, kv, shape.tensor // kv),
        devices,
        # Eight heads on 4 x 4 chips: `jax.make_mesh` would find no way.
        allow_split_physical_axes=True,
    )
    return Mesh(grid, (DATA, *TENSOR), axis_types=(AxisType.Auto,) * 3)
