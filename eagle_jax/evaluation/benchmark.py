"""What one round costs, beside the model calls it cannot do without.

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

from eagle_jax.config import TreeConfig
from eagle_jax.decoding import autoregressive, speculative
from eagle_jax.decoding.requests import Requests, make_requests
from eagle_jax.decoding.state import DecodeState
from eagle_jax.drafting import EagleHead, TreeDrafter
from eagle_jax.evaluation.timing import witness
from eagle_jax.interface import Draws, Params, Target, TargetOutput
from eagle_jax.models import eagle_head
from eagle_jax.models.transformer import (
    Transformer,
    TransformerParams,
    output_head,
    unembed,
)
from eagle_jax.tree import DraftTree, FlatTree, flatten, root_only

_READ_BYTES = 512 * 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spread:
    """Repeated measurements.

    Attributes:
        median: In the figure's unit, milliseconds unless it says otherwise.
        low: Smallest.
        high: Largest.
    """

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> "Spread":
        """Sums up measurements."""
        return cls(median=statistics.median(values), low=min(values), high=max(values))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """What is timed.

    Attributes:
        target: The target.
        model: Its head.
        tree: What the head drafts, at least one level deep.
        params: Of both.
        batch: `B`.
        num_slots: `S`.
        prompt_length: Tokens in the cache before the first round.
    """

    target: Transformer
    model: EagleHead
    tree: TreeConfig
    params: Params
    batch: int
    num_slots: int
    prompt_length: int

    @property
    def drafter(self) -> TreeDrafter:
        """The head and its tree."""
        return TreeDrafter(model=self.model, tree=self.tree)

    def requests(self, new_tokens: int) -> Requests:
        """Returns the same arbitrary prompt in every row."""
        vocab_size = self.target.config.vocab_size
        prompt = np.random.default_rng(0).integers(vocab_size, size=self.prompt_length)
        return make_requests(
            [prompt.tolist()] * self.batch,
            max_new_tokens=new_tokens,
            prompt_bucket=self.prompt_length,
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
        pair: What is timed.
        iterations: Model calls per measurement.
        repeats: Measurements per figure.
        report: Called with the number of finished repeats.

    Returns:
        By name: "token" and "round" in milliseconds with their parts, the "floor"
        of a token, and the ratios "overhead", "token / floor" and "round / token".
    """
    programs = {
        "token": _time_tokens(pair, iterations),
        "round": _time_rounds(pair, iterations),
        "draft": _time_state_loop(pair, _propose, iterations),
        "verify": _time_state_loop(pair, _verify, iterations),
        "accept + commit": _time_commits(pair, iterations),
        "bare verify": _time_state_loop(pair, _bare_verify, iterations),
        "bare drafts": _time_state_loop(pair, _bare_drafts, iterations),
        "read": _time_reads(),
    }
    for program in programs.values():
        program()  # Compiles, and touches all memory once.
    times: dict[str, list[float]] = {name: [] for name in programs}
    for repeat in range(repeats):
        for name, program in programs.items():
            times[name].append(program() * 1e3)
        report(repeat + 1)

    read_bytes = token_bytes(pair.params.target)
    times["floor"] = [ms * read_bytes / _READ_BYTES for ms in times.pop("read")]
    columns = {name: np.array(values) for name, values in times.items()}
    bare = columns["bare verify"] + columns["bare drafts"]
    columns["overhead"] = columns["round"] / bare
    columns["token / floor"] = columns["token"] / columns["floor"]
    columns["round / token"] = columns["round"] / columns["token"]
    return {name: Spread.of(values.tolist()) for name, values in columns.items()}


def token_bytes(params: TransformerParams) -> int:
    """Returns the bytes that one token must read: all weights but the embedding.

    A tied embedding is read as the output head.
    """
    total = sum(x.nbytes for x in jax.tree.leaves(params))
    return total - (0 if params.output_head is None else params.embedding.nbytes)


