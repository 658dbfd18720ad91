"""Compiled programs that can be dropped; `jax.jit` alone would keep them for good."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable

import jax

MOST_PROGRAMS = 64
"""The number of programs kept; on a CPU each holds about 300 memory maps and 15 MB.

Linux lets a process have 65,530 maps, and aborts the one that asks for more.
"""


class Programs:
    """A store that compiles every program once, and keeps those used last.

    Threads may share it: none waits for what another compiles, so two that need the
    same program at once both compile it.

    Attributes:
        compile_seconds: The seconds that compiling took, over all programs so far.
    """

    def __init__(self, most: int = MOST_PROGRAMS) -> None:
        """Starts without a program; `most` are kept at once."""
        self.compile_seconds = 0.0
        self._most = most
        self._kept: OrderedDict[Hashable, jax.stages.Compiled] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def num_kept(self) -> int:
        """The number of programs that are kept now."""
        return len(self._kept)

    def get(
        self, key: Hashable, compile_it: Callable[[], jax.stages.Compiled]
    ) -> jax.stages.Compiled:
        """Returns a program, compiled now if it is not kept.

        Its `key` is its name and all that it is compiled for.
        """
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        started = time.perf_counter()
        try:
            program = compile_it()
        finally:  # Ctrl-C may have ended it.
            with self._lock:
                self.compile_seconds += time.perf_counter() - started
        with self._lock:
            self._kept[key] = program
            while len(self._kept) > self._most:
                self._kept.popitem(last=False)
        return program

    def clear(self) -> None:
        """Drops every program."""
        with self._lock:
            self._kept.clear()


PROGRAMS = Programs()
"""The programs of the process: one limit for all its pairs."""
