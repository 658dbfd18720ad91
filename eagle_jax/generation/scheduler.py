"""A queue of prompts through the rows of one running batch."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax

from eagle_jax.decoding import slots
from eagle_jax.decoding.chunked_prefill import PrefillState
from eagle_jax.decoding.growth import bucket_sizes
from eagle_jax.decoding.requests import Requests, bucket_length, check_request
from eagle_jax.decoding.state import DecodeState, StopReason
from eagle_jax.errors import InputError
from eagle_jax.generation.rows import Row, read_rows
from eagle_jax.generation.runner import Runner
from eagle_jax.prefill import PREFILL_CHUNK

ROUNDS = 16
"""The most rounds between two looks at the queue, while no row is free."""


@dataclasses.dataclass(kw_only=True, eq=False)
class Served:
    """A text: one that waits, is being written or has ended.

    Attributes:
        key: What `Scheduler.add` was given to know it by.
        row: The text; until it has ended, its prompt alone.
        seed: The seed of its draws.
        length: The tokens of prompt and output, when they were last counted.
        prefill_seconds: The seconds of reading its prompt.
        decode_seconds: Its share of the seconds of rounds that it had with others.
    """

    key: Any
    row: Row
    seed: int = 0
    length: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class _LongPrompt:
    """A long prompt that is being read; the row `slot` is kept for it."""

    text: Served
    prefix: PrefillState
    num_slots: int
    slot: int
    num_left: int


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

    def __init__(self, runner: Runner) -> None:
        """Starts with an empty queue; nothing is compiled.

        Args:
            runner: The pair with its settings: `batch_size` is the number of rows, and
                `max_length` bounds every text. Its `prompt_bucket` is not read.
        """
        self.is_broken = False
        self._runner = runner
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
        self._done: list[Served] = []
        self._state: DecodeState | None = None
        self._is_turn_of_short = False

    def add(self, key: Any, prompt_ids: Sequence[int], seed: int) -> None:
        """Puts a prompt at the queue's end.

        Args:
            key: What the text is known by when it has ended.
            prompt_ids: The prompt's token ids, fewer than `max_length`.
            seed: The seed of its draws.
        """
        self._check_usable()
        check_request(
            f"prompt {key}" if isinstance(key, int) else "the prompt",
            prompt_ids,
            seed,
            max_length=self._runner.max_length,
            vocab_size=self._runner.pair.target.config.vocab_size,
        )
        row = Row(
            prompt_ids=list(prompt_ids),
            generated_ids=[],
            stop_reason=StopReason.RUNNING,
            accept_lengths=[],
        )
        length = len(prompt_ids) + 1
        self._waiting.append(Served(key=key, row=row, seed=seed, length=length))

    def reset(self) -> list[tuple[Any, list[int], int]]:
        """Empties the queue and the rows; what was compiled is kept.

        Returns:
            The key, the prompt and the seed of every text that had not ended, for
            `add`: it begins anew. The next step returns those that had ended.
        """
        read = [] if self._long is None else [self._long.text]
        # An interrupt may have met one on its way, in two places at once.
        left = dict.fromkeys([*self._running.values(), *read, *self._waiting])
        left = [text for text in left if text not in self._done]
        given = [(text.key, text.row.prompt_ids, text.seed) for text in left]
        # Nothing can come between these.
        self._waiting, self._rows, self._long = [], [None] * len(self._rows), None
        self._state, self.is_broken = None, False
        return given

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
        """Reads prompts for the free rows, runs some rounds, returns what has ended."""
        self._check_usable()
        self.is_broken = True
        self._prefill()
        self._write()
        self.is_broken = False
        served = self._done
        self._done = []  # The last thing: nothing can come between it and the return.
        return served

    def _check_usable(self) -> None:
        if self.is_broken:
            raise InputError(
                "a step of the scheduler was interrupted; call `reset()`, and `add` "
                "again what it returns"
            )

    @property
    def _free(self) -> list[int]:
        kept = None if self._long is None else self._long.slot
        return [row for row, text in enumerate(self._rows) if not text and row != kept]

    @property
    def _running(self) -> dict[int, Served]:
        """The texts that are being written, by row."""
        return {row: text for row, text in enumerate(self._rows) if text is not None}

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
            if _is_long(texts[0]):
                self._start_long(texts[0])
                left -= PREFILL_CHUNK
            else:
                self._prefill_short(texts)
                left -= sum(prefill_tokens(len(text.row.prompt_ids)) for text in texts)

    def _next_texts(self) -> list[Served]:
        """Returns what enters next: a long prompt, or short ones that are read at once.

        While a long one is being read, short ones pass by the long ones that wait.
        """
        if self._long is None and self._waiting and _is_long(self._waiting[0]):
            return [self._waiting[0]] if self._free else []
        short = (text for text in self._waiting if not _is_long(text))
        most = min(len(self._free), self._num_together)
        return list(itertools.islice(short, most))

    def _requests(self, texts: list[Served]) -> tuple[Requests, int]:
        """Returns the requests of one prefill, and the slots that they will enter."""
        prompts = [text.row.prompt_ids for text in texts]
        longest = max(map(len, prompts))
        requests = self._runner.filled(
            prompts,
            [text.seed for text in texts],
            rows=self._num_together,
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
        ignored = runner.config.decoding.ignore_eos
        empty = slots.init_decode_state(
            runner.decoder,
            runner.pair.params,
            batch=runner.batch_size,
            num_slots=size,
            num_stop_tokens=0 if ignored else len(runner.pair.stop_tokens),
        )
        self._state = runner.put(empty)
        return size

    def _prefill_short(self, texts: list[Served]) -> None:
        runner, (requests, num_slots) = self._runner, self._requests(texts)
        self._is_turn_of_short = False
        started = runner.clock()
        begun, _ = runner.call(slots.prefill, requests, num_slots=num_slots)
        jax.block_until_ready(begun)
        for text in texts:
            text.prefill_seconds += (runner.clock() - started) / len(texts)
        self._enter(texts, self._free, begun)

    def _start_long(self, text: Served) -> None:
        requests, num_slots = self._requests([text])
        prefix = self._runner.call(slots.start_prefill, requests, num_slots=num_slots)
        self._long = _LongPrompt(
            text=text,
            prefix=prefix,
            num_slots=num_slots,
            slot=self._free[0],
            num_left=-(-len(text.row.prompt_ids) // PREFILL_CHUNK),
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
            prefix=runner.call(slots.prefill_chunk, reading.prefix),
            num_left=reading.num_left - 1,
        )
        jax.block_until_ready(reading.prefix)
        text.prefill_seconds += runner.clock() - started
        if reading.num_left:
            return
        prefix, num_slots = reading.prefix, reading.num_slots
        begun, _ = runner.call(slots.finish_prefill, prefix, num_slots=num_slots)
        # The running rows may have outgrown the size that it began with.
        if num_slots < (now := self._ensure_slots(0)):
            begun = runner.grow(begun, now)
        self._enter([text], [reading.slot], begun)

    def _enter(self, texts: list[Served], free: list[int], begun: DecodeState) -> None:
        """Puts texts that were read into rows, unless their first token ended them."""
        rows = read_rows(begun, self._runner.fetch)
        for place, (text, slot) in enumerate(zip(texts, free, strict=False)):
            if rows[place].stop_reason != StopReason.RUNNING:
                text.row = rows[place]
                self._done.append(text)
            else:
                assert self._state is not None
                state = self._runner.insert(begun, self._state, slot, place)
                self._state, self._rows[slot] = state, text
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
        rounds = ROUNDS if is_filled else 1
        started = runner.clock()
        self._state, _ = runner.call(slots.generate, self._state, rounds=rounds)
        jax.block_until_ready(self._state)
        self._look(running)
        share = (runner.clock() - started) / len(running)
        for text in running.values():
            text.decode_seconds += share

    def _look(self, running: dict[int, Served]) -> None:
        """Finds the texts that have ended; the state stays as it is."""
        runner, state = self._runner, self._state
        assert state is not None
        reasons, lengths = runner.fetch((state.stop_reason, state.lengths))
        ended = [row for row in running if reasons[row] != StopReason.RUNNING]
        rows = read_rows(state, runner.fetch) if ended else []
        for row, text in running.items():
            text.length = int(lengths[row])
        for row in ended:
            running[row].row = rows[row]
            self._done.append(running[row])
            self._rows[row] = None
            runner.judge_fit([rows[row]])


def prefill_tokens(length: int) -> int:
    """Returns the tokens that reading a prompt takes, with its padding."""
    return min(bucket_length(length), -(-length // PREFILL_CHUNK) * PREFILL_CHUNK)


def _is_long(text: Served) -> bool:
    return len(text.row.prompt_ids) > PREFILL_CHUNK