def time_compilation(pair: Pair) -> dict[str, float]:
    """Returns the seconds that compiling prefill and loop takes.

    Returns:
        "cold", and "cached" with a persistent compilation cache that holds them.
    """
    requests = pair.requests(2)

    def compile_once() -> float:
        jax.clear_caches()
        started = time.perf_counter()
        state = _prefill(pair, requests)
        speculative.decode.lower(
            pair.target,
            pair.drafter,
            pair.params,
            requests,
            state,
            acceptance="greedy",
        ).compile()
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
        pair.target,
        pair.drafter,
        pair.params,
        requests,
        num_slots=pair.num_slots,
        acceptance="greedy",
    )


def _time_tokens(pair: Pair, iterations: int) -> Callable[[], float]:
    """Times plain decoding, seconds per token."""
    requests = pair.requests(iterations + 1)
    target, params = pair.target, pair.params.target

    def run() -> float:
        state = autoregressive.prefill(
            target, params, requests, num_slots=pair.num_slots, greedy=True
        )
        jax.block_until_ready(state)
        started = time.perf_counter()
        state = autoregressive.decode(target, params, requests, state, greedy=True)
        jax.block_until_ready(state)
        return (time.perf_counter() - started) / int(state.num_rounds.max())

    return run


def _time_rounds(pair: Pair, iterations: int) -> Callable[[], float]:
    """Times speculative decoding, seconds per round."""
    requests = pair.requests(iterations + 1)

    def run() -> float:
        state = jax.block_until_ready(_prefill(pair, requests))
        started = time.perf_counter()
        state = speculative.decode(
            pair.target,
            pair.drafter,
            pair.params,
            requests,
            state,
            acceptance="greedy",
        )
        jax.block_until_ready(state)
        return (time.perf_counter() - started) / int(state.num_rounds.max())

    return run


def _time_state_loop(
    pair: Pair,
    body: Callable[[Pair, Params, DecodeState, jax.Array], jax.Array],
    iterations: int,
) -> Callable[[], float]:
    """Times `body`, which turns roots `[B]` into anything that depends on all work."""

    @jax.jit
    def loop(params: Params, state: DecodeState) -> jax.Array:
        def step(_: jax.Array, root: jax.Array) -> jax.Array:
            # Never true, but the compiler cannot know: the next call must wait.
            is_huge = body(pair, params, state, root) > 1e30
            return jnp.where(is_huge, root + 1, root)

        return jax.lax.fori_loop(0, iterations, step, state.root)

    state = jax.block_until_ready(_prefill(pair, pair.requests(2)))

    def run() -> float:
        started = time.perf_counter()
        jax.block_until_ready(loop(pair.params, state))
        return (time.perf_counter() - started) / iterations

    return run


def _time_commits(pair: Pair, iterations: int) -> Callable[[], float]:
    """Times acceptance and commit of one verification, over and over."""
    target, drafter = pair.target, pair.drafter
    requests = pair.requests(iterations + 1)

    @jax.jit
    def verify(params: Params, state: DecodeState) -> tuple[DraftTree, TargetOutput]:
        tree, _ = drafter.propose(
            params.drafter, state.drafter_state, state.root, _greedy_draws(requests)
        )
        flat = jax.vmap(flatten)(tree, state.lengths - 1)
        return tree, _forward(target, params, flat, state)

    @functools.partial(jax.jit, donate_argnums=1)
    def loop(
        params: Params,
        state: DecodeState,
        tree: DraftTree,
        output: TargetOutput,
        logits: jax.Array,
    ) -> DecodeState:
        def step(_: jax.Array, state: DecodeState) -> DecodeState:
            # Never true: keeps the walk from being moved out of the loop.
            shift = (state.lengths < 0).astype(jnp.int32)[:, None]
            shifted = dataclasses.replace(tree, tokens=tree.tokens + shift)
            accepted = speculative.accept(
                requests,
                shifted,
                logits,
                state.lengths - 1,
                None,
                rule="greedy",
                depth=drafter.depth,
            )
            return speculative.commit(
                target, drafter, params, requests, state, shifted, output, accepted
            )

        return jax.lax.fori_loop(0, iterations, step, state)

    def run() -> float:
        state = _prefill(pair, requests)
        tree, output = verify(pair.params, state)
        logits = jax.jit(target.unembed)(pair.params.target, output.hidden)
        jax.block_until_ready((state, tree, output, logits))
        started = time.perf_counter()
        jax.block_until_ready(loop(pair.params, state, tree, output, logits))
        return (time.perf_counter() - started) / iterations

    return run


