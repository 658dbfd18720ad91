"""Running batches of prompts, as one program or round by round."""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from eagle_jax.cli.pairs import LoadedPair
from eagle_jax.config import GenerateConfig
from eagle_jax.decoding import autoregressive, speculative
from eagle_jax.decoding.growth import decode_growing, grow, has_room, ladder
from eagle_jax.decoding.requests import Requests, make_requests, round_up_slots
from eagle_jax.decoding.speculative import AcceptanceRule, Round
from eagle_jax.decoding.state import DecodeState, StopReason
from eagle_jax.interface import Drafter

Observer = Callable[["Snapshot"], None]
"""Called after the prefill and after each round of a batch."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """What became of one request.

    Attributes:
        prompt_ids: Its prompt.
        generated_ids: With the prefill's token and the stop token.
        stop_reason: `RUNNING` if it was interrupted.
        accept_lengths: Drafted tokens accepted in each round, uncut.
    """

    prompt_ids: list[int]
    generated_ids: list[int]
    stop_reason: StopReason
    accept_lengths: list[int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A batch in the middle, on the host.

    Attributes:
        rows: What there is of each request so far.
        round: The round just done; `None` after the prefill and in plain decoding.
    """

    rows: list[Row]
    round: Round | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchResult:
    """A decoded batch.

    Attributes:
        rows: One per request.
        prefill_seconds: Reading the prompts, the first tokens included.
        decode_seconds: Without the prefill, and without the observer.
        was_interrupted: Whether Ctrl-C ended it.
    """

    rows: list[Row]
    prefill_seconds: float
    decode_seconds: float
    was_interrupted: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Programs:
    """What runs on the devices, from weights, requests and a state to a state."""

    prefill: Callable[..., Any]
    decode: Callable[..., Any]
    advance: Callable[..., Any]
    grow: Mapping[int, Callable[..., Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Runner:
    """Decodes batches of one shape with one pair.

    Attributes:
        pair: What is run.
        drafter: The pair's drafter, or `None` to decode plainly.
        config: All settings.
        max_length: Prompt plus output.
        prompt_bucket: Padded length of the prompts.
        batch_size: `B`.
    """

    pair: LoadedPair
    drafter: Drafter | None
    config: GenerateConfig
    max_length: int
    prompt_bucket: int
    batch_size: int

    def warm_up(self, *, by_round: bool) -> float:
        """Compiles on requests of two tokens, for every size that the cache may take.

        Returns:
            The seconds it took.
        """
        new_tokens = min(2, self.config.decoding.max_new_tokens)
        requests = self._requests([[0]] * self.batch_size, new_tokens, seeds=0)
        started = time.perf_counter()
        state = self._prefill(requests)
        for size in self._cache_sizes:
            if size > state.tokens.shape[1]:
                state = self._programs.grow[size](self._params, state)
            if by_round:
                state, _ = self._advance(requests, state)
                state.is_running.any()  # Compiles too, and is asked after every round.
            else:
                state = self._programs.decode(self._params, requests, state)
        jax.block_until_ready(state)
        return time.perf_counter() - started

    def run(
        self,
        prompts: list[list[int]],
        seeds: list[int],
        observer: Observer | None = None,
    ) -> BatchResult:
        """Decodes up to `batch_size` prompts.

        Args:
            prompts: Ids; missing ones are made up, so that all batches share one
                compilation, and left out of the result.
            seeds: One per prompt.
            observer: If given, rounds are driven from Python and reported.

        Returns:
            The rows, in order.
        """
        missing = self.batch_size - len(prompts)
        new_tokens = [self.config.decoding.max_new_tokens] * len(prompts)
        requests = self._requests(
            prompts + [[0]] * missing,
            new_tokens + [1] * missing,
            seeds=seeds + [0] * missing,
        )
        jax.block_until_ready(requests)
        started = time.perf_counter()
        state = jax.block_until_ready(self._prefill(requests))
        prefill_seconds = time.perf_counter() - started
        if observer is not None:
            result = self._observe(requests, state, observer, prefill_seconds)
            return dataclasses.replace(result, rows=result.rows[: len(prompts)])
        started = time.perf_counter()
        state = jax.block_until_ready(self._decode(requests, state))
        decode_seconds = time.perf_counter() - started
        return BatchResult(
            rows=self._rows(requests, state)[: len(prompts)],
            prefill_seconds=prefill_seconds,
            decode_seconds=decode_seconds,
        )

    @property
    def acceptance(self) -> AcceptanceRule:
        """How drafts are accepted."""
        return self.config.sampling.rule

    @property
    def _greedy(self) -> bool:
        return self.acceptance == "greedy"

    def _requests(
        self, prompts: list[list[int]], new_tokens: int | list[int], *, seeds: Any
    ) -> Requests:
        sampling = self.config.sampling
        ignored = self.config.decoding.ignore_eos
        requests = make_requests(
            prompts,
            max_new_tokens=new_tokens,
            max_length=self.max_length,
            stop_tokens=() if ignored else self.pair.stop_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seeds=seeds,
            prompt_bucket=self.prompt_bucket,
            vocab_size=self.pair.target.config.vocab_size,
        )
        placement = self.pair.placement
        return requests if placement is None else placement.put_rows(requests)

    def _prefill(self, requests: Requests) -> DecodeState:
        return self._programs.prefill(self._params, requests)

    def _decode(self, requests: Requests, state: DecodeState) -> DecodeState:
        return decode_growing(
            state,
            self._cache_sizes,
            lambda state: self._programs.decode(self._params, requests, state),
            lambda state, size: self._programs.grow[size](self._params, state),
            self._fetch,
        )

    def _advance(
        self, requests: Requests, state: DecodeState
    ) -> tuple[DecodeState, Round | None]:
        """Runs one round, with a larger cache if it needs one."""
        if not has_room(state, self._depth):
            size = min(x for x in self._cache_sizes if x > state.tokens.shape[1])
            state = self._programs.grow[size](self._params, state)
        done = self._programs.advance(self._params, requests, state)
        return (done, None) if self.drafter is None else done

    @property
    def _params(self) -> Any:
        params = self.pair.params
        return params.target if self.drafter is None else params

    @functools.cached_property
    def _programs(self) -> _Programs:
        target, drafter = self.pair.target, self.drafter
        bind = functools.partial
        if drafter is None:
            programs, pair, rule = autoregressive, (target,), {"greedy": self._greedy}
            advance = bind(programs.decode_step, *pair, **rule)
        else:
            programs, pair = speculative, (target, drafter)
            rule = {"acceptance": self.acceptance}
            advance = bind(programs.decode_round, *pair, **rule)
        sizes = self._cache_sizes
        prefill = bind(programs.prefill, *pair, num_slots=sizes[0], **rule)
        decode = bind(programs.decode, *pair, **rule)

        def grow_to(num_slots: int) -> Callable[..., Any]:
            return lambda _, state: grow(target, drafter, state, num_slots=num_slots)

        larger = {size: grow_to(size) for size in sizes[1:]}
        placement = self.pair.placement
        if placement is not None:
            prefill = placement.spread(prefill)
            decode = placement.spread(decode, donates_state=True)
            advance = placement.spread(advance, donates_state=True)
            larger = {size: placement.spread(grow) for size, grow in larger.items()}
        return _Programs(prefill=prefill, decode=decode, advance=advance, grow=larger)

    @property
    def _depth(self) -> int:
        return 0 if self.drafter is None else self.drafter.depth

    @property
    def _cache_sizes(self) -> list[int]:
        longest = max(self.max_length, self.prompt_bucket)
        slots = round_up_slots(longest, depth=self._depth)
        return ladder(slots, prompt=self.prompt_bucket, depth=self._depth)

    def _rows(self, requests: Requests, state: DecodeState) -> list[Row]:
        return read_rows(requests, state, self._fetch)

    def _fetch(self, arrays: Any) -> Any:
        placement = self.pair.placement
        return (jax.device_get if placement is None else placement.fetch)(arrays)

    def _observe(
        self,
        requests: Requests,
        state: DecodeState,
        observer: Observer,
        prefill_seconds: float,
    ) -> BatchResult:
        """Decodes round by round; Ctrl-C ends it with what there is."""
        rows = self._rows(requests, state)
        watched = 0.0
        was_interrupted = False

        def watch(snapshot: Snapshot) -> None:
            nonlocal watched
            began = time.perf_counter()
            observer(snapshot)
            watched += time.perf_counter() - began

        started = time.perf_counter()
        try:
            watch(Snapshot(rows=rows, round=None))
            while bool(state.is_running.any()):
                state, done = self._advance(requests, state)
                rows = self._rows(requests, state)
                watch(Snapshot(rows=rows, round=done))
        except KeyboardInterrupt:
            was_interrupted = True
        return BatchResult(
            rows=rows,
            prefill_seconds=prefill_seconds,
            decode_seconds=time.perf_counter() - started - watched,
            was_interrupted=was_interrupted,
        )


def read_rows(
    requests: Requests, state: DecodeState, fetch: Callable[[Any], Any]
) -> list[Row]:
    """Brings the texts to the host, by what fetches arrays from the devices."""
    tokens, lengths, reasons, accepted, rounds, starts = fetch(
        (
            state.tokens,
            state.lengths,
            state.stop_reason,
            state.accept_lengths,
            state.num_rounds,
            requests.prompt_lengths,
        )
    )
    return [
        Row(
            prompt_ids=tokens[row, : starts[row]].tolist(),
            generated_ids=tokens[row, starts[row] : lengths[row]].tolist(),
            stop_reason=StopReason(int(reasons[row])),
            accept_lengths=accepted[row, : rounds[row]].tolist(),
        )
        for row in range(len(lengths))
    ]
