"""The one thread that drives an engine, and the requests whose texts it writes."""

import asyncio
import collections
import contextlib
import functools
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from eagle_jax.engine import Engine, Pair, Piece, Text
from eagle_jax.errors import InputError, first_line, one_line
from eagle_jax.serve.errors import ServeError, failure
from eagle_jax.serve.metrics import Metrics

MOST_FAILURES = 3
"""The broken steps after which a text that was in all of them is given up."""

Deliver = Callable[[Piece | Exception], None]
"""What takes a text's pieces, and an error instead of the last one."""


class Driver:
    """Runs an engine on a thread of its own; nothing else touches it.

    What waits, waits in the engine. The event loop gives orders to the thread, and what
    comes back is delivered on the loop.

    Attributes:
        pair: The pair that writes.
        max_length: The most tokens of a prompt and its text together.
        max_texts: The most texts under way, those that wait included.
        metrics: What is counted.
        is_ready: Whether what it writes with is loaded and compiled.
        error: What the thread died of.
        num_claimed: The texts under way, and the requests being read.
        is_draining: Whether new requests are refused.
        is_closed: Whether the thread was told to end.
    """

    def __init__(
        self,
        pair: Pair,
        *,
        batch_size: int,
        max_waiting: int,
        max_length: int | None = None,
        report: Callable[[str], None] = lambda line: None,
        when_ready: Callable[[], None] | None = None,
    ) -> None:
        """Reads nothing yet.

        Args:
            pair: The pair that writes.
            batch_size: The texts that are written together.
            max_waiting: The texts that may wait beside them.
            max_length: The most tokens of a prompt and its text together; `None` for
                the target's positions.
            report: What is told of steps that broke, and of compiling.
            when_ready: What is called once the thread has loaded the pair and compiled
                what short requests need; `None` loads in `start` and compiles later.
        """
        self.pair = pair
        self.max_length = max_length or pair.max_positions
        self.max_texts = batch_size + max_waiting
        self.metrics = Metrics()
        self.is_ready = when_ready is None
        self.error: Exception | None = None
        self.num_claimed = 0
        self.is_draining = False
        self.is_closed = False
        self._report = report
        self._when_ready = when_ready
        self._batch_size = batch_size
        self._inbox = queue.SimpleQueue[Callable[[], None]]()
        self._under_way: dict[Text, Deliver] = {}
        self._failures = collections.Counter[Text]()
        self._thread = threading.Thread(target=self._run, daemon=True, name="engine")

    @functools.cached_property
    def _engine(self) -> Engine:
        return self.pair.engine(
            batch_size=self._batch_size,
            max_length=self.max_length,
            compiles_beside=True,
        )

    def start(self) -> None:
        """Starts the thread."""
        if self.is_ready:
            _ = self._engine
        self._thread.start()

    def close(self) -> None:
        """Lets the thread end after its step, with an error for texts under way."""
        self.is_draining = True
        self._inbox.put(functools.partial(setattr, self, "is_closed", True))

    def join(self, timeout: float) -> bool:
        """Waits for the thread; returns whether it and all that compile have ended."""
        self._thread.join(timeout)
        is_compiling = self.is_ready and self._engine.is_compiling
        return not (self._thread.is_alive() or is_compiling)

    @property
    def is_alive(self) -> bool:
        """Whether the thread takes orders."""
        return self.is_ready and self._thread.is_alive() and not self.is_draining

    @property
    def num_waiting(self) -> int:
        """The texts that wait for a row."""
        return self._engine.num_waiting if self.is_ready else 0

    @property
    def num_running(self) -> int:
        """The texts whose prompt is read or that are written."""
        return max(0, len(self._under_way) - self.num_waiting)

    def add(self, text: Text, deliver: Deliver) -> None:
        """Orders a text."""
        self._inbox.put(functools.partial(self._add, text, deliver))

    def drop(self, text: Text) -> None:
        """Orders that nobody waits for a text any more."""
        self._inbox.put(functools.partial(self._drop, text))

    def _run(self) -> None:
        try:
            if self._when_ready is not None:
                self._warm_up()
                self.is_ready = True
                self._when_ready()
            while not self.is_closed:
                with contextlib.suppress(queue.Empty):
                    while not self.is_closed:
                        self._inbox.get(block=self._engine.is_idle)()
                if not self.is_closed:
                    self._step()
        except Exception as error:
            self.error = error
        finally:
            self.is_draining = True
            for deliver in self._under_way.values():
                deliver(ServeError("the server shuts down", 503))

    def _warm_up(self) -> None:
        engine, started = self._engine, time.monotonic()
        self._report("compiling")
        engine.add(self.pair.text([0], self.pair.request(max_new_tokens=2, n=1)))
        while not engine.is_idle:
            engine.step()
        self._report(f"compiled in {time.monotonic() - started:.1f} s")

    def _add(self, text: Text, deliver: Deliver) -> None:
        try:
            self._engine.add(text)
            self._under_way[text] = deliver
        except Exception as error:
            deliver(error)

    def _drop(self, text: Text) -> None:
        if text in self._under_way:
            self._leave(text)
            self._engine.cancel(text)

    def _leave(self, text: Text) -> Deliver:
        self._failures.pop(text, None)
        return self._under_way.pop(text)

    def _step(self) -> None:
        try:
            found = self._engine.step()
        except Exception as error:
            self._begin_anew(error)
            return
        for text in found:
            deliver = self._under_way[text]
            try:
                piece = text.piece()
            except Exception as error:
                self._report(f"error: a text was not delivered: {_shown(error)}")
                deliver(failure())
                self._drop(text)
            else:
                if piece.finish_reason is not None:
                    self._leave(text)
                deliver(piece)

    def _begin_anew(self, error: Exception) -> None:
        """Lets the texts of a broken step begin anew, but for those that had enough."""
        self._report(f"error: a step broke, its texts begin anew: {_shown(error)}")
        for text in self._engine.reset():
            self._failures[text] += 1
            if self._failures[text] < MOST_FAILURES:
                self._engine.add(text)
            else:
                self._leave(text)(failure())


