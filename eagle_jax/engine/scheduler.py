"""A queue of prompts through the rows of one running batch."""

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from eagle_jax.decoding import chunked_prefill, slots
from eagle_jax.decoding.chunked_prefill import PrefillState
from eagle_jax.decoding.growth import bucket_sizes
from eagle_jax.decoding.requests import Requests, bucket_length, check_request
from eagle_jax.decoding.state import DecodeState, StopReason
from eagle_jax.engine.prefixes import SMALL_CHUNK, find_prefix, prefill_tokens
from eagle_jax.engine.request import Request
from eagle_jax.engine.rows import Row, read_rows
from eagle_jax.engine.runner import Runner
from eagle_jax.engine.served import Served
from eagle_jax.engine.shared import Grammar, Shared
from eagle_jax.engine.stopping import StoppingText
from eagle_jax.errors import InputError
from eagle_jax.interface.prefill import PREFILL_CHUNK

ROUNDS = 16
"""The most rounds between two looks at the queue, while no row is free."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _LongPrompt:
    """A long prompt that is being read; the row `slot` is kept for it."""

    text: Served
    prefix: PrefillState
    num_slots: int
    slot: int
    num_left: int
    size: int


class Scheduler:
    """Texts that enter a row as soon as one is free; none depends on the others.

    Prompts of up to `PREFILL_CHUNK` tokens are read as a whole. A longer one is read
    chunk by chunk; after each, the running rows go on, and short prompts may enter.

    An exception or Ctrl-C in a step loses no text: `reset` gives back those that have
    not ended. It is always in one place at least: it goes to the next one before it
    leaves the last.

    Attributes:
        is_broken: Whether a step was interrupted: then nothing but `reset` helps.
    """

    def __init__(
        self, runner: Runner, change: Callable[[Shared], Runner] | None = None
    ) -> None:
        """Starts with an empty queue; nothing is compiled.

        Args:
            runner: The pair with its settings: `batch_size` is the number of rows, and
                `max_length` bounds every text. Its `prompt_bucket` is not read.
            change: A function that returns another for what requests share, but with
                the same tree, rows and lengths. Texts that the running ones share too
                little with wait for them to end. `None` refuses such texts.
        """
        self.is_broken = False
        self._runner = runner
        self._change = change
        depth = runner.decoder.depth
        self._sizes = bucket_sizes(
            # Prompts of any length get in.
            bucket_length(runner.max_length),
            prompt=0,
            depth=depth,
        )
        sharding = runner.pair.sharding
        # One prompt for each part of the mesh's data axis.
        self._num_together = 1 if sharding is None else sharding.mesh.shape["data"]
        self._waiting: list[Served] = []
        self._long: _LongPrompt | None = None
        self._rows: list[Served | None] = [None] * runner.batch_size
        # What each row holds, the texts that have ended included.
        self._held: list[list[int]] = [[] for _ in self._rows]
        self._done: list[Served] = []
        self._state: DecodeState | None = None
        self._is_turn_of_short = False

    def add(
        self,
        key: Any,
        prompt_ids: Sequence[int],
        settings: Request | None = None,
        *,
        priority: int = 0,
        is_streamed: bool = False,
        grammar: Grammar | None = None,
    ) -> None:
        """Puts a prompt into the queue.

        Args:
            key: What the text is known by.
            prompt_ids: The prompt's token ids, fewer than `max_length`.
            settings: The settings of the request, for one text whatever `n` is; `None`
                for the runner's.
            priority: Those with a lower one are read before; among equals the first.
            is_streamed: Whether every step returns the text as far as it goes.
            grammar: What `Pair.compile` made of the settings' constraint; without it,
                a new constraint is compiled here, which takes seconds.

        Raises:
            InputError: If the prompt or a setting cannot be used here.
        """
        self._check_usable()
        if settings is None:
            settings = self.request(self._runner.config.request.seed)
        pair = self._runner.pair
        vocab_size = pair.target.config.vocab_size
        check_request(
            f"prompt {key}" if isinstance(key, int) else "the prompt",
            prompt_ids,
            settings.seed,
            max_length=self._runner.max_length,
            vocab_size=vocab_size,
        )
        needs, own = Shared.of([settings], pair), self._runner.needs.grammar
        if grammar is not None:
            needs = dataclasses.replace(needs, grammar=grammar)
        if self._change is None and not self._runner.needs.fits(needs):
            raise InputError(
                "the request asks for what the runner was not made for: give it "
                "`shared`, or the scheduler `change`"
            )
        if needs.grammar == own:
            needs = dataclasses.replace(needs, grammar=own)
        elif self._change is not None:  # Refuses here what would break a step.
            needs = self._change(needs).needs
        text = Served(
            key=key,
            row=Row.begin(prompt_ids),
            settings=settings,
            priority=priority,
            is_streamed=is_streamed,
            needs=needs,
            length=len(prompt_ids) + 1,
        )
        if settings.stop or is_streamed:
            ids = text.row.prompt_ids
            text.stopping = StoppingText(pair.tokenizer, ids, settings)
        bisect.insort(self._waiting, text, key=lambda one: one.priority)

    def request(self, seed: int) -> Request:
        """Returns the runner's settings of a request, with another seed."""
        return self._runner.request(seed)

    def cancel(self, key: Any) -> bool:
        """Drops a text, wherever it is; its row is free for another.

        Returns:
            Whether there was such a text that had not been returned.
        """
        self._check_usable()
        for row, text in self._running.items():
            if text.key == key:
                self._free_row(row)
                return True
        if self._long is not None and self._long.text.key == key:
            self._long = None
            return True
        for texts in (self._waiting, self._done):
            for text in texts:
                if text.key == key:
                    texts.remove(text)
                    return True
        return False

    def reset(self) -> list[Served]:
        """Empties the queue and the rows; what was compiled is kept.

        Returns:
            The texts that had not ended, for `add_again`. The next step returns those
            that had ended.
        """
        read = [] if self._long is None else [self._long.text]
        # An interrupt may have met one on its way, in two places at once.
        left = dict.fromkeys([*self._running.values(), *read, *self._waiting])
        left = [text for text in left if text not in self._done]
        # Nothing can come between these.
        self._waiting, self._rows, self._long = [], [None] * len(self._rows), None
        self._forget()
        self.is_broken = False
        return left

    def _forget(self) -> None:
        self._state, self._held = None, [[] for _ in self._rows]

    def add_again(self, texts: Iterable[Served]) -> None:
        """Puts texts that `reset` returned into the queue: they begin anew."""
        for text in texts:
            self.add(
                text.key,
                text.row.prompt_ids,
                text.settings,
                priority=text.priority,
                is_streamed=text.is_streamed,
                grammar=text.needs and text.needs.grammar,
            )

    @property
    def num_waiting(self) -> int:
        """The prompts in the queue."""
        return len(self._waiting)

    @property
    def is_idle(self) -> bool:
        """Whether every text that was added has ended and been returned."""
        is_empty = not self._waiting and not any(self._rows)
        return is_empty and self._long is None and not self._done

    def step(self) -> list[Served]:
        """Reads prompts for the free rows and runs some rounds.

        Returns:
            The texts that have ended, and the streamed ones that are being written.
        """
        self._check_usable()
        self.is_broken = True
        self._adapt()
        self._prefill()
        self._write()
        self.is_broken = False
        served = self._done
        streamed = [text for text in self._running.values() if text.is_streamed]
        self._done = []  # The last thing: nothing can come between it and the return.
        return served + streamed

    def _check_usable(self) -> None:
        if self.is_broken:
            raise InputError(
                "a step of the scheduler was interrupted; call `reset()`, and give "
                "`add_again` what it returns"
            )

    @property
    def _free(self) -> list[int]:
        kept = None if self._long is None else self._long.slot
        return [row for row, text in enumerate(self._rows) if not text and row != kept]

    @property
    def _running(self) -> dict[int, Served]:
        """The texts that are being written, by row."""
        return {row: text for row, text in enumerate(self._rows) if text is not None}

    def _adapt(self) -> None:
        """Takes another runner if no row is busy and the next text needs one."""
        if self._fitting or not self._waiting or self._running or self._long:
            return
        assert self._change is not None, "what does not fit was refused"
        needs = [text.needs for text in self._waiting if text.needs is not None]
        first = needs[0]
        # What one text needed once is there for the next, but for the constraint.
        before = dataclasses.replace(self._runner.needs, grammar=first.grammar)
        same = [first, *(one for one in needs if one.mixes(first))]
        self._runner = self._change(functools.reduce(Shared.join, same, before))
        self._forget()

    @property
    def _fitting(self) -> list[Served]:
        """The texts that wait, up to the first that must wait for the running ones."""
        shared = self._runner.needs
        return [
            *itertools.takewhile(
                lambda text: text.needs is None or shared.fits(text.needs),
                self._waiting,
            )
        ]

    def _prefill(self) -> None:
        """Fills free rows; running ones wait for one chunk's tokens at most.

        The chunks of a long prompt and the short prompts after it take turns.
        """
        left = PREFILL_CHUNK if self._running else math.inf
        must_wait = self._running and self._is_turn_of_short and self._next_texts()
        if self._long is not None and not must_wait:
            self._prefill_chunk(self._long)
            left -= PREFILL_CHUNK
        while left > 0 and (texts := self._next_texts()):
            if self._long is None and self._in_chunks(texts[0]):
                self._start_long(texts[0])
                left -= PREFILL_CHUNK
            else:
                self._prefill_short(texts)
                left -= sum(prefill_tokens(len(text.row.prompt_ids)) for text in texts)

    def _next_texts(self) -> list[Served]:
        """Returns what enters next: a long prompt, or short ones that are read at once.

        While a long one is being read, short ones pass by the long ones that wait.
        """
        fitting = self._fitting
        if self._long is None and fitting and self._in_chunks(fitting[0]):
            return [fitting[0]] if self._free else []
        short = [text for text in fitting if not _is_long(text)]
        if short and short[0].settings.n > 1 and self._num_together == 1:
            return self._samples(short)
        return short[: min(len(self._free), self._num_together)]

    def _samples(self, short: list[Served]) -> list[Served]:
        """Returns samples of the first prompt, which is read once for all of them."""
        prompt = short[0].row.prompt_ids
        same = [*itertools.takewhile(lambda x: x.row.prompt_ids == prompt, short)]
        most = min(len(same), len(self._free))
        # A power of two: few numbers of samples, so few programs.
        return same[: 1 << (most.bit_length() - 1)] if most else []

    def _requests(self, texts: list[Served]) -> tuple[Requests, int]:
        """Returns the requests of one prefill, and the slots that they will enter."""
        prompts = [text.row.prompt_ids for text in texts]
        longest = max(map(len, prompts))
        requests = self._runner.filled(
            prompts,
            [text.settings for text in texts],
            rows=max(self._num_together, len(texts)),
            prompt_bucket=bucket_length(longest),
        )
        # The first token needs a slot of its own.
        return requests, self._ensure_slots(max(bucket_length(longest), longest + 1))

    def _ensure_slots(self, num_tokens: int) -> int:
        """Gives the state at least so many slots; returns how many it has."""
        runner, state = self._runner, self._state
        if state is not None and state.tokens.shape[1] >= num_tokens:
            return state.tokens.shape[1]
        size = next(size for size in self._sizes if size >= num_tokens)
        if state is not None:
            self._state = runner.grow(state, size)
            return size
        empty = slots.init_decode_state(
            runner.decoder,
            runner.pair.params,
            batch=runner.batch_size,
            num_slots=size,
            num_stop_tokens=runner.needs.num_stops,
            processor_room=runner.needs.room,
        )
        self._state = runner.put(empty)
        return size

    def _prefill_short(self, texts: list[Served]) -> None:
        runner, (requests, num_slots) = self._runner, self._requests(texts)
        self._is_turn_of_short = False
        started = runner.clock()
        # Together are the prompts of a mesh's parts, or samples of one.
        repeats = {} if self._num_together > 1 else {"num_samples": len(texts)}
        begun = runner.call(
            chunked_prefill.prefill, requests, num_slots=num_slots, **repeats
        )
        jax.block_until_ready(begun)
        for text in texts:
            text.prefill_seconds += (runner.clock() - started) / len(texts)
        self._enter(texts, self._free, begun)

    def _in_chunks(self, text: Served) -> bool:
        """Returns whether a prompt is read in chunks: a long one, or what is new."""
        return _is_long(text) or self._reusable(text)[1] > 0

    def _reusable(self, text: Served) -> tuple[int, int]:
        """See `find_prefix`; nothing is there, or can be reused, without a state."""
        is_told = text.needs is not None and text.needs.has_prompt
        if is_told or self._state is None or self._num_together > 1:
            return 0, 0
        return find_prefix(text.row.prompt_ids, self._held, self._runner.decoder)

    def _start_long(self, text: Served) -> None:
        ids = text.row.prompt_ids
        row, length = self._reusable(text)
        requests, num_slots = self._requests([text])
        size = PREFILL_CHUNK
        if length:
            size, state = SMALL_CHUNK, self._state
            assert state is not None, "it holds what is reused"
            prefix = self._runner.reuse(requests, state, row, length, size)
        else:
            prefix = self._runner.call(
                slots.start_prefill, requests, num_slots=num_slots
            )
        text.reused = length
        self._long = _LongPrompt(
            text=text,
            prefix=prefix,
            num_slots=num_slots,
            slot=self._free[0],
            num_left=-(-(len(ids) - length) // size),
            size=size,
        )
        self._waiting.remove(text)
        self._prefill_chunk(self._long)

    def _prefill_chunk(self, reading: _LongPrompt) -> None:
        """Reads the next chunk of the long prompt; after the last, its text begins."""
        runner, text = self._runner, reading.text
        self._is_turn_of_short = True
        started = runner.clock()
        reading = self._long = dataclasses.replace(
            reading,
            prefix=runner.call(slots.prefill_chunk, reading.prefix, size=reading.size),
            num_left=reading.num_left - 1,
        )
        jax.block_until_ready(reading.prefix)
        text.prefill_seconds += runner.clock() - started
        if reading.num_left:
            return
        prefix, num_slots = reading.prefix, reading.num_slots
        begun = runner.call(chunked_prefill.finish_prefill, prefix, num_slots=num_slots)
        # The running rows may have outgrown the size that it began with.
        if num_slots < (now := self._ensure_slots(0)):
            begun = runner.grow(begun, now)
        self._enter([text], [reading.slot], begun)

    def _enter(self, texts: list[Served], free: list[int], begun: DecodeState) -> None:
        """Puts texts that were read into rows, unless their first token ended them."""
        rows = read_rows(begun, self._runner.fetch)
        for place, (text, slot) in enumerate(zip(texts, free, strict=False)):
            text.take(rows[place])
            if text.row.stop_reason != StopReason.RUNNING:
                self._done.append(text)
            else:
                assert self._state is not None
                state = self._runner.insert(begun, self._state, slot, place)
                self._state, self._rows[slot] = state, text
                self._held[slot] = text.row.prompt_ids
            if self._long is not None and self._long.text is text:
                self._long = None
            else:
                self._waiting.remove(text)

    def _write(self) -> None:
        """Runs rounds, one alone while a prompt is to be read; finds what ended."""
        if not (running := self._running):
            return
        runner = self._runner
        longest = max(text.length for text in running.values())
        self._ensure_slots(longest + runner.decoder.depth + 1)
        is_filled = self._long is None and not (self._waiting and self._free)
        is_streamed = any(text.is_streamed for text in running.values())
        rounds = ROUNDS if is_filled and not is_streamed else 1
        started = runner.clock()
        self._state = runner.call(slots.run_rounds, self._state, rounds=rounds)
        jax.block_until_ready(self._state)
        self._look(running)
        share = (runner.clock() - started) / len(running)
        for text in running.values():
            text.decode_seconds += share

    def _look(self, running: dict[int, Served]) -> None:
        """Finds the texts that have ended."""
        runner, state = self._runner, self._state
        assert state is not None
        reasons, lengths = runner.fetch((state.stop_reason, state.lengths))
        seen = [
            row
            for row, text in running.items()
            if reasons[row] != StopReason.RUNNING or text.stopping is not None
        ]
        rows = read_rows(state, runner.fetch) if seen else []
        for row in seen:
            # Before a stop string cuts it: this is what the caches hold.
            self._held[row] = rows[row].prompt_ids + rows[row].generated_ids
        for row, text in running.items():
            text.length = int(lengths[row])
        for row in seen:
            text = running[row]
            text.take(rows[row])
            if text.row.stop_reason != StopReason.RUNNING:
                self._done.append(text)
                if reasons[row] == StopReason.RUNNING:
                    self._free_row(row)
                self._rows[row] = None
                runner.judge_fit([text.row])

    def _free_row(self, row: int) -> None:
        assert self._state is not None
        self._state = self._runner.free(self._state, row)
        self._rows[row] = None


def _is_long(text: Served) -> bool:
    return len(text.row.prompt_ids) > PREFILL_CHUNK
