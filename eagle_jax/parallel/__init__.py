"""Decoding over several devices: a mesh, and the sharding of every array on it."""

from eagle_jax.parallel.mesh import DATA, MeshShape, check_mesh, make_mesh, parse_mesh
from eagle_jax.parallel.processes import detect_processes, join_processes, wait_for_all
from eagle_jax.parallel.rules import (
    WHOLE,
    Rules,
    draft_rules,
    param_shardings,
    row_shardings,
    split_rules,
)
from eagle_jax.parallel.sharding import PairSharding, shard_pair

__all__ = [
    "DATA",
    "WHOLE",
    "MeshShape",
    "PairSharding",
    "Rules",
    "check_mesh",
    "detect_processes",
    "draft_rules",
    "join_processes",
    "make_mesh",
    "param_shardings",
    "parse_mesh",
    "row_shardings",
    "shard_pair",
    "split_rules",
    "wait_for_all",
]
