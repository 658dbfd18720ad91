"""The rows of a running batch, which texts enter and leave."""

import collections
import copy
import functools
from collections.abc import Hashable, Sequence

import jax
import numpy as np

from eagle_jax.decoding import slots, speculative
from eagle_jax.decoding.growth import Limits, bucket_sizes
from eagle_jax.decoding.requests import Requests, bucket_length, bucket_rows
from eagle_jax.decoding.speculative import Round
from eagle_jax.decoding.state import DecodeState, StopReason
from eagle_jax.engine import moves, prefill
from eagle_jax.engine.ahead import Ahead
from eagle_jax.engine.choice import Stretch
from eagle_jax.engine.ladder import Chooser
from eagle_jax.engine.programs import Programs
from eagle_jax.engine.text import Text
from eagle_jax.models.devices import on_cpu

_UNLIMITED = 2**31 - 1


class Rows:
    """A batch's state, and the texts of its rows.

    Attributes:
        compiles_beside: Whether threads compile what running texts will need.
        ahead: These threads.
        programs: What is run; another for rows without texts forgets the state.
        max_length: The most tokens of a prompt and its text together.
        texts: The text that is being written in each row, `None` in free ones.
        done: The texts that have ended.
    """

    def __init__(self, programs: Programs, batch_size: int, max_length: int) -> None:
        """Starts without a state; `batch_size` is the number of rows, `B`."""
        self.max_length, self.compiles_beside = max_length, False
        self.done: list[Text] = []
        self.empty(programs, batch_size)

    def empty(self, programs: Programs, batch_size: int) -> None:
        """Forgets texts and state, but not what has ended."""
        self.programs = programs
        self.texts: list[Text | None] = [None] * batch_size
        self._state: DecodeState | None = None
        self.ahead = Ahead()
        # The tree of the last rounds, and their time that no figures have yet.
        self._rung, self._seconds = -1, 0.0
        # All rows, while fewer run; whether they may, and how many would do.
        self._parked: DecodeState | None = None
        self._may_be_few = programs.pair.sharding is None and on_cpu()
        self._enough = batch_size
        # What rows too many took, by those that would do, of all engines of a pair.
        self._lost = programs.pair.kept.setdefault(Rows, collections.Counter())
        # What each row holds, the texts that have ended included.
        self._held: list[list[int]] = [[] for _ in self.texts]

    @property
    def running(self) -> dict[int, Text]:
        """The texts that are being written, by row."""
        return {row: text for row, text in enumerate(self.texts) if text is not None}

    def can_read(self, texts: Sequence[Text], *, in_chunks: bool) -> bool:
        """Returns whether prompts can enter without a compiler; threads begin if not.

        Args:
            texts: What would be read together.
            in_chunks: Whether it is read in chunks, between rounds.
        """
        if not self.compiles_beside:
            return True
        length = len(texts[0].prompt_ids)
        reused = self.find_prefix(texts[0])[1] if in_chunks else 0
        _, chunks = prefill.chunks_of([len(text.prompt_ids) for text in texts])
        kinds = frozenset(prefill.chunk_sizes(length - reused) if in_chunks else chunks)
        copies = [copy.copy(text) for text in texts]

        def read(dry: "Rows") -> None:
            if in_chunks:
                reading = dry.start_reading(copies[0])
                while reading.sizes:
                    reading = reading.next(dry.programs)
                begun = dry.finish_reading(reading)
            else:
                begun = dry.read(copies)
            dry.enter(copies[0], begun, 0)
            dry._run(1, 0)

        assert self._state is not None
        # Where the rows that run are all busy, others must come back.
        is_full = len(self.running) == self._state.tokens.shape[0]
        what = kinds, prefill.num_slots_for(texts), reused > 0, len(texts), is_full
        return self.ahead.has(
            (what, self._state.tokens.shape),
            lambda: functools.partial(read, self._dry()),
            is_urgent=True,
        )

    def _has_rounds(self, **other: int) -> bool:
        """Returns whether rounds are compiled that are other ones, see `_run_other`."""
        if not self.compiles_beside:
            return True
        return self.ahead.has(
            self._key(**other),
            lambda: functools.partial(self._dry()._run_other, **other),
            is_urgent=False,
        )

    def _key(self, **other: int) -> Hashable:
        assert self._state is not None
        return *other.items(), self._state.tokens.shape

    def _run_other(
        self, *, num_slots: int = 0, rung: int | None = None, num_rows: int = 0
    ) -> None:
        """Runs a round with more slots, by another tree, or of so few rows."""
        self._ensure_slots(num_slots)
        self._rung = self._rung if rung is None else rung
        if num_rows:
            self._take_few(num_rows)
        self._run(1, 0)

    def _dry(self) -> "Rows":
        """Returns rows of shapes alone, which compile and run nothing."""
        dry = copy.copy(self)
        dry.programs, dry.compiles_beside = self.programs.dry(), False
        # It takes few rows if their program is there, and pays for none.
        dry.ahead, dry._lost = Ahead(), collections.Counter()
        dry.texts, dry._held = [*self.texts], [*self._held]
        states = self._state, self._parked
        dry._state, dry._parked = jax.eval_shape(lambda: states)
        return dry

    @property
    def _num_slots(self) -> int:
        return 0 if self._state is None else self._state.tokens.shape[1]

    def find_prefix(self, text: Text) -> tuple[int, int]:
        """See `find_prefix`; nothing is there, or can be reused, without a state."""
        parts = self.programs.pair.num_parts
        if text.needs.has_prompt or self._state is None or parts > 1:
            return 0, 0
        return prefill.find_prefix(text.prompt_ids, self._held, self.programs.decoder)

    def read_as_all(self, texts: Sequence[Text]) -> None:
        """Reads prompts in one prefill of all rows, which becomes the state itself."""
        programs, batch_size = self.programs, len(self.texts)
        bucket, chunks = prefill.chunks_of([len(text.prompt_ids) for text in texts])
        requests = self._requests(texts, batch_size, bucket)
        size = self.cache_sizes(bucket)[0]
        samples = prefill.num_samples(texts, batch_size // programs.pair.num_parts)
        self.empty(programs, batch_size)
        with programs.timing(texts, "prefill_seconds"):
            more = {"num_slots": size, "num_samples": samples}
            self._state = programs.prefill(requests, chunks, **more)
        self.texts[: len(texts)] = texts

    def warm_up(self, texts: Sequence[Text], *, with_growth: bool) -> None:
        """Compiles what reading texts as all rows needs, see `Engine.warm_up`."""
        dry, batch_size = self._dry(), len(self.texts)
        bucket, sizes = prefill.chunks_of([len(text.prompt_ids) for text in texts])
        requests = self._requests(texts, batch_size, bucket)
        first, *larger = self.cache_sizes(bucket)
        samples = prefill.num_samples(texts, batch_size // self.programs.pair.num_parts)
        # Each size that a prompt of this length may need, if all are wanted.
        for chunks in prefill.every_chunk(bucket) if with_growth else [sizes]:
            more = {"num_slots": first, "num_samples": samples}
            dry._state = dry.programs.prefill(requests, chunks, **more)
        dry.texts[: len(texts)] = texts
        if (chooser := self.programs.chooser) is not None:
            no_time = [0.0] * len(self.programs.rungs)
            dry._rung, _ = chooser.next(batch_size, 0, lambda: no_time)
        for size in (first, *larger) if with_growth else (first,):
            dry._ensure_slots(size)
            dry._run(1, 0)

    def read(self, texts: Sequence[Text]) -> DecodeState:
        """Reads short prompts, several if they are equal or one for each part."""
        programs, parts = self.programs, self.programs.pair.num_parts
        size = self._ensure_slots(prefill.num_slots_for(texts))
        samples = 1 if parts > 1 else len(texts)
        bucket, chunks = prefill.chunks_of([len(text.prompt_ids) for text in texts])
        # All that are read in chunks share their programs.
        padded = bucket if [bucket] == chunks else 0
        requests = self._requests(texts, max(parts, len(texts)), padded)
        with programs.timing(texts, "prefill_seconds"):
            more = {"num_slots": size, "num_samples": samples}
            return programs.prefill(requests, chunks, **more)

    def start_reading(self, text: Text) -> prefill.Reading:
        """Begins to read a prompt in chunks."""
        programs = self.programs
        if self.find_prefix(text)[1]:
            self._run_all_rows()  # This gives rows other numbers.
        row, length = self.find_prefix(text)
        num_slots = self._ensure_slots(prefill.num_slots_for([text]))
        requests = self._requests([text], programs.pair.num_parts)
        if length:
            held = self._state, np.int32(row), np.int32(length)
            prefix = programs.call(slots.reuse_prefill, requests, *held, size=1)
        else:
            sizes = {"num_slots": num_slots, "num_samples": 1}
            prefix = programs.call(moves.start, requests, **sizes)
        text.reused = length
        chunks = prefill.chunk_sizes(len(text.prompt_ids) - length)
        return prefill.Reading(
            text=text, prefix=prefix, num_slots=num_slots, sizes=chunks
        )

    def finish_reading(self, reading: prefill.Reading) -> DecodeState:
        """Returns the state of a prompt of which all chunks are read."""
        prefix, num_slots = reading.prefix, reading.num_slots
        begun = self.programs.finish(prefix, prefix.requests, num_slots=num_slots)
        # The running rows may have outgrown the size that it began with.
        if num_slots < (now := self._ensure_slots(0)):
            begun = self.programs.call(moves.grow, begun, num_slots=now)
        return begun

    def enter(self, text: Text, begun: DecodeState, place: int) -> None:
        """Puts a text that was read, row `place` of `begun`, into a free row."""
        state, slot = self._state, self.texts.index(None)
        if state is None or slot >= state.lengths.shape[0]:
            state, slot = self._run_all_rows(), self.texts.index(None)
        places = np.int32(slot), np.int32(place)
        state = self.programs.call(moves.insert, state, begun, *places)
        self._state, self.texts[slot] = state, text
        self._held[slot] = text.prompt_ids

    def write(self, rounds: int | None, *, until_one_ends: bool) -> None:
        """Runs rounds, `None` for any number, until one text or all have ended.

        Few rows may run once half as many would do, so it returns then.
        """
        programs, running = self.programs, len(self.running)
        half = running - bucket_rows(running) // 2 - 1 if self._may_be_few else running
        most_ended = 0 if until_one_ends else half
        with programs.timing([*self.running.values()], "decode_seconds") as taken:
            done = self._run(rounds or _UNLIMITED, most_ended)
        for row, one in programs.rounds(done).items() if done is not None else ():
            if (text := self.texts[row]) is not None and text.keeps_rounds:
                text.rounds.append((one, taken[0]))

    def _run(self, most: int, most_ended: int) -> Round | None:
        """Runs rounds; returns what was verified if one text keeps it."""
        texts, programs = self.running.values(), self.programs
        depth = programs.decoder.depth
        self._ensure_slots(max(text.length for text in texts) + depth + 1)
        longest = min(max(text.longest for text in texts), self.max_length)
        if self._num_slots < longest + depth + 1:
            self._has_rounds(num_slots=self._num_slots + 1)
        self._leave_out_free_rows()
        assert self._state is not None
        if programs.chooser is not None:
            self._rung, most = self._choose(programs.chooser, most)
        state, rung, done = self._state, self._rung, None
        with programs.timing((), "") as taken:
            if depth and any(text.keeps_rounds for text in texts):
                one_round = speculative.decode_round
                self._state, done = programs.call(one_round, state, rung=rung)
            else:
                limits = Limits(np.int32(most), np.int32(most_ended))
                self._state = programs.decode_until(state, limits, rung)
        if not programs.was_first_run:
            self._seconds += taken[0]
        rows = state.lengths.shape[0]
        self._lost[self._enough] += taken[0] * (1 - self._enough / rows)
        return done

    def look(self) -> None:
        """Takes in what texts gained; those that have ended leave."""
        state, programs, running = self._state, self.programs, self.running
        assert state is not None
        reasons, lengths, num_rounds = programs.fetch(
            (state.stop_reason, state.lengths, state.num_rounds)
        )
        ends = all(reasons[row] != StopReason.RUNNING for row in running)
        self._record(lengths, num_rounds, is_last=ends)
        seen = {
            row: text
            for row, text in running.items()
            if reasons[row] != StopReason.RUNNING or text.is_looked_at
        }
        news = programs.news(state) if seen else None
        for row, text in seen.items():
            assert news is not None
            # Before a stop string cuts it: this is what the caches hold.
            self._held[row] = news.tokens[row, : lengths[row]].tolist()
            text.take(news, row)
            if text.has_ended:
                self.done.append(text)
                if reasons[row] == StopReason.RUNNING:
                    self.free(row)
                self.texts[row] = None
                if (check := programs.pair.fit_check) is not None:
                    check.judge(text, programs.decoder)

    def _choose(self, chooser: Chooser, most: int) -> tuple[int, int]:
        """Returns the tree of the next rounds, and the most of them."""
        texts, programs = self.running.values(), self.programs
        left = sum(min(x.longest, self.max_length) - x.length for x in texts)
        assert self._state is not None
        rows = self._state.lengths.shape[0]
        costs = functools.partial(programs.compile_seconds, self._state, rows)
        rung, stretch = chooser.next(
            rows, left, costs, lambda rung: self._has_rounds(rung=rung)
        )
        return rung, min(most, stretch)

    def _leave_out_free_rows(self) -> None:
        """Lets few rows run where few hold a text, once that pays for their program."""
        assert self._state is not None
        now = self._state.lengths.shape[0]
        rows = self._enough = min(bucket_rows(len(self.running)), now)
        if rows == now or not self._may_be_few:
            return
        cost = self.programs.compile_seconds(self._state, rows)[self._rung]
        if self._lost[rows] >= cost and (not cost or self._has_rounds(num_rows=rows)):
            self._take_few(rows)
            self._lost[rows] -= cost

    def _take_few(self, rows: int) -> None:
        """Parks all rows, as a later prompt may begin as one of them; so many run."""
        self._parked = self._run_all_rows()
        # Those that run come first.
        are_free = [text is None for text in self.texts]
        self._order = np.argsort(are_free, kind="stable")
        self._reorder(self._order)
        first = np.int32(self._order[:rows])
        self._state = self.programs.call(moves.take_rows, self._parked, first)

    def _run_all_rows(self) -> DecodeState:
        """Puts the rows that run back among the others; returns all."""
        state = self._state
        assert state is not None
        if self._parked is not None:
            parked, self._parked = self._parked, None
            here = state, np.int32(self._order[: state.lengths.shape[0]])
            self._state = state = self.programs.call(moves.put_rows, parked, *here)
            self._reorder(np.argsort(self._order))
        return state

    def _reorder(self, order: np.ndarray) -> None:
        self.texts = [self.texts[row] for row in order]
        self._held = [self._held[row] for row in order]

    def _record(
        self, lengths: np.ndarray, num_rounds: np.ndarray, *, is_last: bool
    ) -> None:
        """Counts what the last rounds brought the running texts."""
        label, gained, rounds = self.programs.rungs[self._rung].label, 0, [0]
        for row, text in self.running.items():
            gained += int(lengths[row]) - text.length
            rounds.append(int(num_rounds[row]) - len(text.trees))
            text.length = int(lengths[row])
            text.trees += [label] * rounds[-1]
        chooser = self.programs.chooser
        # Beside a compiler rounds take longer.
        if chooser is not None and self._seconds > 0 and not self.ahead.is_busy:
            part = Stretch(max(rounds), sum(rounds), gained, self._seconds)
            chooser.record(part, is_last=is_last)
        self._seconds = 0.0

    def free(self, row: int) -> None:
        """Ends the text of a row."""
        assert self._state is not None
        self._state = self.programs.free(self._state, row)
        self.texts[row] = None

    def cache_sizes(self, prompt: int) -> list[int]:
        """See `bucket_sizes`; `prompt` has the tokens that are read into the first."""
        depth = self.programs.decoder.depth
        return bucket_sizes(self.max_length, prompt=prompt, depth=depth)

    def _requests(self, texts: Sequence[Text], rows: int, bucket: int = 0) -> Requests:
        """Returns requests, their prompts padded to a bucket or, as 0, to all slots."""
        padded = bucket or self._num_slots
        return self.programs.requests(texts, rows, padded, self.max_length)

    def _ensure_slots(self, num_tokens: int) -> int:
        """Gives the state at least so many slots; returns how many it has."""
        state, programs = self._state, self.programs
        if state is not None and state.tokens.shape[1] >= num_tokens:
            return state.tokens.shape[1]
        sizes = self.cache_sizes(0)
        # A prompt's padding may be longer than any text.
        padded, depth = bucket_length(self.max_length), programs.decoder.depth
        sizes += bucket_sizes(padded, prompt=0, depth=depth)
        size = next(size for size in sizes if size >= num_tokens)
        if state is None:
            self._state = programs.empty(len(self.texts), size)
        else:
            self.ahead.wait(self._key(num_slots=self._num_slots + 1))
            every = self._run_all_rows()
            self._state = programs.call(moves.grow, every, num_slots=size)
        return size
