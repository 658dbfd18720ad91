"""A draft model and the shape of a tree make a drafter (EAGLE-1, EAGLE-2, chains)."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax import tree as trees
from eagle_jax.config import TreeConfig, require
from eagle_jax.drafting.calibration import Calibration
from eagle_jax.drafting.model import DraftModel
from eagle_jax.interface import Sampling
from eagle_jax.logits import is_filtered, process_logits
from eagle_jax.tree import DraftTree, Topology


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreeDrafter:
    """Any draft model growing any tree, behind the `Drafter` protocol.

    An EAGLE head and a `TreeConfig` make EAGLE-2, the head and `EAGLE1_TREE` make
    EAGLE-1, a small model and `chain(4)` make standard speculative decoding.

    Attributes:
        model: What drafts.
        tree: A `TreeConfig` for a dynamic tree, a `Topology` for a static one.
        calibration: Makes a dynamic tree's confidences honest before they rank
            anything; `None` takes them as they are, as the paper does.
        sampled: Draw a static tree's children from the model's law, as the published
            EAGLE-1 and speculative sampling do at temperatures above 0, instead of
            taking the likeliest. For the acceptance rule "rejection"; with any other
            the text is the same and fewer drafts are accepted.

    Raises:
        InputError: If a dynamic tree is to be sampled: its shape would depend on what
            was drawn, and the text would no longer be the target's.
    """

    model: DraftModel
    tree: TreeConfig | Topology
    calibration: Calibration | None = None
    sampled: bool = False

    def __post_init__(self) -> None:
        """Refuses a dynamic tree of draws."""
        is_legal = isinstance(self.tree, Topology) or not self.sampled
        require(is_legal, "sampled", self.sampled, "false for a dynamic tree")

    @property
    def depth(self) -> int:
        """See `Drafter.depth`; at 0 the model is never called."""
        return (
            self.tree.levels if isinstance(self.tree, TreeConfig) else self.tree.depth
        )

    @property
    def num_nodes(self) -> int:
        """`N`."""
        return self.tree.num_nodes

    def init_state(self, batch: int, capacity: int) -> Any:
        """See `Drafter.init_state`; `()` where nothing is drafted."""
        if self.depth == 0:
            return ()
        return self.model.init_state(batch, capacity, self.depth)

    def prefill(
        self,
        params: Any,
        state: Any,
        tokens: jax.Array,
        features: jax.Array,
        lengths: jax.Array,
    ) -> Any:
        """See `Drafter.prefill`."""
        if self.depth == 0:
            return state
        return self.model.prefill(params, state, tokens, features, lengths)

    def propose(
        self, params: Any, state: Any, root: jax.Array, sampling: Sampling
    ) -> tuple[DraftTree, Any]:
        """See `Drafter.propose`."""
        if self.depth == 0:
            grow = functools.partial(trees.root_only, num_nodes=self.num_nodes)
            return jax.vmap(grow)(root), state
        output, state = self.model.read(params, state, root)
        if isinstance(self.tree, TreeConfig):
            grown = _grow_dynamic(
                self.model, params, state, root, output, self.tree, self.calibration
            )
            return grown, state
        draws = sampling if self.sampled else None
        grown = _grow_static(self.model, params, state, root, output, self.tree, draws)
        return grown, state

    def advance(
        self,
        params: Any,
        state: Any,
        tokens: jax.Array,
        features: jax.Array,
        count: jax.Array,
    ) -> Any:
        """See `Drafter.advance`."""
        del params
        if self.depth == 0:
            return state
        return self.model.advance(state, tokens, features, count)


def _grow_dynamic(
    model: DraftModel,
    params: Any,
    state: Any,
    root: jax.Array,
    root_output: jax.Array,
    config: TreeConfig,
    calibration: Calibration | None,
) -> DraftTree:
    """Expands level by level, then reranks (EAGLE-2, section 4)."""

    def children(outputs: jax.Array, *, level: int) -> tuple[jax.Array, jax.Array]:
        logits = model.logits(params, outputs)
        choices, log_probs = trees.top_children(logits, config.width)
        tokens = model.tokens(params, choices)
        if calibration is None:
            return tokens, log_probs
        # Ranks may have exponents of their own: the likeliest goes first again.
        honest = calibration.apply(log_probs, level=level)
        log_probs, order = jax.lax.top_k(honest, config.width)
        return jnp.take_along_axis(tokens, order, axis=-1), log_probs

    tokens, log_probs = children(root_output, level=1)
    first_level = functools.partial(trees.first_level, depth=config.levels)
    candidates, frontier = jax.vmap(first_level)(tokens, log_probs)

    outputs, earlier = root_output[:, None], None
    for level in range(2, config.levels + 1):
        above = jnp.take_along_axis(outputs, frontier.parents[..., None], axis=1)
        outputs, earlier = model.step(
            params,
            state,
            frontier.tokens,
            above,
            frontier.visible,
            earlier,
            level=level - 1,
        )
        tokens, log_probs = children(outputs, level=level)
        expand = functools.partial(trees.expand, level=level, rank_by=config.rank_by)
        candidates, frontier = jax.vmap(expand)(candidates, frontier, tokens, log_probs)
    rerank = functools.partial(
        trees.rerank,
        num_nodes=config.num_nodes,
        rank_by=config.rank_by,
        use_rerank=config.rerank,
    )
    return jax.vmap(rerank)(candidates, root)


def _grow_static(
    model: DraftModel,
    params: Any,
    state: Any,
    root: jax.Array,
    root_output: jax.Array,
    shape: Topology,
    draws: Sampling | None,
) -> DraftTree:
    """Fills a fixed shape: the child of rank `r` is the `r`-th likeliest or drawn."""
    batch, num_nodes = root.shape[0], shape.num_nodes
    tokens = jnp.zeros((batch, num_nodes), jnp.int32).at[:, 0].set(root)
    log_values = jnp.zeros((batch, num_nodes), jnp.float32)
    draft_logits: list[jax.Array] = []
    outputs, earlier = root_output[:, None], None
    inner, run = np.zeros(1, np.int32), np.zeros(0, np.int32)
    for level in range(1, shape.depth + 1):
        children = np.flatnonzero(shape.depths == level)
        ranks, parents = shape.ranks[children], shape.parents[children]
        rows, width = np.searchsorted(inner, parents), int(ranks.max()) + 1
        logits = model.logits(params, outputs)
        if draws is None:
            best, log_probs = trees.top_children(logits, width)
        else:
            logits, noise = _law_and_noise(logits, inner, draws)
            draft_logits.append(_over_vocabulary(model, params, logits))
            best, log_probs = trees.draw_children(logits, noise, width)
        best = model.tokens(params, best)
        tokens = tokens.at[:, children].set(best[:, rows, ranks])
        values = log_values[:, parents] + log_probs[:, rows, ranks]
        log_values = log_values.at[:, children].set(values)
        if level == shape.depth:
            break
        above, inner = inner, shape.inner_nodes(level)
        run = np.concatenate([run, inner])
        visible = shape.visible(inner, among=run)
        outputs, earlier = model.step(
            params,
            state,
            tokens[:, inner],
            outputs[:, np.searchsorted(above, shape.parents[inner])],
            jnp.broadcast_to(visible, (batch, *visible.shape)),
            earlier,
            level=level,
        )
    # A vocabulary smaller than a rank has no such child.
    is_node = log_values > -jnp.inf
    return DraftTree(
        tokens=jnp.where(is_node, tokens, 0),
        parents=jnp.where(is_node, jnp.asarray(shape.parents), trees.NO_PARENT),
        log_values=log_values,
        is_node=is_node,
        draft_logits=_by_node(draft_logits, shape) if draft_logits else None,
    )


def _over_vocabulary(model: DraftModel, params: Any, logits: jax.Array) -> jax.Array:
    """Returns logits `[..., W]` as `[..., V]`, `-inf` where the model has no token."""
    num_known = logits.shape[-1]
    if num_known == model.vocab_size:
        return logits
    tokens = model.tokens(params, jnp.arange(num_known))
    shape = (*logits.shape[:-1], model.vocab_size)
    return jnp.full(shape, -jnp.inf, logits.dtype).at[..., tokens].set(logits)


def _law_and_noise(
    logits: jax.Array, nodes: np.ndarray, draws: Sampling
) -> tuple[jax.Array, jax.Array]:
    """Returns the logits `[B, M, W]` of what nodes draw from, and Gumbel noise."""
    filtered = is_filtered(draws.top_p, draws.top_k)
    process = jax.vmap(process_logits, in_axes=(0, None, None, None, None))
    over_rows = jax.vmap(process, in_axes=(0, 0, 0, 0, None))
    logits = over_rows(logits, draws.temperature, draws.top_p, draws.top_k, filtered)

    def noise_of(key: jax.Array, temperature: jax.Array) -> jax.Array:
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, nodes)
        draw = functools.partial(jax.random.gumbel, shape=logits.shape[-1:])
        return jnp.where(temperature > 0, jax.vmap(draw)(keys), 0.0)

    return logits, jax.vmap(noise_of)(draws.keys, draws.temperature)


def _by_node(levels: list[jax.Array], shape: Topology) -> jax.Array:
    """Joins the inner nodes' logits `[B, M, V]` per level to `[B, N, V]`."""
    inner = [shape.inner_nodes(level) for level in range(len(levels))]
    nodes = np.concatenate(inner)
    joined = jnp.concatenate(levels, axis=1)
    laws = jnp.zeros((joined.shape[0], shape.num_nodes, joined.shape[2]), jnp.float32)
    return laws.at[:, nodes].set(joined)
