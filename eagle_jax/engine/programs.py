"""The compiled programs of a batch, which can be dropped, and all that they run on."""

import contextlib
import copy
import dataclasses
import functools
import inspect
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.constraints.automaton import TokenAutomaton
from eagle_jax.decoding import chunked_prefill, slots, speculative
from eagle_jax.decoding.chunked_prefill import PrefillState
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.growth import Limits
from eagle_jax.decoding.requests import NO_TOKEN, Requests, make_requests
from eagle_jax.decoding.speculative import Round
from eagle_jax.decoding.state import DecodeState, StopReason
from eagle_jax.engine import moves
from eagle_jax.engine.ladder import chooser_of, ladder_of, num_nodes
from eagle_jax.engine.needs import BatchNeeds
from eagle_jax.engine.options import options_of
from eagle_jax.engine.text import News, Text

if TYPE_CHECKING:
    from eagle_jax.engine.pair import Pair

MOST_PROGRAMS = 64
"""The number of programs kept; on a CPU each holds about 300 memory maps and 15 MB.

Linux lets a process have 65,530 maps, and aborts the one that asks for more.
"""


class Store:
    """A store that compiles every program once, and keeps those used last.

    Threads may share it: each waits for another alone that compiles what it needs.
    """

    def __init__(self, most: int = MOST_PROGRAMS) -> None:
        """Starts without a program; `most` are kept at once."""
        self._most, self._waited = most, threading.local()
        self._kept: OrderedDict[Hashable, jax.stages.Compiled] = OrderedDict()
        self._lock = threading.Lock()
        self._turns: dict[Hashable, threading.Lock] = {}
        self._have_run = weakref.WeakSet[jax.stages.Compiled]()

    @property
    def compile_seconds(self) -> float:
        """The seconds that compiling took so far, in this thread."""
        return getattr(self._waited, "seconds", 0.0)

    @property
    def num_kept(self) -> int:
        """The number of programs that are kept now."""
        return len(self._kept)

    def has(self, key: Hashable) -> bool:
        """Returns whether a program is kept."""
        return key in self._kept

    def get(
        self, key: Hashable, compile_it: Callable[[], jax.stages.Compiled]
    ) -> jax.stages.Compiled:
        """Returns a program, compiled now if it is not kept.

        Its `key` is its name and all that it is compiled for.
        """
        with self._lock:
            if (kept := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                return kept
            turn = self._turns.setdefault(key, threading.Lock())
        started = time.perf_counter()
        try:
            with turn:
                program = self._kept.get(key) or compile_it()
                with self._lock:
                    self._kept[key] = program
                    self._turns.pop(key, None)
                    while len(self._kept) > self._most:
                        self._kept.popitem(last=False)
        finally:  # Ctrl-C may have ended it.
            seconds = time.perf_counter() - started
            self._waited.seconds = self.compile_seconds + seconds
        return program

    def note_run(self, program: jax.stages.Compiled) -> bool:
        """Notes that a program runs; returns whether for the first time."""
        is_first = program not in self._have_run
        self._have_run.add(program)
        return is_first

    def clear(self) -> None:
        """Drops every program."""
        with self._lock:
            self._kept.clear()


_KEEPING = (slots.reuse_prefill, moves.take_rows)
"""The functions whose first argument is used again."""

_LAST_SECONDS: dict[Any, float] = {}
"""What the last program of each function took to compile, or would with a tree."""

_ROOT_SHARE = 0.6
"""What a program that drafts nothing takes to compile, of the time with a tree."""

PROGRAMS = Store()
"""The programs of the process: one limit for all its pairs."""


class Programs:
    """What a pair runs for the texts of one batch.

    Attributes:
        pair: The pair.
        needs: What the texts may ask for.
        decoder: The target, the drafter of the largest tree and the acceptance rule.
        rungs: The trees that rounds may draft, the largest last.
        chooser: What chooses among them; `None` where there is one alone.
        was_first_run: Whether the last program that ran had never run before.
        params: The pair's parameters, with those of the constraint.
    """

    def __init__(self, pair: "Pair", needs: BatchNeeds) -> None:
        """Compiles nothing yet; reads the pair's weights if nobody has."""
        self.pair, self.needs, self.params = pair, needs, pair.params
        constraint = None
        rule = pair.config.acceptance if needs.is_sampled else "greedy"
        if needs.grammar is not None:
            tables = needs.grammar.tables
            constraint = TokenAutomaton(vocab_size=pair.vocab_size)
            if pair.sharding is not None:
                tables = jax.device_put(tables, pair.sharding.everywhere)
            self.params = dataclasses.replace(self.params, constraint=tables)
        self.rungs = ladder_of(pair, rule)
        self.chooser = chooser_of(pair, rule)
        self.decoder = Decoder(
            target=pair.target,
            drafter=self.rungs[-1].drafter,
            acceptance=rule,
            constraint=constraint,
            logprobs=needs.logprobs,
        )
        self._decoders = [
            dataclasses.replace(self.decoder, drafter=rung.drafter)
            for rung in self.rungs
        ]
        where = tuple(leaf.sharding for leaf in jax.tree.leaves(self.params))
        self._identity = _identity_of(_shapes(self.params), where)
        self._store = PROGRAMS
        self._is_dry = self.was_first_run = False

    def dry(self) -> "Programs":
        """Returns programs that are compiled, but not run: they return shapes."""
        dry = copy.copy(self)
        dry._is_dry, dry.chooser = True, None
        return dry

    def requests(
        self, texts: Sequence[Text], rows: int, prompt_bucket: int, max_length: int
    ) -> Requests:
        """Returns the requests of texts on the devices; missing rows are made up."""
        tokenizer, own = self.pair.tokenizer, self.pair.stop_tokens
        prompts = [text.prompt_ids for text in texts]
        every = [text.request for text in texts]
        missing = rows - len(texts)
        short = dataclasses.replace(
            every[0], max_new_tokens=1, min_new_tokens=0, seed=0
        )
        every += [short] * missing
        stops = [one.stops(tokenizer, own) for one in every]
        stops[0] += [NO_TOKEN] * (self.needs.num_stops - len(stops[0]))
        names = ("max_new_tokens", "temperature", "top_p", "top_k", "min_p")
        values = {name: [getattr(one, name) for one in every] for name in names}
        requests = make_requests(
            prompts + [[0]] * missing,
            max_length=max_length,
            stop_tokens=stops,
            seeds=[one.seed for one in every],
            prompt_bucket=prompt_bucket,
            vocab_size=self.pair.vocab_size,
            processors=[one.processors(tokenizer) for one in every],
            processor_room=self.needs.room,
            **values,
        )
        return self._put(requests)

    def empty(self, rows: int, num_slots: int) -> DecodeState:
        """Returns a state in which every row is free."""
        state = slots.init_decode_state(
            self.decoder,
            self.params,
            batch=rows,
            num_slots=num_slots,
            num_stop_tokens=self.needs.num_stops,
            processor_room=self.needs.room,
        )
        return self._put(state)

    def prefill(
        self,
        requests: Requests,
        chunks: Sequence[int],
        *,
        num_slots: int,
        num_samples: int = 1,
    ) -> DecodeState:
        """Returns what `chunked_prefill.prefill` does, by chunks of these sizes."""
        sizes = {"num_slots": num_slots, "num_samples": num_samples}
        if [*chunks] == [requests.prompts.shape[1]]:
            return self.call(chunked_prefill.prefill, requests, **sizes)
        prefix = self.call(moves.start, requests, **sizes)
        for size in chunks:
            prefix = self.call(slots.prefill_chunk, prefix, size=size)
        return self.finish(prefix, requests, num_slots=num_slots)

    def finish(
        self, prefix: PrefillState, requests: Requests, *, num_slots: int
    ) -> DecodeState:
        """See `moves.finish`; caches are handed on, where no rows share a prompt."""
        caches = dict[str, Any]()
        if len(prefix.requests.prompts) == len(requests.prompts):
            caches = {name: getattr(prefix, name) for name in moves.CACHES}
            prefix = dataclasses.replace(prefix, **dict.fromkeys(caches))
        begun = self.call(moves.finish, (prefix, requests), num_slots=num_slots)
        return dataclasses.replace(begun, **caches)

    def free(self, state: DecodeState, slot: int) -> DecodeState:
        """See `slots.free`."""
        reasons = np.array(self.fetch(state.stop_reason))
        reasons[slot] = StopReason.FREE
        return dataclasses.replace(state, stop_reason=self._put(jnp.asarray(reasons)))

    def decode_until(
        self, state: DecodeState, limits: Limits, rung: int
    ) -> DecodeState:
        """See `speculative.decode_until`; the state is donated."""
        # After a smaller tree the drafter reads as much as after the largest.
        run, depth = speculative.decode_until, self.decoder.depth
        return self.call(run, state, limits, rung=rung, depth=depth)

    def compile_seconds(self, state: DecodeState, rows: int) -> list[float]:
        """Returns what the loop of each tree would take to compile, 0 if it is there.

        Args:
            state: A state like that of the loops, but for its rows.
            rows: The rows of the loops.
        """
        limits = Limits(np.int32(0), np.int32(0))
        structure, types = _shapes((state, limits))
        count = len(jax.tree.leaves(state))
        of_state = [one.update(shape=(rows, *one.shape[1:])) for one in types[:count]]
        shapes = structure, (*of_state, *types[count:])
        run, static = speculative.decode_until, {"depth": self.decoder.depth}
        keys = [self._key(run, static, one, shapes) for one in self._decoders]
        last = _LAST_SECONDS.get(run, 1.0)
        return [
            0.0 if self._store.has(key) else last * _compile_share(one)
            for key, one in zip(keys, self._decoders, strict=True)
        ]

    def rounds(self, done: Round) -> dict[int, Round]:
        """Returns a round of the rows that were running, without the batch's axis."""
        # The distributions of drafts are large, and not looked at.
        tree = dataclasses.replace(done.tree, draft_logits=None)
        found: Round = self.fetch(dataclasses.replace(done, tree=tree))
        return {
            row: jax.tree.map(lambda x, row=row: x[row], found)
            for row in np.flatnonzero(found.count).tolist()
        }

    def news(self, state: DecodeState) -> News:
        """Returns how far the texts of all rows go."""
        return self.fetch(News(*(getattr(state, name) for name in News._fields)))

    def fetch(self, arrays: Any) -> Any:
        """Returns arrays on the host."""
        sharding = self.pair.sharding
        return (jax.device_get if sharding is None else sharding.fetch)(arrays)

    @contextlib.contextmanager
    def timing(self, texts: Sequence[Text], name: str) -> Iterator[list[float]]:
        """Adds the seconds within, but for compiling, in equal shares to texts.

        Yields a list that holds them at the end.
        """
        taken = list[float]()
        started = time.perf_counter() - self._store.compile_seconds
        yield taken
        seconds = time.perf_counter() - self._store.compile_seconds - started
        taken.append(seconds)
        for text in () if self._is_dry else texts:
            setattr(text, name, getattr(text, name) + seconds / len(texts))

    def _put(self, rows: Any) -> Any:
        sharding = self.pair.sharding
        return rows if sharding is None else sharding.put_rows(rows)

    def call(
        self,
        function: Callable[..., Any],
        rows: Any,
        *rest: Any,
        rung: int = -1,
        **static: Any,
    ) -> Any:
        """Runs a function of the library on the weights, compiled once per shape.

        Args:
            function: The function, of a decoder, its parameters and these.
            rows: The requests of a prefill, otherwise a state, which is donated unless
                what is returned has other `num_slots`.
            *rest: Its other arrays, which every device has whole.
            rung: The place of the tree that is drafted, if any is.
            **static: The function's static arguments, but for the decoder.
        """
        arguments, decoder = (rows, *rest), self._decoders[rung]
        # The tokens that the target reads at once, in all rows.
        count = len(jax.tree.leaves(rows)[0])
        count *= static.get("size") or num_nodes(decoder.drafter)
        if isinstance(rows, Requests):
            count = rows.prompts.size
        before = self._store.compile_seconds
        program = self._store.get(
            self._key(function, static, decoder, _shapes(arguments)),
            lambda: (
                self._bind(function, static, decoder)
                .lower(self.params, *arguments)
                .compile(options_of(count))
            ),
        )
        if seconds := self._store.compile_seconds - before:
            _LAST_SECONDS[function] = seconds / _compile_share(decoder)
        if self._is_dry:
            return program.out_info
        self.was_first_run = self._store.note_run(program)
        return jax.block_until_ready(program(self.params, *arguments))

    def _key(
        self, function: Any, static: dict[str, Any], decoder: Decoder, shapes: Hashable
    ) -> Hashable:
        return function, tuple(static.items()), decoder, self._identity, shapes

    def _bind(
        self, function: Callable[..., Any], static: dict[str, Any], decoder: Decoder
    ) -> jax.stages.Wrapped:
        """Returns a function of weights and arrays that keeps no program by itself."""
        # What a module's own `jax.jit` compiles lives as long as the module.
        bound = functools.partial(inspect.unwrap(function), decoder, **static)
        crosses_rows = function in (moves.insert, slots.reuse_prefill)
        donates = "num_slots" not in static and function not in _KEEPING
        sharding = self.pair.sharding
        if sharding is not None and not crosses_rows:
            return sharding.shard(bound, donates_state=donates)
        run = bound
        if sharding is not None:

            def run(*arguments: Any) -> Any:
                found = bound(*arguments)
                shardings = sharding.row_shardings(found)
                return jax.lax.with_sharding_constraint(found, shardings)

        return jax.jit(run, donate_argnums=(1,) if donates else ())


def _compile_share(decoder: Decoder) -> float:
    return 1.0 if decoder.depth else _ROOT_SHARE


@functools.lru_cache(maxsize=MOST_PROGRAMS)
def _identity_of(*parts: Hashable) -> object:
    """Returns one object for equal parts: to hash hundreds in each call takes 1 ms."""
    return object()


def _shapes(arrays: Any) -> tuple[Any, tuple[Any, ...]]:
    """Returns the structure, shapes and types that a program is compiled for."""
    leaves, structure = jax.tree.flatten(arrays)
    return structure, tuple(jax.typeof(leaf) for leaf in leaves)
