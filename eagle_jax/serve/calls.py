"""One request: from its place among those under way to the last piece of its texts."""

import asyncio
import contextlib
import dataclasses
import functools
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from eagle_jax.engine.request import Asked
from eagle_jax.engine.results import Piece, Pieces
from eagle_jax.engine.shared import Grammar
from eagle_jax.errors import InputError
from eagle_jax.serve.engine import Engine, Text
from eagle_jax.serve.errors import ServeError


class Call:
    """The texts of one request, from its first byte to the end of its answer.

    A context manager: what is still under way when it ends is dropped.

    Attributes:
        num_left: The texts that have not ended.
        tokens: How many the prompts have, and how many of the texts have arrived.
    """

    def __init__(self, engine: Engine) -> None:
        """Takes a place, on the running event loop.

        Raises:
            ServeError: If too many texts are under way, or the server shuts down.
        """
        self.num_left, self.tokens = 0, [0, 0]
        self._engine = engine
        self._texts: list[Text] = []
        self._arrived = asyncio.Queue[Piece | Exception]()
        self._loop = asyncio.get_running_loop()
        self._started = time.monotonic()
        self._claimed = 0
        self._has_failed = False

    def __enter__(self) -> "Call":
        """Returns the call."""
        try:
            self._claim(1)
        except ServeError:
            self._engine.metrics.count_request("refused")
            raise
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Drops what nobody waits for, and counts the request."""
        for text in self._texts:
            self._engine.drop(text)
        self._engine.num_claimed -= self._claimed
        outcome = "cancelled" if self.num_left else "done"
        if isinstance(error, InputError) and getattr(error, "status", 400) < 500:
            outcome = "refused"
        elif isinstance(error, Exception) or self._has_failed:
            outcome = "failed"
        self._engine.metrics.count_request(outcome)

    def ask(
        self, asked: Sequence[Asked], grammar: Grammar | None, *, is_streamed: bool
    ) -> None:
        """Orders the texts, whose constraint is compiled.

        Raises:
            ServeError: If too many are under way.
        """
        self._claim(len(asked) - self._claimed)
        self.num_left = len(asked)
        for index, one in enumerate(asked):
            pieces = Pieces(self._engine.pair.tokenizer) if is_streamed else None
            deliver = functools.partial(self._deliver, index)
            text = Text(asked=one, grammar=grammar, deliver=deliver, pieces=pieces)
            self._texts.append(text)
            self._engine.add(text)

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yields what arrives, with the text's number as `index`.

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
        engine = self._engine
        if engine.is_draining:
            raise ServeError("the server shuts down", 503)
        if not engine.is_ready:
            raise ServeError("the server compiles its programs; ask again later", 503)
        if engine.num_claimed + more > engine.max_texts:
            raise ServeError(
                f"{engine.num_claimed} texts are under way, of {engine.max_texts} at "
                "most; ask again later",
                429,
            )
        engine.num_claimed += more
        self._claimed += more

    def _deliver(self, index: int, piece: Piece | Exception) -> None:
        if isinstance(piece, Piece):
            piece = dataclasses.replace(piece, index=index)
        with contextlib.suppress(RuntimeError):  # The loop may have ended.
            self._loop.call_soon_threadsafe(self._arrive, piece)

    def _arrive(self, piece: Piece | Exception) -> None:
        """Takes a piece, on the event loop."""
        self._arrived.put_nowait(piece)
        if isinstance(piece, Exception):
            return
        self.tokens[1] += len(piece.token_ids)
        metrics, text = self._engine.metrics, self._texts[piece.index]
        if text.pieces is not None and not text.has_begun:
            text.has_begun = True
            metrics.count_first_token(time.monotonic() - self._started)
        if piece.generation is not None:
            metrics.count_text(piece.generation)
