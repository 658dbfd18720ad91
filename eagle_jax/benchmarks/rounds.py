"""The cost of one round, beside the model calls that it needs.

Every figure comes from a compiled loop with a carried dependence; the programs are
timed in turn, over and over, so that a ratio compares neighbours in time.
"""

import dataclasses
import functools
import statistics
import tempfile
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax.benchmarks.timing import (
    Body,
    draft_body,
    in_turn,
    time_decoding,
    time_loop,
    witness,
)
from eagle_jax.config import TreeConfig
from eagle_jax.decoding import autoregressive, speculative
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.requests import Requests, make_requests
from eagle_jax.decoding.state import DecodeState
from eagle_jax.drafting import Eagle3Head, EagleHead, TreeDrafter
from eagle_jax.interface import Params, TargetOutput
from eagle_jax.models.transformer import Transformer
from eagle_jax.tree import DraftTree, root_only


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spread:
    """The summary of repeated measurements, in milliseconds or the figure's own unit.

    Attributes:
        median: The median.
        low: The smallest measurement.
        high: The largest measurement.
    """

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> "Spread":
        """Returns the summary of measurements."""
        return cls(median=statistics.median(values), low=min(values), high=max(values))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """A target, its head and the sizes with which they are timed.

    Attributes:
        target: The target.
        model: The target's head.
        tree: The tree that the head drafts, at least one level deep.
        params: The parameters of target and drafter.
        batch: The number of rows, `B`.
        num_slots: The number of cache slots, `S`.
        prompt_length: The tokens in the cache before the first round.
    """

    target: Transformer
    model: EagleHead | Eagle3Head
    tree: TreeConfig
    params: Params
    batch: int
    num_slots: int
    prompt_length: int

    @property
    def drafter(self) -> TreeDrafter:
        """The head and its tree."""
        return TreeDrafter(model=self.model, tree=self.tree)

    @property
    def decoder(self) -> Decoder:
        """Target and drafter, greedy."""
        return Decoder(target=self.target, drafter=self.drafter, acceptance="greedy")

    def requests(self, new_tokens: int) -> Requests:
        """Returns the same arbitrary prompt in every row."""
        return arbitrary_requests(
            self.target.config.vocab_size,
            batch=self.batch,
            prompt_length=self.prompt_length,
            new_tokens=new_tokens,
        )


def arbitrary_requests(
    vocab_size: int, *, batch: int, prompt_length: int, new_tokens: int
) -> Requests:
    """Returns requests with the same arbitrary prompt in every row.

    Args:
        vocab_size: The number of tokens the target knows, `V`.
        batch: The number of rows, `B`.
        prompt_length: The number of tokens of the prompt.
        new_tokens: The number of tokens to generate.
    """
    prompt = np.random.default_rng(0).integers(vocab_size, size=prompt_length)
    return make_requests(
        [prompt.tolist()] * batch,
        max_new_tokens=new_tokens,
        prompt_bucket=prompt_length,
    )


def time_rounds(
    pair: Pair,
    *,
    iterations: int = 32,
    repeats: int = 9,
    report: Callable[[int], None] = lambda done: None,
) -> dict[str, Spread]:
    """Times decoding step by step.

    Args:
        pair: The pair that is timed.
        iterations: The number of model calls per measurement.
        repeats: The number of measurements per figure.
        report: Called with the number of finished repeats.

    Returns:
        The figures by name: "token" and "round" in milliseconds with their parts, and
        the ratios "overhead" and "round / token".
    """
    settings = (pair.decoder, pair.params, pair.requests(iterations + 1))
    bodies = {
        "draft": draft_body(pair.decoder),
        "verify": _verify(pair, is_bare=False),
        "bare verify": _verify(pair, is_bare=True),
        "bare drafts": functools.partial(_bare_drafts, pair),
    }
    begun = _prefill(pair, pair.requests(2))
    programs = {
        **{
            name: time_decoding(library, *settings, num_slots=pair.num_slots)
            for name, library in (("token", autoregressive), ("round", speculative))
        },
        **{
            name: time_loop(body, pair.params, begun, iterations)
            for name, body in bodies.items()
        },
        "accept + commit": _time_commits(pair, iterations),
    }
    found = in_turn(programs, repeats, measured=report)
    times = {name: [1e3 * x for x in seconds] for name, seconds in found.items()}

    columns = {name: np.array(values) for name, values in times.items()}
    bare = columns["bare verify"] + columns["bare drafts"]
    columns["overhead"] = columns["round"] / bare
    columns["round / token"] = columns["round"] / columns["token"]
    return {name: Spread.of(values.tolist()) for name, values in columns.items()}


def time_compilation(pair: Pair) -> dict[str, float]:
    """Returns the seconds that compiling prefill and loop takes.

    Returns:
        The seconds by name: "cold", and "cached" with a persistent compilation cache
        that holds both programs.
    """
    requests = pair.requests(2)

    def compile_once() -> float:
        jax.clear_caches()
        started = time.perf_counter()
        state = _prefill(pair, requests)
        speculative.decode.lower(pair.decoder, pair.params, state).compile()
        return time.perf_counter() - started

    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "jax_compilation_cache_dir": folder,
            "jax_persistent_cache_min_compile_time_secs": 0.0,
            "jax_persistent_cache_min_entry_size_bytes": -1,
        }
        before = {name: getattr(jax.config, name) for name in settings}
        for name, value in settings.items():
            jax.config.update(name, value)
        _forget_cache_folder()
        try:
            return {"cold": compile_once(), "cached": compile_once()}
        finally:
            for name, value in before.items():
                jax.config.update(name, value)
            _forget_cache_folder()


