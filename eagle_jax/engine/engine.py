"""Texts through the rows of one running batch: the only host loop."""

import bisect
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from eagle_jax.decoding.requests import check_request
from eagle_jax.decoding.state import DecodeState
from eagle_jax.engine.needs import BatchNeeds
from eagle_jax.engine.prefill import (
    Reading,
    is_one_prefill,
    prefill_tokens,
    with_one_prompt,
)
from eagle_jax.engine.programs import Programs
from eagle_jax.engine.rows import Rows
from eagle_jax.engine.text import Text
from eagle_jax.errors import InputError
from eagle_jax.interface.prefill import PREFILL_CHUNK

if TYPE_CHECKING:
    from eagle_jax.engine.pair import Pair

ROUNDS = 16
"""The most rounds between two looks at the texts, where somebody looks."""


class Engine:
    """Texts that enter a row as soon as one is free; none depends on the others.

    Prompts of up to `PREFILL_CHUNK` tokens are read as a whole. A longer one is read
    chunk by chunk; after each, the running rows go on, and short prompts may enter.
    Texts whose programs the running ones do not have wait for them to end.

    An exception or Ctrl-C in a step loses no text: `reset` gives back those that have
    not ended. A text is always in one place at least: it goes to the next one before it
    leaves the last.

    Attributes:
        pair: What writes.
        batch_size: The number of rows, `B`.
        max_length: The most tokens of a prompt and its text together.
        is_broken: Whether a step was interrupted: then nothing but `reset` helps.
    """

    def __init__(
        self,
        pair: "Pair",
        *,
        batch_size: int,
        max_length: int,
        compiles_beside: bool = False,
    ) -> None:
        """Starts empty, and compiles nothing; reads the pair's weights.

        Its arguments are the attributes and, for `compiles_beside`, see `Pair.engine`.
        """
        self.pair, self.batch_size, self.max_length = pair, batch_size, max_length
        self.is_broken = False
        self._waiting: list[Text] = []
        self._reading: Reading | None = None
        self._rows = Rows(Programs(pair, BatchNeeds()), batch_size, max_length)
        self._rows.compiles_beside = compiles_beside
        self._is_turn_of_short = False
        # What waits for a compiler, while others pass by.
        self._held_up: list[Text] = []

    def add(self, text: Text, *, name: str = "the prompt") -> Text:
        """Puts a text into the queue; one that `reset` returned begins anew.

        Args:
            text: What `Pair.texts` returned.
            name: What an error calls its prompt.

        Raises:
            InputError: If its prompt or a setting cannot be used here.
        """
        self._check_usable()
        check_request(
            name,
            text.prompt_ids,
            text.request.seed,
            max_length=self.max_length,
            vocab_size=self.pair.vocab_size,
        )
        # Refuses here what would break a step.
        text.needs = text.needs.compiled(self.pair, self._needs.grammar)
        text.begin()
        bisect.insort(self._waiting, text, key=lambda one: one.priority)
        return text

    def cancel(self, text: Text) -> bool:
        """Drops a text, wherever it is; its row is free for another.

        Returns:
            Whether it was here and had not been returned as ended.
        """
        self._check_usable()
        for row, one in self._rows.running.items():
            if one is text:
                self._rows.free(row)
                return True
        if self._reading is not None and self._reading.text is text:
            self._reading = None
            return True
        for texts in (self._waiting, self._rows.done):
            if text in texts:
                texts.remove(text)
                return True
        return False

    def reset(self) -> list[Text]:
        """Empties the queue and the rows; what was compiled is kept.

        Returns:
            The texts that had not ended, for `add`. The next step returns those that
            had.
        """
        read = [] if self._reading is None else [self._reading.text]
        # An interrupt may have met one on its way, in two places at once.
        left = dict.fromkeys([*self._rows.running.values(), *read, *self._waiting])
        left = [text for text in left if text not in self._rows.done]
        # Nothing can come between these.
        self._waiting, self._reading = [], None
        self._rows.empty(self._rows.programs, self.batch_size)
        self.is_broken = False
        return left

    @property
    def num_waiting(self) -> int:
        """The texts in the queue."""
        return len(self._waiting)

    @property
    def is_compiling(self) -> bool:
        """Whether a thread compiles for later rounds; the process ends after it."""
        return self._rows.ahead.is_busy

    @property
    def is_idle(self) -> bool:
        """Whether every text that was added has ended and been returned."""
        rows = self._rows
        return not (self._waiting or self._reading or rows.running or rows.done)

    def step(
        self, rounds: int | None = ROUNDS, *, until_one_ends: bool = False
    ) -> list[Text]:
        """Reads prompts for the free rows and runs rounds.

        Args:
            rounds: The most rounds; `None` for as many as it takes until a row is free
                for a text that waits or, if none waits, all texts have ended: with a
                tree of one size one program from their second tokens to their last
                (on CPUs until half of them have ended), otherwise one per stretch.
            until_one_ends: Whether a free row ends it although no text waits yet.

        Returns:
            The texts that have ended, and those being written that are watched.
        """
        self._check_usable()
        self.is_broken = True
        self._adapt()
        # Who looks between rounds wants short prompts before long ones.
        texts = self._read_at_once() if rounds is None else []
        if texts:
            self._rows.read_as_all(texts)
            del self._waiting[: len(texts)]
            self._rows.look()
        else:
            self._prefill()
        if self._rows.running:
            self._write(rounds, until_one_ends=until_one_ends)
        self.is_broken = False
        found = [x for x in self._rows.running.values() if x.is_watched]
        found = self._rows.done + found
        self._rows.done = []  # The last thing: nothing can come before the return.
        return found

    def run(self) -> Iterator[Text]:
        """Writes all texts that were added; yields each as it ends or is watched."""
        while not self.is_idle:
            yield from self.step(rounds=None)

    def write(self, texts: Iterable[Text] = ()) -> None:
        """Writes texts, and all that were added before, to their ends."""
        for text in texts:
            self.add(text)
        for _ in self.run():
            pass

    def warm_up(self, texts: Sequence[Text], *, with_growth: bool = False) -> None:
        """Compiles what texts need that are read at once, while the engine is idle.

        Args:
            texts: Texts like those that will be added; their prompts are not read.
            with_growth: Whether to compile the loop for the larger caches too, which
                few texts reach.
        """
        needs = functools.reduce(BatchNeeds.join, [text.needs for text in texts])
        programs = Programs(self.pair, needs.compiled(self.pair))
        self._rows.empty(programs, self.batch_size)
        self._rows.warm_up(texts, with_growth=with_growth)

    def _check_usable(self) -> None:
        if self.is_broken:
            raise InputError(
                "a step of the engine was interrupted; call `reset()`, and give `add` "
                "what it returns"
            )

    @property
    def _needs(self) -> BatchNeeds:
        return self._rows.programs.needs

    @property
    def _num_free(self) -> int:
        """The free rows, but for one of the prompt that is being read."""
        return self._rows.texts.count(None) - (self._reading is not None)

    def _adapt(self) -> None:
        """Takes other programs if no row is busy and the next text needs them."""
        is_busy = self._rows.running or self._reading
        if self._fitting or not self._waiting or is_busy:
            return
        needs = [text.needs for text in self._waiting]
        grammar = needs[0].grammar
        # What one text needed once is there for the next, but for the constraint.
        before = self._needs.with_grammar(grammar)
        same = [one for one in needs if one.grammar == grammar]
        needed = functools.reduce(BatchNeeds.join, same, before)
        self._rows.empty(Programs(self.pair, needed), self.batch_size)

    @property
    def _fitting(self) -> list[Text]:
        """The texts that wait, up to the first that must wait for the running ones."""
        fits = self._needs.fits
        return [*itertools.takewhile(lambda text: fits(text.needs), self._waiting)]

    def _prefill(self) -> None:
        """Fills free rows; running ones wait for one chunk's tokens at most.

        The chunks of a long prompt and the short prompts after it take turns.
        """
        is_running = bool(self._rows.running)
        left = PREFILL_CHUNK if is_running else math.inf
        must_wait = is_running and self._is_turn_of_short and self._next_texts()
        if self._reading is not None and not must_wait:
            self._read_chunk(self._reading)
            left -= PREFILL_CHUNK
        self._held_up = []
        while left > 0 and (texts := self._next_texts()):
            in_chunks = self._reading is None and self._in_chunks(texts[0])
            if self._rows.running and not self._rows.can_read(
                texts, in_chunks=in_chunks
            ):
                self._held_up += texts
                continue
            if in_chunks:
                self._reading = self._rows.start_reading(texts[0])
                self._waiting.remove(texts[0])
                self._read_chunk(self._reading)
                left -= PREFILL_CHUNK
            else:
                self._is_turn_of_short = False
                begun = self._rows.read(texts)
                self._enter(texts, begun)
                left -= sum(prefill_tokens(len(text.prompt_ids)) for text in texts)

    def _read_at_once(self) -> list[Text]:
        """Returns the texts whose prefill becomes the state of all rows.

        They are all that wait, if no row is busy; of a single row, the next one.
        """
        if self._rows.running or self._reading:
            return []
        rows, texts = self.batch_size, self._fitting
        texts = texts[:1] if rows == 1 else texts
        lengths = [len(text.prompt_ids) for text in texts]
        is_one = rows == 1 or is_one_prefill(lengths, rows)
        has_prefix = any(self._rows.find_prefix(text)[1] for text in texts)
        return texts if is_one and not has_prefix else []

    def _next_texts(self) -> list[Text]:
        """Returns what enters next: a long prompt, or short ones that are read at once.

        While a long one is being read, short ones pass by the long ones that wait.
        """
        fitting, parts = self._fitting, self.pair.num_parts
        fitting = [text for text in fitting if text not in self._held_up]
        if self._reading is None and fitting and self._in_chunks(fitting[0]):
            return [fitting[0]] if self._num_free else []
        short = [text for text in fitting if not _is_long(text)]
        if short and short[0].request.n > 1 and parts == 1:
            return with_one_prompt(short, self._num_free)
        # One prompt for each part of the mesh's data axis.
        return short[: min(self._num_free, parts)]

    def _in_chunks(self, text: Text) -> bool:
        """Returns whether a prompt is read in chunks: a long one, or what is new."""
        return _is_long(text) or self._rows.find_prefix(text)[1] > 0

    def _read_chunk(self, reading: Reading) -> None:
        """Reads the next chunk of the long prompt; after the last, its text begins."""
        programs, text = self._rows.programs, reading.text
        self._is_turn_of_short = True
        with programs.timing([text], "prefill_seconds"):
            reading = self._reading = reading.next(programs)
        if not reading.sizes:
            begun = self._rows.finish_reading(reading)
            self._enter([text], begun)

    def _enter(self, texts: list[Text], begun: DecodeState) -> None:
        """Puts texts that were read into rows, unless their first token ended them."""
        rows, news = self._rows, self._rows.programs.news(begun)
        for place, text in enumerate(texts):
            text.take(news, place)
            if text.has_ended:
                rows.done.append(text)
            else:
                rows.enter(text, begun, place)
            if self._reading is not None and self._reading.text is text:
                self._reading = None
            else:
                self._waiting.remove(text)

    def _write(self, rounds: int | None, *, until_one_ends: bool) -> None:
        """Runs rounds, one alone while a prompt is read or rounds are looked at."""
        texts = self._rows.running.values()
        looks = any(text.is_watched or text.keeps_rounds for text in texts)
        if looks or self._reading is not None or self._next_texts():
            rounds = 1
        elif any(text.request.stop for text in texts):
            rounds = min(rounds or ROUNDS, ROUNDS)  # The host alone sees stop strings.
        # Who waits, or looks, wants the first row that is free.
        until_one_ends |= bool(self._waiting) or rounds is not None
        self._rows.write(rounds, until_one_ends=until_one_ends)
        self._rows.look()


def _is_long(text: Text) -> bool:
    return len(text.prompt_ids) > PREFILL_CHUNK
