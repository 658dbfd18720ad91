"""Several processes, each with devices of its own, as one: the start of them all."""

import re
import socket
import time

import jax
from jax.experimental import multihost_utils

from eagle_jax.errors import InputError

_PAUSE = 0.2
_ID_BYTES = 4


def join_processes(
    coordinator: str, num_processes: int, process_id: int, *, seconds: float = 60.0
) -> None:
    """Joins this process with the others; to be called before anything of JAX.

    Afterwards `jax.devices()` are those of all processes.

    Args:
        coordinator: The `HOST:PORT` of process 0; the port is free on that machine.
        num_processes: The number of processes.
        process_id: This one's number, 0 .. `num_processes` - 1.
        seconds: The time to wait for the others, in seconds.

    Raises:
        InputError: If the numbers make no sense, or not all answer in time.
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
    # `jax.distributed.initialize` meets the others too, but past its
    # `initialization_timeout` jaxlib (0.10) aborts the process with a stack trace of
    # C++, which Python cannot catch: so they meet here first.
    deadline = time.monotonic() + seconds
    address = (match[1], int(match[2]))
    try:
        if process_id == 0:
            _call(address[1], num_processes, deadline)
        else:
            _answer(address, process_id, deadline)
    except OSError as error:
        raise InputError(
            f"not all of {num_processes} processes met at {coordinator} within "
            f"{seconds:g} s ({error}); start one with each process id, and check the "
            "address and the firewall"
        ) from error
    jax.distributed.initialize(
        coordinator_address=coordinator,
        num_processes=num_processes,
        process_id=process_id,
    )


def detect_processes() -> None:
    """Joins this process with the others that a cluster has started.

    JAX knows those of Cloud TPU, SLURM, Open MPI and others. Call this before anything
    else of JAX. Afterwards `jax.devices()` are those of all processes.

    Raises:
        InputError: If JAX finds no such cluster, or the processes do not meet.
    """
    try:
        jax.distributed.initialize()
    except ValueError as error:
        raise InputError(
            "no cluster was found that tells of its processes, as Cloud TPU, SLURM and "
            "Open MPI do; start a process on each machine with `coordinator`, "
            "`num_processes` and `process_id`"
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


def _call(port: int, num_processes: int, deadline: float) -> None:
    """Waits until every other process has reported, and tells them so."""
    others: dict[int, socket.socket] = {}
    with _listen(port) as server:
        try:
            while not _are_there(others, num_processes - 1):
                server.settimeout(max(deadline - time.monotonic(), _PAUSE))
                other, _ = server.accept()
                number = _read_id(other)
                # A process that was started again replaces its predecessor, and any
                # other caller is not counted.
                stale: socket.socket | None = other
                if number is not None and 0 < number < num_processes:
                    stale = others.get(number)
                    others[number] = other
                if stale is not None:
                    stale.close()
            for other in others.values():
                other.setblocking(True)
                other.sendall(b"!")
        finally:
            for other in others.values():
                other.close()


def _are_there(others: dict[int, socket.socket], wanted: int) -> bool:
    """Forgets callers that hung up, and returns whether as many as wanted are left."""
    for number, other in list(others.items()):
        other.setblocking(False)
        try:
            has_left = not other.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            has_left = False
        except OSError:
            has_left = True
        if has_left:
            others.pop(number).close()
    return len(others) == wanted


def _listen(port: int) -> socket.socket:
    """Returns a server on all interfaces: others may know this machine by any name."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, dualstack_ipv6=True
        )
    return socket.create_server(("", port))


def _read_id(other: socket.socket) -> int | None:
    """Returns the process id that a caller sends, `None` if it sends none."""
    try:
        other.settimeout(_PAUSE * 5)
        sent = other.recv(_ID_BYTES, socket.MSG_WAITALL)
    except OSError:
        return None
    return int.from_bytes(sent) if len(sent) == _ID_BYTES else None


def _answer(address: tuple[str, int], process_id: int, deadline: float) -> None:
    """Reports to process 0, which may start later, and waits for its answer."""
    while True:
        left = max(deadline - time.monotonic(), _PAUSE)
        try:
            with socket.create_connection(address, timeout=left) as connection:
                connection.sendall(process_id.to_bytes(_ID_BYTES))
                connection.settimeout(max(deadline - time.monotonic(), _PAUSE))
                if connection.recv(1):
                    return
        except OSError:
            if time.monotonic() >= deadline:
                raise
        if time.monotonic() >= deadline:
            raise TimeoutError("process 0 went away")
        time.sleep(_PAUSE)
