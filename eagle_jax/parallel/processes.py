"""Several processes, each with devices of its own, as one: the start of them all."""

import re
import socket
import time

import jax

from eagle_jax.errors import InputError

_PAUSE = 0.2


def join_processes(
    coordinator: str, num_processes: int, process_id: int, *, seconds: float = 60.0
) -> None:
    """Joins this process with the others; to be called before anything of JAX.

    Afterwards `jax.devices()` are those of all processes.

    Args:
        coordinator: `HOST:PORT` of process 0, free on that machine.
        num_processes: How many there are.
        process_id: 0 .. `num_processes` - 1, different in each.
        seconds: To wait for the others.

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
    # JAX's own start ends a process that waits in vain, without a word to the user.
    deadline = time.monotonic() + seconds
    address = (match[1], int(match[2]))
    try:
        if process_id == 0:
            _call(address, num_processes - 1, deadline)
        else:
            _answer(address, deadline)
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


def _call(address: tuple[str, int], num_others: int, deadline: float) -> None:
    """Waits until all others are there, and tells them so."""
    with socket.create_server(address) as server:
        others: list[socket.socket] = []
        try:
            while len(others) < num_others:
                server.settimeout(max(deadline - time.monotonic(), _PAUSE))
                others.append(server.accept()[0])
            for other in others:
                other.sendall(b"!")
        finally:
            for other in others:
                other.close()


def _answer(address: tuple[str, int], deadline: float) -> None:
    """Reports to process 0, which may start later, and waits for its word."""
    while True:
        left = max(deadline - time.monotonic(), _PAUSE)
        try:
            with socket.create_connection(address, timeout=left) as connection:
                connection.settimeout(max(deadline - time.monotonic(), _PAUSE))
                if connection.recv(1):
                    return
        except OSError:
            if time.monotonic() >= deadline:
                raise
        if time.monotonic() >= deadline:
            raise TimeoutError("process 0 went away")
        time.sleep(_PAUSE)
