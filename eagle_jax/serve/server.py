"""The server's process: its socket, its signals and its end."""

import math
import socket
import time
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from eagle_jax.errors import InputError
from eagle_jax.serve.app import is_local
from eagle_jax.serve.driver import Driver

_LAST_SECONDS = 5


def listen(host: str, port: int, *, has_key: bool) -> socket.socket:
    """Returns a socket that listens.

    Args:
        host: The address or the name to listen on.
        port: The port; 0 for any that is free.
        has_key: Whether clients must know a key.

    Raises:
        InputError: If others could ask without a key.
        OSError: If it is taken, or not this machine's.
    """
    if not has_key and not is_local(host):
        raise InputError(
            f"--host {host} is open to other machines; give --api-key, or set "
            "EAGLE_JAX_API_KEY"
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family)


def serve(
    app: Starlette, driver: Driver, listening: socket.socket, *, grace: float
) -> bool:
    """Answers requests until SIGTERM or SIGINT, on the socket that `listen` returned.

    After these running texts are given `grace` seconds to end.

    Returns:
        Whether the engine's thread has ended.

    Raises:
        Exception: What the engine's thread died of, if it did.
    """
    config = uvicorn.Config(
        app,
        loop="asyncio",
        http="h11",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_LAST_SECONDS,
    )
    Server(config, driver, grace).run(sockets=[listening])
    if driver.error is not None:
        raise driver.error
    return driver.join(0)


class Server(uvicorn.Server):
    """A server that, at its end, still answers: new requests hear that it ends."""

    def __init__(self, config: uvicorn.Config, driver: Driver, grace: float) -> None:
        """Takes the driver that is ended, and the seconds that its texts get."""
        super().__init__(config)
        self._driver = driver
        self._grace = grace
        self._deadline = math.inf

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Lets texts end; the second signal does not wait for them."""
        is_second = self._driver.is_draining
        self._deadline = time.monotonic() + (0 if is_second else self._grace)
        self._driver.is_draining = True

    async def on_tick(self, counter: int) -> bool:
        """Returns whether to leave, several times a second."""
        is_late = time.monotonic() >= self._deadline
        if self._driver.is_draining and (is_late or not self._driver.num_claimed):
            self._driver.close()
            self.should_exit = True
        return await super().on_tick(counter)
