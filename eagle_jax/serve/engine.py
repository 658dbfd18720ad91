"""The one thread that drives the scheduler."""

import contextlib
import dataclasses
import functools
import queue
import threading
import time
from collections.abc import Callable

from eagle_jax.engine.pair import Pair
from eagle_jax.engine.request import Asked
from eagle_jax.engine.results import Generation, Piece, Pieces
from eagle_jax.engine.scheduler import Scheduler
from eagle_jax.engine.served import Served
from eagle_jax.engine.shared import Grammar
from eagle_jax.errors import first_line, one_line
from eagle_jax.serve.errors import ServeError, failure
from eagle_jax.serve.metrics import Metrics

MOST_FAILURES = 3
"""The broken steps after which a text that was in all of them is given up."""


@dataclasses.dataclass(kw_only=True, eq=False)
class Text:
    """A text under way, which the scheduler knows by this object.

    Attributes:
        asked: Its prompt and its settings.
        grammar: Their constraint, compiled.
        deliver: What takes its pieces, and an error instead of the last one.
        pieces: What tells its pieces apart; `None` if it is wanted as a whole.
        has_begun: Whether a piece has arrived.
        num_failures: The steps that broke while it was there.
    """

    asked: Asked
    grammar: Grammar | None
    deliver: Callable[[Piece | Exception], None]
    pieces: Pieces | None
    has_begun: bool = False
    num_failures: int = 0


class Engine:
    """Runs a scheduler on a thread of its own; nothing else touches it.

    What waits, waits in the scheduler. The event loop gives orders to the thread, and
    what comes back is delivered on the loop.

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
        self.max_length = max_length or pair.source.config.max_positions
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
        self._texts: set[Text] = set()
        self._thread = threading.Thread(target=self._run, daemon=True, name="engine")

    @functools.cached_property
    def _scheduler(self) -> Scheduler:
        return self.pair.scheduler(
            batch_size=self._batch_size,
            max_length=self.max_length,
            acceptance=self.pair.config.acceptance,
        )

    def start(self) -> None:
        """Starts the thread."""
        if self.is_ready:
            _ = self._scheduler
        self._thread.start()

    def close(self) -> None:
        """Lets the thread end after its step, with an error for texts under way."""
        self.is_draining = True
        self._inbox.put(functools.partial(setattr, self, "is_closed", True))

    def join(self, timeout: float) -> bool:
        """Waits for the thread; returns whether it has ended."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def is_alive(self) -> bool:
        """Whether the thread takes orders."""
        return self.is_ready and self._thread.is_alive() and not self.is_draining

    @property
    def num_waiting(self) -> int:
        """The texts that wait for a row."""
        return self._scheduler.num_waiting if self.is_ready else 0

    @property
    def num_running(self) -> int:
        """The texts whose prompt is read or that are written."""
        return max(0, len(self._texts) - self.num_waiting)

    def add(self, text: Text) -> None:
        """Orders a text."""
        self._inbox.put(functools.partial(self._add, text))

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
                        self._inbox.get(block=self._scheduler.is_idle)()
                if not self.is_closed:
                    self._step()
        except Exception as error:
            self.error = error
        finally:
            self.is_draining = True
            for text in self._texts:
                text.deliver(ServeError("the server shuts down", 503))

    def _warm_up(self) -> None:
        short = dataclasses.replace(self.pair.request(), max_new_tokens=2, n=1)
        scheduler, started = self._scheduler, time.monotonic()
        self._report("compiling")
        for is_streamed in (False, True):
            scheduler.add("warm-up", [0], short, is_streamed=is_streamed)
            while not scheduler.is_idle:
                scheduler.step()
        self._report(f"compiled in {time.monotonic() - started:.1f} s")

    def _add(self, text: Text) -> None:
        try:
            ids, settings = text.asked
            is_streamed = text.pieces is not None
            self._scheduler.add(
                text, ids, settings, is_streamed=is_streamed, grammar=text.grammar
            )
            self._texts.add(text)
        except Exception as error:
            text.deliver(error)

    def _drop(self, text: Text) -> None:
        if text in self._texts:
            self._texts.remove(text)
            self._scheduler.cancel(text)

    def _step(self) -> None:
        try:
            found = self._scheduler.step()
        except Exception as error:
            self._begin_anew(error)
            return
        for served in found:
            try:
                piece = self._piece(served)
            except Exception as error:
                self._report(f"error: a text was not delivered: {_shown(error)}")
                served.key.deliver(failure())
                self._drop(served.key)
            else:
                if piece.finish_reason is not None:
                    self._texts.discard(served.key)
                served.key.deliver(piece)

    def _piece(self, served: Served) -> Piece:
        if served.key.pieces is not None:
            return served.key.pieces.next(served)
        whole = Generation.of(self.pair.tokenizer, served)
        return Piece(
            index=0,
            text=whole.text,
            token_ids=whole.token_ids,
            finish_reason=whole.finish_reason,
            generation=whole,
        )

    def _begin_anew(self, error: Exception) -> None:
        """Lets the texts of a broken step begin anew, but for those that had enough."""
        self._report(f"error: a step broke, its texts begin anew: {_shown(error)}")
        again: list[Served] = []
        for served in self._scheduler.reset():
            served.key.num_failures += 1
            if served.key.num_failures < MOST_FAILURES:
                again.append(served)
            else:
                self._texts.discard(served.key)
                served.key.deliver(failure())
        self._scheduler.add_again(again)


def _shown(error: Exception) -> str:
    return one_line(f"{type(error).__name__}: {first_line(error)}")
