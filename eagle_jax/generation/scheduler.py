"""A queue of prompts through the rows of one running batch."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from eagle_jax.config import require
from eagle_jax.decoding import slots
from eagle_jax.decoding.growth import bucket_sizes
from eagle_jax.decoding.requests import Requests
from eagle_jax.decoding.slots import Result
from eagle_jax.decoding.state import DecodeState, StopReason
from eagle_jax.errors import InputError
from eagle_jax.generation.queue import Queue, Reading, Served, Text
from eagle_jax.generation.rows import Row, read_rows
from eagle_jax.generation.runner import Runner
from eagle_jax.prefill import PREFILL_CHUNK

ROUNDS = 16
"""The most rounds between two looks at the queue, while no row is free."""

_MOST_PADDING = 1 << 14


class Scheduler(Queue):
    """Texts that enter a row as soon as one is free; none depends on the others.

    Prompts of up to `PREFILL_CHUNK` tokens are read as a whole. A longer one is read
    chunk by chunk; after each, the running rows go on, and short prompts may enter.

    An exception or Ctrl-C in a step loses no text. The next step goes on where it was,
    unless a program may have been given the rows' arrays and returned nothing: then
    `is_broken` is true, and `reset` returns what is to be added again.

    Attributes:
        row_rounds: The rounds of all rows so far, while prompts were waiting.
        busy_row_rounds: Those of them in which the row wrote a text.
    """

    def __init__(self, runner: Runner, *, rounds: int = ROUNDS) -> None:
        """Starts with an empty queue; nothing is compiled.

        Args:
            runner: The pair with its settings: `batch_size` is the number of rows, and
                `max_length` bounds every text. Its `prompt_bucket` is not read.
            rounds: The most rounds between two looks at the queue.

        Raises:
            InputError: If there are no rounds.
        """
        require(rounds >= 1, "rounds", rounds, "at least 1")
        super().__init__(runner)
        self.row_rounds = self.busy_row_rounds = 0
        self._rounds = rounds
        self._is_turn_of_short = False
        longest, depth = _whole_chunks(runner.max_length), runner.decoder.depth
        self._sizes = bucket_sizes(longest, prompt=0, depth=depth)

    def step(self) -> list[Served]:
        """Reads prompts for the free rows, runs some rounds, returns what has ended.

        Raises:
            InputError: If `is_broken`.
        """
        if not self._done:  # What a step that failed had found comes first.
            self._check_whole()
            self._read()
            self._write()
        served = [
            Served(
                key=text.key,
                row=row,
                prefill_seconds=text.prefill_seconds,
                decode_seconds=text.decode_seconds,
            )
            for text, row in self._done
        ]
        self._done = []  # The last thing: nothing can come between it and the return.
        return served

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        *,
        longest_first: bool = False,
    ) -> Iterator[Served]:
        """Decodes prompts, all of which are checked first.

        Args:
            prompts: The prompts' token ids.
            seeds: The seeds, one per prompt.
            longest_first: Whether long prompts enter before short ones.

        Returns:
            The texts, each as it ends, whose `key` is the prompt's number.

        Raises:
            InputError: If `add` would refuse a prompt, the seeds are not as many, or
                texts of an earlier call are left.
        """
        self._check_whole()
        wanted = f"{len(prompts)}, one per prompt"
        require(len(seeds) == len(prompts), "number of seeds", len(seeds), wanted)
        if not self.is_idle:
            raise InputError(
                "the scheduler still has texts of an earlier call; take them with "
                "`step`, or drop them with `reset()`"
            )
        texts = [
            self._text(f"prompt {number}", number, *given)
            for number, given in enumerate(zip(prompts, seeds, strict=True))
        ]
        if longest_first:
            texts.sort(key=lambda text: -text.length)
        self._waiting.extend(texts)
        return self._steps()

    def _steps(self) -> Iterator[Served]:
        while not self.is_idle:
            yield from self.step()

    def _wait_for(self, arrays: Any) -> None:
        """Waits for a program; one that fails has spent what it was given."""
        try:
            jax.block_until_ready(arrays)
        except Exception:
            self.is_broken = True
            raise

    def _read(self) -> None:
        """Fills free rows; running ones wait for one chunk's tokens at most.

        The chunks of a long prompt and the short prompts behind it take turns.
        """
        left = PREFILL_CHUNK if self._running else math.inf
        must_wait = self._running and self._is_turn_of_short and self._next_texts()
        if self._reading is not None and not must_wait:
            self._read_chunk(self._reading)
            left -= PREFILL_CHUNK
        while left > 0 and (texts := self._next_texts()):
            longest = max(len(text.prompt_ids) for text in texts)
            if longest > PREFILL_CHUNK:
                self._begin_long(texts[0])
                left -= PREFILL_CHUNK
            else:
                bucket = min(_short_bucket(longest), self._sizes[-1])
                self._read_short(texts, bucket)
                left -= bucket * len(texts)

    @property
    def _num_read_together(self) -> int:
        """The prompts of one prefill: one for each part of the mesh's data axis."""
        sharding = self._runner.pair.sharding
        return 1 if sharding is None else sharding.mesh.shape["data"]

    def _next_texts(self) -> list[Text]:
        """Returns what enters next: a long prompt, or short ones that are read at once.

        While a long one is being read, short ones pass by the long ones that wait.
        """
        if self._reading is None and self._waiting and _is_long(self._waiting[0]):
            return [self._waiting[0]] if self._free else []
        short = (text for text in self._waiting if not _is_long(text))
        most = min(len(self._free), self._num_read_together)
        return list(itertools.islice(short, most))

    def _requests(self, texts: list[Text], bucket: int) -> Requests:
        """Returns requests of a whole prefill: the missing ones are made up."""
        missing = self._num_read_together - len(texts)
        new_tokens = [self._runner.config.decoding.max_new_tokens] * len(texts)
        return self._runner.requests(
            [text.prompt_ids for text in texts] + [[0]] * missing,
            new_tokens + [1] * missing,
            seeds=[text.seed for text in texts] + [0] * missing,
            prompt_bucket=bucket,
        )

    def _room_for(self, num_tokens: int) -> int:
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

    def _read_short(self, texts: list[Text], bucket: int) -> None:
        runner, requests = self._runner, self._requests(texts, bucket)
        num_slots = self._room_for(bucket)
        self._is_turn_of_short = False
        started = runner.clock()
        prefix, first = runner.call(slots.prefill, requests, num_slots=num_slots)
        first = runner.fetch(first)
        for text in texts:
            text.prefill_seconds += (runner.clock() - started) / len(texts)
        self._enter(texts, self._free, prefix, first)

    def _begin_long(self, text: Text) -> None:
        num_tokens = _whole_chunks(len(text.prompt_ids))
        bucket = min(_long_bucket(num_tokens), _whole_chunks(self._runner.max_length))
        requests, num_slots = self._requests([text], bucket), self._room_for(bucket)
        prefix = self._runner.call(slots.start_prefill, requests, num_slots=num_slots)
        with self._changing():
            self._reading = Reading(
                text=text,
                prefix=prefix,
                num_slots=num_slots,
                slot=self._free[0],
                num_left=num_tokens // PREFILL_CHUNK,
            )
            self._waiting.remove(text)
        self._read_chunk(self._reading)

    def _read_chunk(self, reading: Reading) -> None:
        """Reads the next chunk of the long prompt; after the last, its text begins."""
        runner, text = self._runner, reading.text
        self._is_turn_of_short = True
        started = runner.clock()
        if reading.num_left:  # None is, where a step was interrupted after the last.
            with self._changing():
                reading = self._reading = dataclasses.replace(
                    reading,
                    prefix=runner.call(slots.prefill_chunk, reading.prefix),
                    num_left=reading.num_left - 1,
                )
        self._wait_for(reading.prefix)
        text.prefill_seconds += runner.clock() - started
        if reading.num_left:
            return
        prefix, num_slots = reading.prefix, reading.num_slots
        begun, first = runner.call(slots.finish_prefill, prefix, num_slots=num_slots)
        # The running rows may have outgrown the size that it began with.
        if num_slots < (now := self._room_for(0)):
            begun = runner.grow(begun, now)
        self._enter([text], [reading.slot], begun, runner.fetch(first))

    def _enter(
        self, texts: list[Text], rows: list[int], prefix: DecodeState, first: Result
    ) -> None:
        """Puts texts that were read into rows, unless their first token ended them."""
        with self._changing():
            for place, (text, slot) in enumerate(zip(texts, rows, strict=False)):
                if first.is_finished[place]:
                    count = first.counts[place]  # None at a constraint's dead end.
                    row = Row(
                        prompt_ids=text.prompt_ids,
                        generated_ids=first.tokens[place, :count].tolist(),
                        stop_reason=StopReason(int(first.stop_reason[place])),
                        accept_lengths=[],
                    )
                    self._done.append((text, row))
                else:
                    assert self._state is not None
                    state = self._runner.insert(prefix, self._state, slot, place)
                    self._state, self._rows[slot] = state, text
                if self._reading is not None and self._reading.text is text:
                    self._reading = None
                else:
                    self._waiting.remove(text)

    def _write(self) -> None:
        """Runs rounds, one alone while a prompt is to be read; finds what ended."""
        if not (running := self._running):
            return
        runner = self._runner
        longest = max(text.length for text in running.values())
        self._room_for(longest + runner.decoder.depth + 1)
        is_filled = self._reading is None and not (self._waiting and self._free)
        rounds = self._rounds if is_filled else 1
        started = runner.clock()
        with self._changing():
            self._state, _ = runner.call(slots.generate, self._state, rounds=rounds)
        self._wait_for(self._state)
        self._look(running)
        share = (runner.clock() - started) / len(running)
        for text in running.values():
            text.decode_seconds += share

    def _look(self, running: dict[int, Text]) -> None:
        """Finds the texts that have ended; the state stays as it is."""
        runner, state = self._runner, self._state
        assert state is not None
        reasons, lengths, num_rounds = runner.fetch(
            (state.stop_reason, state.lengths, state.num_rounds)
        )
        ended = [row for row in running if reasons[row] != StopReason.RUNNING]
        rows = read_rows(state, runner.fetch) if ended else []
        added = [
            int(num_rounds[row]) - text.num_rounds for row, text in running.items()
        ]
        if self._waiting:
            self.row_rounds += max(added) * len(self._rows)
            self.busy_row_rounds += sum(added)
        for row, text in running.items():
            text.length, text.num_rounds = int(lengths[row]), int(num_rounds[row])
        with self._changing():
            for row in ended:
                self._done.append((running[row], rows[row]))
                self._rows[row] = None
        for row in ended:
            runner.judge_fit([rows[row].accept_lengths])


