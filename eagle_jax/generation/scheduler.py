"""A queue of prompts through the rows of one running batch."""

import dataclasses
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax

from eagle_jax.decoding import slots
from eagle_jax.decoding.growth import bucket_sizes
from eagle_jax.decoding.requests import Requests
from eagle_jax.decoding.slots import Prefix, Result
from eagle_jax.decoding.state import DecodeState, StopReason
from eagle_jax.generation.rows import Row
from eagle_jax.generation.runner import Runner
from eagle_jax.prefill import PREFILL_CHUNK

ROUNDS = 16
"""The most rounds between two looks at the queue, while no row is free."""

_MOST_PADDING = 1 << 14


@dataclasses.dataclass(frozen=True, kw_only=True)
class Served:
    """A text that has ended.

    Attributes:
        key: What `Scheduler.add` was given to know it by.
        row: The text.
        prefill_seconds: The seconds of reading its prompt.
        decode_seconds: Its share of the seconds of rounds that it had with others.
    """

    key: Any
    row: Row
    prefill_seconds: float
    decode_seconds: float


@dataclasses.dataclass(kw_only=True)
class _Text:
    """A text that waits or is being written."""

    key: Any
    prompt_ids: list[int]
    seed: int
    generated_ids: list[int] = dataclasses.field(default_factory=list)
    accept_lengths: list[int] = dataclasses.field(default_factory=list)
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Reading:
    """A long prompt that is being read.

    Attributes:
        prefix: What is read of it.
        num_slots: The number of its cache slots.
        slot: The row that is kept for it.
        num_left: The chunks that are left.
    """

    prefix: Prefix
    num_slots: int
    slot: int
    num_left: int


