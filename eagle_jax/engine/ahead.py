"""What rows will need is compiled in threads, while they go on."""

import threading
from collections.abc import Callable, Hashable


class Ahead:
    """Threads that compile; XLA does so without the interpreter's lock."""

    def __init__(self) -> None:
        """Starts none."""
        self._threads: dict[Hashable, threading.Thread] = {}

    @property
    def is_busy(self) -> bool:
        """Whether something is being compiled."""
        return any(thread.is_alive() for thread in [*self._threads.values()])

    def has(self, key: Hashable, prepare: Callable[[], Callable[[], object]]) -> bool:
        """Returns whether something is compiled; a thread begins if nobody has.

        Args:
            key: Its name.
            prepare: Called now if a thread begins; returns what the thread calls. An
                error in it is left to whoever runs what is compiled.
        """
        if key not in self._threads:
            thread = threading.Thread(target=_run, args=(prepare(),), name="compiling")
            self._threads[key] = thread
            thread.start()
        return not self._threads[key].is_alive()

    def wait(self, key: Hashable) -> None:
        """Waits until something is compiled, if anybody does it."""
        if key in self._threads:
            self._threads[key].join()


def _run(compile_it: Callable[[], object]) -> None:
    try:
        compile_it()
    except Exception:  # Whoever runs it meets it again, and tells it.
        return
