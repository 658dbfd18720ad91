"""Flags of commands that use all devices, and the start of several processes."""

import argparse
import os
import sys
from typing import Any

import jax

from eagle_jax.cli.command import say
from eagle_jax.errors import InputError
from eagle_jax.parallel import MeshShape, detect_processes, join_processes, parse_mesh


def add_mesh_flags(parser: argparse.ArgumentParser) -> None:
    """Adds `--mesh` and the flags of one of several processes."""
    add = parser.add_argument_group("several devices").add_argument
    add(
        "--mesh",
        metavar="SIZES",
        help="use all devices, such as data=2,tensor=4: the batch is split over data, "
        "heads, vocabulary and feed-forward layers over tensor",
    )
    add = parser.add_argument_group("several hosts").add_argument
    add("--coordinator", metavar="HOST:PORT", help="of process 0, if there are more")
    add("--num-processes", type=int, metavar="N", help="with --coordinator")
    add("--process-id", type=int, metavar="I", help="with --coordinator: 0 to N - 1")
    told = "several processes of which Cloud TPU, SLURM or Open MPI tells"
    add("--distributed", action="store_true", help=told)


def mesh_shape(arguments: argparse.Namespace) -> MeshShape | None:
    """Returns the mesh of the flags, `None` without one."""
    if arguments.mesh is not None:
        return parse_mesh(arguments.mesh)
    if has_processes(arguments):
        raise InputError("several processes need --mesh, over the devices of all")
    return None


def has_processes(arguments: argparse.Namespace) -> bool:
    """Returns whether the flags ask for several processes."""
    given = [value is not None for value in _address(arguments)]
    if any(given) and (arguments.distributed or not all(given)):
        raise InputError(
            "--coordinator, --num-processes and --process-id belong together; give "
            "all three, or --distributed alone, which finds the other processes"
        )
    return any(given) or arguments.distributed


def join(arguments: argparse.Namespace) -> bool:
    """Joins the processes that the flags ask for; call it before JAX is used.

    Afterwards no process but the first prints to standard output. JAX's libraries print
    about their connections, which goes to standard error.

    Returns:
        Whether this process is the first.
    """
    mesh_shape(arguments)
    if has_processes(arguments) and arguments.distributed:
        detect_processes()
    elif has_processes(arguments):
        coordinator, num_processes, process_id = _address(arguments)
        say(f"waiting for {num_processes} processes at {coordinator}")
        join_processes(coordinator, num_processes, process_id)
    is_first = jax.process_index() == 0
    if jax.process_count() > 1:
        text = os.dup(1) if is_first else os.open(os.devnull, os.O_WRONLY)
        os.dup2(2, 1)
        sys.stdout = os.fdopen(text, "w")
    return is_first


def _address(arguments: argparse.Namespace) -> tuple[Any, Any, Any]:
    """Returns coordinator, number and id, `None` for each that was not given."""
    return arguments.coordinator, arguments.num_processes, arguments.process_id