def _propose(
    pair: Pair, params: Params, state: DecodeState, root: jax.Array
) -> jax.Array:
    """The drafting of a round, with its cache update."""
    draws = _greedy_draws(pair.requests(1))
    drafted = pair.drafter.propose(params.drafter, state.drafter_state, root, draws)
    return witness(drafted)


def _greedy_draws(requests: Requests) -> Draws:
    return Draws(sampling=requests.sampling, noise=None, keys=requests.keys)


def _verify(
    pair: Pair, params: Params, state: DecodeState, root: jax.Array
) -> jax.Array:
    """The target's call of a round, with the flattening of the tree."""
    num_nodes = pair.tree.num_nodes
    tree = jax.vmap(lambda token: _bushy_tree(token, num_nodes))(root)
    flat = jax.vmap(flatten)(tree, state.lengths - 1)
    return _witness_forward(pair.target, params, flat, state)


def _bare_verify(
    pair: Pair, params: Params, state: DecodeState, root: jax.Array
) -> jax.Array:
    """The target's forward and unembed over `N` rows, and nothing else."""
    num_nodes = pair.tree.num_nodes
    tree = _bushy_tree(jnp.zeros((), jnp.int32), num_nodes)
    flat = jax.vmap(flatten, in_axes=(None, 0))(tree, state.lengths - 1)
    tokens = jnp.broadcast_to(root[:, None], flat.tokens.shape)
    flat = dataclasses.replace(flat, tokens=tokens)
    return _witness_forward(pair.target, params, flat, state)


def _forward(
    target: Target, params: Params, flat: FlatTree, state: DecodeState
) -> TargetOutput:
    return target.forward(
        params.target, flat.tokens, flat.positions, flat.mask, state.target_cache
    )


def _witness_forward(
    target: Target, params: Params, flat: FlatTree, state: DecodeState
) -> jax.Array:
    output = _forward(target, params, flat, state)
    return witness(target.unembed(params.target, output.hidden), output)


def _bushy_tree(root: jax.Array, num_nodes: int) -> DraftTree:
    """Returns a tree in which node `i` hangs below node `(i - 1) // 10`."""
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
    """The `D` head calls of a round with their unembeds, and nothing else.

    The first call runs over `P` rows and unembeds the one that the round reads;
    each later call runs over `K` rows and unembeds them all.
    """
    drafter, drafted = pair.drafter, state.drafter_state
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
        outputs, entries = eagle_head.forward(
            weights.head,
            pair.model.config,
            weights.embedding[tokens],
            features,
            jnp.broadcast_to(drafted.cache.length[:, None] + level, tokens.shape),
            jnp.broadcast_to(mask, (pair.batch, *mask.shape)),
            drafted.cache,
            earlier,
        )
        # The pairs of the first call go to the cache; those of later calls wait.
        earlier = None if level == 1 else entries
        read = outputs[:, :1] if level == 1 else outputs
        result = witness(unembed(output_head(params.target), read), outputs)
        features = jnp.broadcast_to(
            outputs[:, :1], (pair.batch, width, outputs.shape[-1])
        )
    return result


def _time_reads() -> Callable[[], float]:
    """Times reading `_READ_BYTES` once, seconds."""
    values = jnp.ones(_READ_BYTES // 4, jnp.float32)

    @jax.jit
    def read(values: jax.Array) -> jax.Array:
        return jnp.max(values)

    def run() -> float:
        started = time.perf_counter()
        read(values).block_until_ready()
        return time.perf_counter() - started

    return run
