"""What rows will need is compiled in threads, while they go on."""

import contextlib
import threading
from collections.abc import Callable, Hashable


class Ahead:
    """Threads that compile beside what runs.

    What somebody waits for is compiled at once, one after the other; the rest when
    nothing else is.
    """

    def __init__(self) -> None:
        """Starts none."""
        self._threads: dict[Hashable, threading.Thread] = {}
        self._turn = threading.Lock()

    @property
    def is_busy(self) -> bool:
        """Whether something is being compiled."""
        return any(thread.is_alive() for thread in [*self._threads.values()])

    def has(
        self,
        key: Hashable,
        prepare: Callable[[], Callable[[], object]],
        *,
        is_urgent: bool,
    ) -> bool:
        """Returns whether something is compiled; a thread begins if none has.

        Args:
            key: Its name.
            prepare: Called now if a thread begins; returns what the thread calls. An
                error in it is left to whoever runs what is compiled.
            is_urgent: Whether somebody waits for it.
        """
        if key not in self._threads and (is_urgent or not self.is_busy):
            arguments = prepare(), is_urgent
            self._threads[key] = threading.Thread(target=self._run, args=arguments)
            self._threads[key].start()
        thread = self._threads.get(key)
        return thread is not None and not thread.is_alive()

    def wait(self, key: Hashable) -> None:
        """Waits until something is compiled, if anybody does it."""
        if key in self._threads:
            self._threads[key].join()

    def _run(self, compile_it: Callable[[], object], is_urgent: bool) -> None:
        turn = self._turn if is_urgent else contextlib.nullcontext()
        with turn, contextlib.suppress(Exception):
            compile_it()