def is_queue(runner: Runner, prompts: Sequence[list[int]]) -> bool:
    """Returns whether prompts enter the rows of a running batch one by one.

    They do if there are more than rows, or if one batch would read far more padding
    than prompts. With a single row nothing would be gained.
    """
    rows = runner.batch_size
    if rows == 1 or len(prompts) > rows:
        return rows > 1
    needed = [_num_read(len(prompt)) for prompt in prompts]
    # A queue compiles more programs, which must pay.
    return rows * max(needed) > max(4 * sum(needed), sum(needed) + _MOST_PADDING)


def decode_all(
    runner: Runner, prompts: Sequence[list[int]], seeds: Sequence[int]
) -> Iterator[Served]:
    """Decodes prompts, and yields the texts in the prompts' order.

    They are decoded batch by batch, each as one program, unless `is_queue`.

    Args:
        runner: The pair with its settings and the shape of its batches.
        prompts: The prompts' token ids.
        seeds: The seeds, one per prompt.
    """
    if is_queue(runner, prompts):
        done: dict[int, Served] = {}
        shown = 0
        for served in Scheduler(runner).run(prompts, seeds):
            done[served.key] = served
            while shown in done:
                yield done.pop(shown)
                shown += 1
        return
    size = runner.batch_size
    for start in range(0, len(prompts), size):
        batch = prompts[start : start + size]
        result = runner.run(list(batch), list(seeds[start : start + size]))
        for number, row in enumerate(result.rows):
            yield Served(
                key=start + number,
                row=row,
                prefill_seconds=result.prefill_seconds / len(batch),
                decode_seconds=result.decode_seconds / len(batch),
            )


def _is_long(text: Text) -> bool:
    return len(text.prompt_ids) > PREFILL_CHUNK


def _short_bucket(length: int) -> int:
    """Returns 64, 256 or `PREFILL_CHUNK`: few lengths, as each one is compiled."""
    return next(size for size in (64, 256, PREFILL_CHUNK) if size >= length)


def _long_bucket(length: int) -> int:
    """Returns 2, 8, 32, ... chunks, for the same reason."""
    sizes = (2 * 4**power * PREFILL_CHUNK for power in range(16))
    return next(size for size in sizes if size >= length)


def _num_read(length: int) -> int:
    """Returns the tokens that reading a prompt takes, with its padding."""
    return _whole_chunks(length) if length > PREFILL_CHUNK else _short_bucket(length)


def _whole_chunks(length: int) -> int:
    """Returns the tokens of whole chunks, where a text takes more than one."""
    if length <= PREFILL_CHUNK:
        return length
    return -(-length // PREFILL_CHUNK) * PREFILL_CHUNK
