"""Which devices share the work of a row, as far as the traced program knows."""

import math
from collections.abc import Mapping

import jax
from jax.sharding import AxisType


def split_axes() -> Mapping[str, int]:
    """Returns the mesh axes that a row's arrays may be split over, with their sizes.

    They are those that the compiler places arrays on. A program that is traced without
    a mesh has none, whatever its arguments lie on.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return {
        name: size
        for name, size, kind in zip(
            mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True
        )
        if kind == AxisType.Auto
    }


def num_parts() -> int:
    """Returns how many devices share the work of a row; 1 without a mesh."""
    return math.prod(split_axes().values())
