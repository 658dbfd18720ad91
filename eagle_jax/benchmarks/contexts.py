"""The cost of a round in texts of different lengths, and attention's part of it."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.benchmarks.timing import witness
from eagle_jax.config import TreeConfig
from eagle_jax.decoding import speculative
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.growth import ladder
from eagle_jax.decoding.requests import make_requests, round_up_slots
from eagle_jax.decoding.state import DecodeState, StopReason
from eagle_jax.drafting import Eagle3Head, EagleHead, TreeDrafter
from eagle_jax.interface import Params
from eagle_jax.models.attention import attend
from eagle_jax.models.cache import KeyValues, KVCache
from eagle_jax.models.layers import LayerConfig
from eagle_jax.models.transformer import Transformer
from eagle_jax.progress import Report, say_nothing


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContextCost:
    """The costs at one length of the text.

    Attributes:
        length: The tokens of the text at the end of the measurement.
        slots: The slots of the caches that a text takes at that length, `S`.
        prefill: The seconds of reading most of the text as a prompt.
        rounds: The milliseconds per round, one figure per repeat.
        attention: The milliseconds per round of attention alone, of target and head,
            one figure per repeat.
    """

    length: int
    slots: int
    prefill: float
    rounds: list[float]
    attention: list[float]

    @property
    def round(self) -> float:
        """The median of the milliseconds per round."""
        return statistics.median(self.rounds)

    @property
    def rest(self) -> float:
        """The median of the milliseconds per round, less attention's."""
        return self.round - statistics.median(self.attention)


def time_contexts(
    target: Transformer,
    model: EagleHead | Eagle3Head,
    tree: TreeConfig,
    params: Params,
    lengths: Sequence[int],
    *,
    iterations: int,
    repeats: int,
    report: Report = say_nothing,
) -> list[ContextCost]:
    """Times rounds in texts that may become as long as the longest of `lengths`.

    The lengths are measured in turn, over and over.

    Args:
        target: The target.
        model: The target's head.
        tree: The tree that the head drafts.
        params: The parameters of target and drafter.
        lengths: The tokens of the texts, each above `(repeats + 1) * iterations` and
            room for as many rounds.
        iterations: The number of tokens per measurement.
        repeats: The number of measurements per length.
        report: Called with a line for every step done.
    """
    decoder = Decoder(
        target=target,
        drafter=TreeDrafter(model=model, tree=tree),
        acceptance="greedy",
    )
    known = target.config.vocab_size
    texts = [
        _Text(decoder, params, known, length, max(lengths), iterations, repeats)
        for length in lengths
    ]
    attend_only = _time_attention(target, model, tree, iterations)
    for text in texts:
        report(f"{text.length} tokens: read in {text.prefill_seconds:.1f} s")
        text.decode()  # Compiles, and touches all memory once.
        attend_only(text.state)
    rounds: list[list[float]] = [[] for _ in texts]
    alone: list[list[float]] = [[] for _ in texts]
    for repeat in range(repeats):
        for number, text in enumerate(texts):
            rounds[number].append(text.decode() * 1e3)
            alone[number].append(attend_only(text.state) * 1e3)
        report(f"measured {repeat + 1} of {repeats}")
    return [
        ContextCost(
            length=text.length,
            slots=text.state.tokens.shape[1],
            prefill=text.prefill_seconds,
            rounds=rounds[number],
            attention=alone[number],
        )
        for number, text in enumerate(texts)
    ]


class _Text:
    """A text that goes on a little with every measurement."""

    def __init__(
        self,
        decoder: Decoder,
        params: Params,
        vocab_size: int,
        length: int,
        longest: int,
        iterations: int,
        repeats: int,
    ) -> None:
        self._decoder, self._params = decoder, params
        self._iterations = iterations
        self.length = length
        # Every measurement may end a few tokens later than was asked for.
        margin = (repeats + 1) * (iterations + decoder.depth + 1)
        prompt_length = length - margin
        prompt = np.random.default_rng(length).integers(vocab_size, size=prompt_length)
        requests = make_requests([prompt.tolist()], max_new_tokens=margin)
        slots = round_up_slots(longest, decoder.depth)
        sizes = ladder(slots, prompt=length, depth=decoder.depth)
        prefill = speculative.prefill.lower(
            decoder, params, requests, num_slots=sizes[0]
        ).compile()
        started = time.perf_counter()
        state: DecodeState = prefill(params, requests)
        self.state = jax.block_until_ready(state)
        self.prefill_seconds = time.perf_counter() - started

    def decode(self) -> float:
        """Adds tokens; returns the seconds per round."""
        rows = self.state.rows
        generated = self.state.lengths - rows.prompt_lengths
        state = dataclasses.replace(
            self.state,
            rows=dataclasses.replace(rows, max_new_tokens=generated + self._iterations),
            stop_reason=jnp.full_like(self.state.stop_reason, StopReason.RUNNING),
        )
        before = int(state.num_rounds[0])
        jax.block_until_ready(state)
        started = time.perf_counter()
        state = speculative.decode(self._decoder, self._params, state)
        self.state = jax.block_until_ready(state)
        seconds = time.perf_counter() - started
        return seconds / (int(state.num_rounds[0]) - before)


def _time_attention(
    target: Transformer,
    model: EagleHead | Eagle3Head,
    tree: TreeConfig,
    iterations: int,
) -> Callable[[DecodeState], float]:
    """Returns a function that times all calls of `attend` of one round, in seconds."""
    # Each later call of the head also sees the unconfirmed tokens before it.
    drafts = [tree.width * level for level in range(1, tree.levels)]

    def body(state: DecodeState, moved: jax.Array) -> jax.Array:
        cache, own = state.target_cache, state.drafter_state.cache
        layer, own_layer = target.config.layer, model.config.layer
        results = _attend_all(cache, layer, tree.num_nodes, tree.num_nodes, moved)
        results += _attend_all(own, own_layer, 1, tree.levels + 1, moved)
        for known in drafts:
            results += _attend_all(own, own_layer, tree.width, known, moved)
        return witness(results)

    @jax.jit
    def loop(state: DecodeState) -> jax.Array:
        return jax.lax.fori_loop(
            0,
            iterations,
            # It is always 0, but the compiler cannot know: the next call must wait.
            lambda _, moved: jnp.minimum(jnp.abs(body(state, moved)), 0.0),
            jnp.zeros(()),
        )

    def run(state: DecodeState) -> float:
        started = time.perf_counter()
        jax.block_until_ready(loop(state))
        return (time.perf_counter() - started) / iterations

    return run


def _attend_all(
    cache: KVCache, layer: LayerConfig, rows: int, known: int, moved: jax.Array
) -> list[jax.Array]:
    """Attends in every layer with `rows` queries, over `known` unconfirmed tokens."""
    batch, num_kv_heads, _, head_dim = cache.layers[0].keys.shape
    dtype = cache.layers[0].keys.dtype
    query = jnp.full((batch, rows, layer.num_heads, head_dim), moved, dtype)
    new = jnp.full((batch, num_kv_heads, known, head_dim), moved, dtype)
    visible = jnp.tri(rows, known, known - rows, dtype=bool)
    mask = jnp.broadcast_to(visible, (batch, rows, known))
    results: list[jax.Array] = []
    for cached in cache.layers:
        query += results[-1].reshape(query.shape) if results else 0
        results.append(
            attend(query, cached, cache.length, KeyValues(keys=new, values=new), mask)
        )
    return results
