"""Decoding over several devices: a mesh, and where every array lies on it."""

from eagle_jax.parallel.mesh import MeshShape, check_mesh, make_mesh, parse_mesh
from eagle_jax.parallel.placement import Placement, place
from eagle_jax.parallel.processes import join_processes
from eagle_jax.parallel.rules import (
    WHOLE,
    Rules,
    draft_rules,
    param_shardings,
    row_shardings,
    split_rules,
)

__all__ = [
    "WHOLE",
    "MeshShape",
    "Placement",
    "Rules",
    "check_mesh",
    "draft_rules",
    "join_processes",
    "make_mesh",
    "param_shardings",
    "parse_mesh",
    "place",
    "row_shardings",
    "split_rules",
]
