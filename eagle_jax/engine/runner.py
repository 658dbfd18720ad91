"""Running batches of prompts, as one program or round by round."""

import dataclasses
import functools
import inspect
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.decoding import autoregressive, slots, speculative
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.growth import bucket_sizes, decode_growing, grow
from eagle_jax.decoding.requests import NO_TOKEN, Requests, make_requests
from eagle_jax.decoding.speculative import Round
from eagle_jax.decoding.state import DecodeState, StopReason
from eagle_jax.drafting import TreeDrafter, find_tree_drafter
from eagle_jax.engine.config import PairConfig
from eagle_jax.engine.pairs import LoadedPair
from eagle_jax.engine.programs import PROGRAMS, Programs
from eagle_jax.engine.request import Request, request_of
from eagle_jax.engine.rows import Row, read_rows
from eagle_jax.engine.shared import Shared
from eagle_jax.interface import Drafter


@dataclasses.dataclass(frozen=True, kw_only=True)
class Runner:
    """A pair with the settings and the shape of the batches that it decodes.

    Attributes:
        pair: The models and their weights.
        drafter: The pair's drafter, or `None` for plain decoding.
        config: All settings of a run.
        max_length: The largest number of tokens of prompt and output together.
        prompt_bucket: The padded length of the prompts, `T`.
        batch_size: The number of rows, `B`.
        shared: What its requests may ask for; by default what `config` does.
        programs: The compiled programs; by default those of the whole process.
    """

    pair: LoadedPair
    drafter: Drafter | None
    config: PairConfig
    max_length: int
    prompt_bucket: int
    batch_size: int
    shared: Shared | None = None
    programs: Programs = PROGRAMS

    def warm_up(self, *, by_round: bool, with_growth: bool = False) -> float:
        """Compiles on requests of two tokens, for the first size of the cache.

        Args:
            by_round: Whether to compile one round, instead of the loop over all.
            with_growth: Whether to compile the loop for the larger sizes too, which few
                texts reach.

        Returns:
            The seconds that it took.
        """
        own = self.request(seed=0)
        short = dataclasses.replace(own, max_new_tokens=min(2, own.max_new_tokens))
        requests = self.filled([[0]] * self.batch_size, [short] * self.batch_size)
        started = time.perf_counter()
        state = self._prefill(requests)
        state = self._advance(state)[0] if by_round else self._rounds(state)
        for size in self._cache_sizes[1:] if with_growth else ():
            state = self._rounds(self.grow(state, size))
        jax.block_until_ready(state)
        return time.perf_counter() - started

    def run(
        self,
        prompts: list[list[int]],
        settings: Sequence[Request],
        *,
        num_samples: int = 1,
    ) -> tuple[list[Row], float, float]:
        """Decodes up to `batch_size` prompts, all rounds as one program.

        Args:
            prompts: The prompts' token ids; missing prompts are made up, so that all
                batches share one compilation, and left out of the result.
            settings: The settings of each; stop strings are not looked for.
            num_samples: The number of neighbours that have one prompt, which is read
                once, `n`. It divides `batch_size` and the number of prompts; over a
                mesh, the rows of each part.

        Returns:
            The texts, in order; the seconds of reading the prompts, the first tokens
            included; and those of decoding, both without what was compiled.
        """
        requests = jax.block_until_ready(self.filled(prompts, settings))
        started = self.clock()
        state = jax.block_until_ready(self._prefill(requests, num_samples))
        prefill_seconds = self.clock() - started
        started = self.clock()
        state = decode_growing(
            state, self._cache_sizes, self._rounds, self.grow, self.fetch
        )
        jax.block_until_ready(state)
        decode_seconds = self.clock() - started
        rows = read_rows(state, self.fetch)
        self.judge_fit(rows)
        return rows[: len(prompts)], prefill_seconds, decode_seconds

    def rounds(
        self, prompts: list[list[int]], settings: Sequence[Request]
    ) -> Iterator[tuple[list[Row], Round | None]]:
        """Decodes up to `batch_size` prompts, and yields the batch after each round.

        Args:
            prompts: The prompts' token ids.
            settings: The settings of each; stop strings are not looked for.

        Yields:
            The texts so far, those that were made up to fill the batch included, after
            the prefill and then after every round; and that round, `None` after the
            prefill and in plain decoding.
        """
        state = self._prefill(self.filled(prompts, settings))
        rows = read_rows(state, self.fetch)
        yield rows, None
        while left := [row for row in rows if row.stop_reason == StopReason.RUNNING]:
            longest = max(len(row.prompt_ids) + len(row.generated_ids) for row in left)
            num_slots = state.tokens.shape[1]
            if longest + self.decoder.depth + 1 > num_slots:
                larger = min(size for size in self._cache_sizes if size > num_slots)
                state = self.grow(state, larger)
            state, done = self._advance(state)
            rows = read_rows(state, self.fetch)
            yield rows, done
        self.judge_fit(rows)

    @functools.cached_property
    def decoder(self) -> Decoder:
        """The target, the drafter and the acceptance rule that are run."""
        return Decoder(
            target=self.pair.target,
            drafter=self.drafter,
            acceptance=self.config.rule,
            constraint=self.pair.constraint,
            logprobs=self.needs.logprobs,
        )

    def clock(self) -> float:
        """Returns seconds of a clock that stands still while something is compiled."""
        return time.perf_counter() - self.programs.compile_seconds

    @functools.cached_property
    def needs(self) -> Shared:
        """What its requests may ask for."""
        return self.shared or Shared.of([self.request(seed=0)], self.pair)

    def request(self, seed: int) -> Request:
        """Returns the settings of a request that asks for nothing but its seed."""
        return request_of(self.config.request, given={"seed": seed})

    def filled(
        self,
        prompts: list[list[int]],
        settings: Sequence[Request],
        *,
        rows: int | None = None,
        prompt_bucket: int | None = None,
    ) -> Requests:
        """Returns requests for a whole batch, on the devices.

        Args:
            prompts: The prompts' token ids.
            settings: The settings of each.
            rows: The number of rows; `None` for the runner's. The missing ones are made
                up.
            prompt_bucket: The padded length of the prompts, `T`; `None` for the
                runner's.
        """
        missing = (rows or self.batch_size) - len(prompts)
        short = dataclasses.replace(
            settings[0], max_new_tokens=1, min_new_tokens=0, seed=0
        )
        every, shared = [*settings, *[short] * missing], self.needs
        pair = self.pair
        stops = [one.stops(pair.tokenizer, pair.stop_tokens) for one in every]
        stops[0] += [NO_TOKEN] * (shared.num_stops - len(stops[0]))
        names = ("max_new_tokens", "temperature", "top_p", "top_k", "min_p")
        values = {name: [getattr(one, name) for one in every] for name in names}
        requests = make_requests(
            prompts + [[0]] * missing,
            max_length=self.max_length,
            stop_tokens=stops,
            seeds=[one.seed for one in every],
            prompt_bucket=prompt_bucket or self.prompt_bucket,
            vocab_size=self.pair.target.config.vocab_size,
            processors=[one.processors(self.pair.tokenizer) for one in every],
            processor_room=shared.room,
            **values,
        )
        return self.put(requests)

    def put(self, rows: Any) -> Any:
        """Returns requests or a state on the devices."""
        sharding = self.pair.sharding
        return rows if sharding is None else sharding.put_rows(rows)

    def _prefill(self, requests: Requests, num_samples: int = 1) -> DecodeState:
        sizes = {"num_slots": self._cache_sizes[0], "num_samples": num_samples}
        return self.call(self._library.prefill, requests, **sizes)

    def _rounds(self, state: DecodeState) -> DecodeState:
        return self.call(self._library.decode, state)

    def grow(self, state: DecodeState, size: int) -> DecodeState:
        """Returns the state with so many slots, see `growth.grow`."""
        return self.call(grow, state, num_slots=size)

    def _advance(self, state: DecodeState) -> tuple[DecodeState, Round | None]:
        """Runs one round, for which the cache must have room."""
        if self.drafter is None:
            return self.call(autoregressive.decode_step, state), None
        return self.call(speculative.decode_round, state)

    @property
    def _library(self) -> Any:
        return autoregressive if self.drafter is None else speculative

    def call(self, function: Callable[..., Any], rows: Any, **static: Any) -> Any:
        """Runs a function of the library on the weights, compiled once per shape.

        Args:
            function: The function, which is under `jax.jit`.
            rows: The requests of a prefill, otherwise a state, which is donated unless
                what is returned has other `num_slots`.
            **static: The function's static arguments, but for the decoder.
        """
        key = (function, tuple(static.items()), self._identity, _shapes(rows))
        arguments = (self.pair.params, rows)
        program = self.programs.get(
            key, lambda: self._bind(function, static).lower(*arguments).compile()
        )
        return program(*arguments)

    def free(self, state: DecodeState, slot: int) -> DecodeState:
        """See `slots.free`."""
        reasons = np.array(self.fetch(state.stop_reason))
        reasons[slot] = StopReason.FREE
        return dataclasses.replace(state, stop_reason=self.put(jnp.asarray(reasons)))

    def reuse(
        self, requests: Requests, state: DecodeState, slot: int, length: int, size: int
    ) -> Any:
        """See `slots.reuse_prefill`; compiled once per shape, too."""
        arguments = (requests, state, np.int32(slot), np.int32(length))
        arguments = (self.pair.params, *arguments)
        key = (slots.reuse_prefill, size, self._identity, _shapes(arguments[1:3]))
        plain = inspect.unwrap(slots.reuse_prefill)
        function = jax.jit(functools.partial(plain, self.decoder, size=size))
        program = self.programs.get(key, lambda: function.lower(*arguments).compile())
        return program(*arguments)

    def insert(
        self, prefix: DecodeState, state: DecodeState, slot: int, row: int
    ) -> Any:
        """See `slots.insert`; compiled once per shape, too."""
        arguments = (prefix, state, np.int32(slot), np.int32(row))
        key = (slots.insert, self._identity, _shapes(arguments[:2]))
        sharding = self.pair.sharding
        placed = None if sharding is None else sharding.row_shardings(state)
        # What a module's own `jax.jit` compiles lives as long as the module.
        function = jax.jit(
            inspect.unwrap(slots.insert), donate_argnums=(1,), out_shardings=placed
        )
        program = self.programs.get(key, lambda: function.lower(*arguments).compile())
        return program(*arguments)

    def _bind(
        self, function: Callable[..., Any], static: dict[str, Any]
    ) -> jax.stages.Wrapped:
        """Returns a function of weights and rows that keeps no program by itself."""
        plain = inspect.unwrap(function)
        if function is grow:

            def bound(_: Any, state: DecodeState) -> DecodeState:
                return plain(self.decoder, state, **static)

        else:
            bound = functools.partial(plain, self.decoder, **static)
        donates = "num_slots" not in static
        sharding = self.pair.sharding
        if sharding is not None:
            return sharding.shard(bound, donates_state=donates)
        return jax.jit(bound, donate_argnums=(1,) if donates else ())

    @functools.cached_property
    def _identity(self) -> Hashable:
        """All that a program is compiled for, but its rows."""
        params = self.pair.params
        where = tuple(leaf.sharding for leaf in jax.tree.leaves(params))
        return self.decoder, _shapes(params), where

    @property
    def _cache_sizes(self) -> list[int]:
        prompt, depth = self.prompt_bucket, self.decoder.depth
        return bucket_sizes(self.max_length, prompt=prompt, depth=depth)

    def fetch(self, arrays: Any) -> Any:
        """Returns arrays on the host."""
        sharding = self.pair.sharding
        return (jax.device_get if sharding is None else sharding.fetch)(arrays)

    def judge_fit(self, rows: Iterable[Row]) -> None:
        """Warns, once per pair, if a draft model's weights do not fit the target."""
        drafts = find_tree_drafter(self.drafter) is not None and self.decoder.depth > 0
        if drafts and self.pair.first_rounds is not None:
            # Those of a switch are partly copied, and have no probability.
            model = (
                self.drafter.model if isinstance(self.drafter, TreeDrafter) else None
            )
            sure = self.decoder.acceptance in ("greedy", "coupled")
            self.pair.first_rounds.judge(
                rows,
                has_confidence=sure and model is not None,
                continues=model is not None and model.max_levels is None,
            )


def _shapes(arrays: Any) -> Hashable:
    """Returns the structure, shapes and types that a program is compiled for."""
    leaves, structure = jax.tree.flatten(arrays)
    return structure, tuple(jax.typeof(leaf) for leaf in leaves)