def _forget_cache_folder() -> None:
    """Makes JAX open the compilation cache anew: it keeps the first folder."""
    from jax.experimental.compilation_cache import compilation_cache

    compilation_cache.reset_cache()


def _prefill(pair: Pair, requests: Requests) -> DecodeState:
    return speculative.prefill(
        pair.decoder, pair.params, requests, num_slots=pair.num_slots
    )


def _time_commits(pair: Pair, iterations: int) -> Callable[[], float]:
    """Returns a function that times acceptance and commit of a round, in seconds."""
    decoder = pair.decoder
    requests = pair.requests(iterations + 1)

    @jax.jit
    def verify(
        params: Params, state: DecodeState
    ) -> tuple[DraftTree, TargetOutput, jax.Array]:
        draws = speculative.round_draws(decoder, params, state)
        tree, _ = pair.drafter.propose(
            params.drafter, state.drafter_state, state.root, draws
        )
        return tree, *speculative.run_target(decoder, params, state, tree)

    @functools.partial(jax.jit, donate_argnums=1)
    def loop(
        params: Params,
        state: DecodeState,
        tree: DraftTree,
        output: TargetOutput,
        logits: jax.Array,
    ) -> DecodeState:
        def step(_: jax.Array, state: DecodeState) -> DecodeState:
            # It is never true, and keeps the walk from being moved out of the loop.
            shift = (state.lengths < 0).astype(jnp.int32)[:, None]
            shifted = dataclasses.replace(tree, tokens=tree.tokens + shift)
            accepted = speculative.accept(decoder, state, shifted, logits, None)
            return speculative.commit(
                decoder, params, state, shifted, output, logits, accepted
            )[0]

        return jax.lax.fori_loop(0, iterations, step, state)

    def run() -> float:
        state = _prefill(pair, requests)
        verified = jax.block_until_ready(verify(pair.params, state))
        started = time.perf_counter()
        jax.block_until_ready(loop(pair.params, state, *verified))
        return (time.perf_counter() - started) / iterations

    return run


def _verify(pair: Pair, *, is_bare: bool) -> Body:
    """Returns the target's call of a round over `N` rows.

    With `is_bare`, the tree is known when it is compiled: forward and unembed are left.
    """
    num_nodes = pair.tree.num_nodes

    def body(params: Params, state: DecodeState, root: jax.Array) -> jax.Array:
        known = jnp.zeros_like(root) if is_bare else root
        tree = jax.vmap(lambda token: _bushy_tree(token, num_nodes))(known)
        if is_bare:
            tokens = jnp.broadcast_to(root[:, None], tree.tokens.shape)
            tree = dataclasses.replace(tree, tokens=tokens)
        output, logits = speculative.run_target(pair.decoder, params, state, tree)
        return witness(logits, output)

    return body


def _bushy_tree(root: jax.Array, num_nodes: int) -> DraftTree:
    """Returns a tree in which node `i` is a child of node `(i - 1) // 10`."""
    nodes = jnp.arange(num_nodes, dtype=jnp.int32)
    tree = root_only(root, num_nodes)
    return dataclasses.replace(
        tree,
        tokens=jnp.full(num_nodes, root, jnp.int32),
        parents=jnp.where(nodes == 0, -1, (nodes - 1) // 10),
        is_node=jnp.ones(num_nodes, bool),
    )


def _bare_drafts(
    pair: Pair, params: Params, state: DecodeState, root: jax.Array
) -> jax.Array:
    """Runs the `D` head calls of a round with their unembeds, and nothing else.

    The first call runs over `P` rows and unembeds the one that the round reads;
    each later call runs over `K` rows and unembeds them all.
    """
    model, drafter, drafted = pair.model, pair.drafter, state.drafter_state
    width, depth = pair.tree.width, drafter.depth
    weights = params.drafter
    features, earlier = drafted.features, None
    result = jnp.zeros(())
    for level in range(1, depth + 1):
        rows = depth + 1 if level == 1 else width
        tokens = jnp.broadcast_to(root[:, None], (pair.batch, rows))
        tokens = tokens + (result > 1e30).astype(jnp.int32)
        seen = 0 if earlier is None else earlier.keys.shape[2]
        mask = jnp.tri(rows, rows + seen, seen, dtype=bool)
        mask = jnp.broadcast_to(mask, (pair.batch, *mask.shape))
        if level == 1:
            positions = drafted.cache.length[:, None] + jnp.arange(rows)
            fused = model.fuse(weights, features)
            inputs = tokens, fused, positions, mask, drafted.cache
            outputs, entries = model.run(weights, *inputs)
        else:
            inputs = tokens, features, mask, earlier
            outputs, entries = model.step(weights, drafted, *inputs, level=level)
        # The pairs of the first call go to the cache; those of later calls wait.
        earlier = None if level == 1 else entries
        read = outputs[:, :1] if level == 1 else outputs
        result = witness(model.logits(weights, read, level=level), outputs)
        features = jnp.broadcast_to(
            outputs[:, :1], (pair.batch, width, outputs.shape[-1])
        )
    return result
