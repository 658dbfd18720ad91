"""Several processes, each with devices of its own, as one: the start of them all."""

import re

import jax
from jax.experimental import multihost_utils

from eagle_jax.errors import InputError


def join_processes(coordinator: str, num_processes: int, process_id: int) -> None:
    """Joins this process with the others; to be called before anything of JAX.

    Afterwards `jax.devices()` are those of all processes. JAX waits five minutes for
    them, and then ends the process with a message of its own.

    Args:
        coordinator: The `HOST:PORT` of process 0; the port is free on that machine.
        num_processes: The number of processes.
        process_id: This one's number, 0 .. `num_processes` - 1.
    """
    match = re.fullmatch(r"(.+):(\d{1,5})", coordinator)
    if match is None or not 0 < int(match[2]) < 2**16:
        raise InputError(
            f"coordinator {coordinator!r} must be HOST:PORT, such as 10.0.0.1:1234"
        )
    if not 0 <= process_id < num_processes:
        raise InputError(
            f"process id {process_id} of {num_processes} processes must be 0 to "
            f"{num_processes - 1}"
        )
    try:
        jax.distributed.initialize(coordinator, num_processes, process_id)
    except (RuntimeError, OSError) as error:
        raise InputError(
            f"{num_processes} processes cannot meet at {coordinator}: {error}"
        ) from error


def detect_processes() -> None:
    """Joins this process with the others that a cluster has started.

    JAX knows those of Cloud TPU, SLURM, Open MPI and others. Call this before anything
    else of JAX. Afterwards `jax.devices()` are those of all processes.
    """
    try:
        jax.distributed.initialize()
    except ValueError as error:
        raise InputError(
            "no cluster was found, such as Cloud TPU or SLURM; start a process on each "
            "machine with `coordinator`, `num_processes` and `process_id`"
        ) from error
    except (RuntimeError, OSError) as error:
        raise InputError(f"the cluster's processes did not meet: {error}") from error


def wait_for_all(name: str) -> None:
    """Waits until every process has called this; does nothing where there is one.

    Args:
        name: The name of this barrier, the same in all processes.
    """
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)