class Scheduler:
    """Texts that enter a row as soon as one is free; none depends on the others.

    Prompts of up to `PREFILL_CHUNK` tokens are read as a whole. A longer one is read
    chunk by chunk, and the running rows go on after each.

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
        """
        self.row_rounds = self.busy_row_rounds = 0
        self._runner = runner
        self._rounds = rounds
        self._waiting: deque[_Text] = deque()
        self._rows: list[_Text | None] = [None] * runner.batch_size
        self._state: DecodeState | None = None
        self._reading: _Reading | None = None
        longest, depth = _whole_chunks(runner.max_length), runner.decoder.depth
        self._sizes = bucket_sizes(longest, prompt=0, depth=depth)

    def add(self, key: Any, prompt_ids: list[int], seed: int) -> None:
        """Puts a prompt at the queue's end.

        Args:
            key: What the text is known by when it has ended.
            prompt_ids: The prompt's token ids, fewer than `max_length`.
            seed: The seed of its draws.
        """
        self._waiting.append(_Text(key=key, prompt_ids=prompt_ids, seed=seed))

    @property
    def num_waiting(self) -> int:
        """The prompts in the queue."""
        return len(self._waiting)

    @property
    def is_idle(self) -> bool:
        """Whether every text that was added has ended."""
        return not self._waiting and not any(self._rows)

    def step(self) -> list[Served]:
        """Reads prompts for the free rows, runs some rounds, returns what has ended."""
        return [*self._read(), *self._write()]

    def run(
        self,
        prompts: Sequence[list[int]],
        seeds: Sequence[int],
        *,
        longest_first: bool = False,
    ) -> Iterator[Served]:
        """Decodes prompts, and yields each text as it ends.

        Args:
            prompts: The prompts' token ids.
            seeds: The seeds, one per prompt.
            longest_first: Whether long prompts enter before short ones.

        Yields:
            The texts, whose `key` is the prompt's number.
        """
        order: Iterable[int] = range(len(prompts))
        if longest_first:
            order = sorted(order, key=lambda number: -len(prompts[number]))
        for number in order:
            self.add(number, prompts[number], seeds[number])
        while not self.is_idle:
            yield from self.step()

    def _read(self) -> Iterator[Served]:
        """Fills free rows; running ones wait for one chunk's tokens at most."""
        budget = PREFILL_CHUNK if self._running else None
        if self._reading is not None:
            yield from self._read_chunk(self._reading)
            budget = 0
        while self._waiting and self._free and (budget is None or budget > 0):
            if len(self._waiting[0].prompt_ids) > PREFILL_CHUNK:
                if self._reading is not None:
                    return
                num_read = PREFILL_CHUNK
                yield from self._begin_long(self._waiting.popleft())
            else:
                texts = self._next_short()
                longest = max(len(text.prompt_ids) for text in texts)
                bucket = min(_short_bucket(longest), self._sizes[-1])
                num_read = bucket * len(texts)
                yield from self._read_short(texts, bucket)
            budget = None if budget is None else budget - num_read

    @property
    def _free(self) -> list[int]:
        return [row for row, text in enumerate(self._rows) if text is None]

    @property
    def _running(self) -> dict[int, _Text]:
        """The texts that are being written, not only read, by row."""
        kept = None if self._reading is None else self._reading.slot
        return {
            row: text
            for row, text in enumerate(self._rows)
            if text is not None and row != kept
        }

    @property
    def _num_read_together(self) -> int:
        """The prompts of one prefill: one for each part of the mesh's data axis."""
        sharding = self._runner.pair.sharding
        return 1 if sharding is None else sharding.mesh.shape["data"]

    def _next_short(self) -> list[_Text]:
        texts = [self._waiting.popleft()]
        most = min(len(self._free), self._num_read_together)
        while len(texts) < most and self._waiting:
            if len(self._waiting[0].prompt_ids) > PREFILL_CHUNK:
                break
            texts.append(self._waiting.popleft())
        return texts

    def _requests(self, texts: list[_Text], bucket: int) -> Requests:
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
        empty = slots.init_decode_state(
            runner.decoder,
            runner.pair.params,
            batch=runner.batch_size,
            num_slots=size,
            num_stop_tokens=len(runner.pair.stop_tokens),
        )
        self._state = runner.put(empty)
        return size

    def _read_short(self, texts: list[_Text], bucket: int) -> Iterator[Served]:
        runner, requests = self._runner, self._requests(texts, bucket)
        num_slots = self._room_for(bucket)
        started = runner.clock()
        prefix, first = runner.call(slots.prefill, requests, num_slots=num_slots)
        first = runner.fetch(first)
        for text in texts:
            text.prefill_seconds += (runner.clock() - started) / len(texts)
        yield from self._enter(texts, self._free, prefix, first)

    def _begin_long(self, text: _Text) -> Iterator[Served]:
        num_tokens = _whole_chunks(len(text.prompt_ids))
        bucket = min(_long_bucket(num_tokens), _whole_chunks(self._runner.max_length))
        requests, num_slots = self._requests([text], bucket), self._room_for(bucket)
        prefix = self._runner.call(slots.start_prefill, requests, num_slots=num_slots)
        slot = self._free[0]
        self._rows[slot] = text
        self._reading = _Reading(
            prefix=prefix,
            num_slots=num_slots,
            slot=slot,
            num_left=num_tokens // PREFILL_CHUNK,
        )
        yield from self._read_chunk(self._reading)

    def _read_chunk(self, reading: _Reading) -> Iterator[Served]:
        """Reads the next chunk of the long prompt; after the last, its text begins."""
        runner, text = self._runner, self._rows[reading.slot]
        assert text is not None
        started = runner.clock()
        prefix = runner.call(slots.prefill_chunk, reading.prefix)
        jax.block_until_ready(prefix)
        text.prefill_seconds += runner.clock() - started
        self._reading = dataclasses.replace(
            reading, prefix=prefix, num_left=reading.num_left - 1
        )
        if self._reading.num_left:
            return
        self._reading, self._rows[reading.slot] = None, None
        num_slots = reading.num_slots
        begun, first = runner.call(slots.finish_prefill, prefix, num_slots=num_slots)
        # The running rows may have outgrown the size that it began with.
        if num_slots < (now := self._room_for(0)):
            begun = runner.grow(begun, now)
        yield from self._enter([text], [reading.slot], begun, runner.fetch(first))

    def _enter(
        self, texts: list[_Text], rows: list[int], prefix: DecodeState, first: Result
    ) -> Iterator[Served]:
        """Puts texts that were read into rows, unless their first token ended them."""
        for place, (text, slot) in enumerate(zip(texts, rows, strict=False)):
            text.generated_ids += first.tokens[place, : first.counts[place]].tolist()
            if first.is_finished[place]:
                yield _served(text, first.stop_reason[place])
                continue
            assert self._state is not None
            self._rows[slot] = text
            self._state = self._runner.insert(prefix, self._state, slot, place)

    def _write(self) -> Iterator[Served]:
        """Runs rounds, one alone while a prompt is to be read; yields what ended."""
        running = self._running
        if not running:
            return
        runner = self._runner
        longest = max(
            len(text.prompt_ids) + len(text.generated_ids) for text in running.values()
        )
        self._room_for(longest + runner.decoder.depth + 1)
        is_filled = self._reading is None and not (self._waiting and self._free)
        has_queue = bool(self._waiting)
        rounds = self._rounds if is_filled else 1
        started = runner.clock()
        self._state, result = runner.call(slots.generate, self._state, rounds=rounds)
        result = runner.fetch(result)
        share = (runner.clock() - started) / len(running)
        if has_queue:
            self.row_rounds += int(result.num_rounds.max()) * len(self._rows)
            self.busy_row_rounds += int(result.num_rounds.sum())
        for row, text in running.items():
            count, num_rounds = result.counts[row], result.num_rounds[row]
            text.generated_ids += result.tokens[row, :count].tolist()
            text.accept_lengths += result.accept_lengths[row, :num_rounds].tolist()
            text.decode_seconds += share
            if result.is_finished[row]:
                self._rows[row] = None
                runner.judge_fit([text.accept_lengths])
                yield _served(text, result.stop_reason[row])


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


def _served(text: _Text, reason: Any) -> Served:
    return Served(
        key=text.key,
        row=Row(
            prompt_ids=text.prompt_ids,
            generated_ids=text.generated_ids,
            stop_reason=StopReason(int(reason)),
            accept_lengths=text.accept_lengths,
        ),
        prefill_seconds=text.prefill_seconds,
        decode_seconds=text.decode_seconds,
    )


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