def _shown(error: Exception) -> str:
    return one_line(f"{type(error).__name__}: {first_line(error)}")


class Call(contextlib.AbstractContextManager["Call"]):
    """The texts of one request, from its first byte to the end of its answer.

    A context manager: what is still under way when it ends is dropped.

    Attributes:
        num_left: The texts that have not ended.
        tokens: How many the prompts have, and how many of the texts have arrived.
    """

    def __init__(self, driver: Driver) -> None:
        """Takes a place, on the running event loop.

        Raises:
            ServeError: If too many texts are under way, or the server shuts down.
        """
        self.num_left, self.tokens = 0, [0, 0]
        self._driver = driver
        self._texts: Sequence[Text] = ()
        self._begun = set[int]()
        self._arrived = asyncio.Queue[Piece | Exception]()
        self._loop = asyncio.get_running_loop()
        self._started = time.monotonic()
        self._claimed = 0
        self._has_failed = False
        try:
            self._claim(1)
        except ServeError:
            driver.metrics.count_request("refused")
            raise

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Drops what nobody waits for, and counts the request."""
        for text in self._texts:
            self._driver.drop(text)
        self._driver.num_claimed -= self._claimed
        outcome = "cancelled" if self.num_left else "done"
        if isinstance(error, InputError) and getattr(error, "status", 400) < 500:
            outcome = "refused"
        elif isinstance(error, Exception) or self._has_failed:
            outcome = "failed"
        self._driver.metrics.count_request(outcome)

    def ask(self, texts: Sequence[Text]) -> None:
        """Orders the texts.

        Raises:
            ServeError: If too many are under way.
        """
        self._claim(len(texts) - self._claimed)
        self.num_left, self._texts = len(texts), texts
        for text in texts:
            self._driver.add(text, self._deliver)

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yields what arrives.

        Raises:
            InputError: If a text cannot be had.
        """
        while self.num_left:
            piece = await self._arrived.get()
            if isinstance(piece, Exception):
                self._has_failed = True
                raise piece
            self.num_left -= piece.finish_reason is not None
            yield piece

    def _claim(self, more: int) -> None:
        driver = self._driver
        if driver.is_draining:
            raise ServeError("the server shuts down", 503)
        if not driver.is_ready:
            raise ServeError("the server compiles its programs; ask again later", 503)
        if driver.num_claimed + more > driver.max_texts:
            raise ServeError(
                f"{driver.num_claimed} texts are under way, of {driver.max_texts} at "
                "most; ask again later",
                429,
            )
        driver.num_claimed += more
        self._claimed += more

    def _deliver(self, piece: Piece | Exception) -> None:
        with contextlib.suppress(RuntimeError):  # The loop may have ended.
            self._loop.call_soon_threadsafe(self._arrive, piece)

    def _arrive(self, piece: Piece | Exception) -> None:
        """Takes a piece, on the event loop."""
        self._arrived.put_nowait(piece)
        if isinstance(piece, Exception):
            return
        self.tokens[1] += len(piece.token_ids)
        metrics, index = self._driver.metrics, piece.index
        if self._texts[index].is_watched and index not in self._begun:
            self._begun.add(index)
            metrics.count_first_token(time.monotonic() - self._started)
        if piece.generation is not None:
            metrics.count_text(piece.generation)
