"""A draft model and the shape of a tree make a drafter (EAGLE-1, EAGLE-2, chains)."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax import tree as trees
from eagle_jax.config import TreeConfig
from eagle_jax.drafting.model import DraftModel
from eagle_jax.tree import DraftTree, Topology


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreeDrafter:
    """Any draft model growing any tree, behind the `Drafter` protocol.

    An EAGLE head and a `TreeConfig` make EAGLE-2, the head and `EAGLE1_TREE` make
    EAGLE-1, a small model and `chain(4)` make standard speculative decoding.

    Attributes:
        model: What drafts.
        tree: A `TreeConfig` for a dynamic tree, a `Topology` for a static one.
    """

    model: DraftModel
    tree: TreeConfig | Topology

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
        self, params: Any, state: Any, root: jax.Array, keys: jax.Array
    ) -> tuple[DraftTree, Any]:
        """See `Drafter.propose`."""
        del keys  # Drafts are the likeliest children: nothing is sampled.
        if self.depth == 0:
            grow = functools.partial(trees.root_only, num_nodes=self.num_nodes)
            return jax.vmap(grow)(root), state
        output, state = self.model.read(params, state, root)
        if isinstance(self.tree, TreeConfig):
            return _grow_dynamic(self.model, params, state, root, output, self.tree)
        return _grow_static(self.model, params, state, root, output, self.tree)

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
) -> tuple[DraftTree, Any]:
    """Expands level by level, then reranks (EAGLE-2, section 4)."""
    tokens, log_probs = trees.top_children(
        model.logits(params, root_output), config.width
    )
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
        tokens, log_probs = trees.top_children(
            model.logits(params, outputs), config.width
        )
        expand = functools.partial(trees.expand, level=level, rank_by=config.rank_by)
        candidates, frontier = jax.vmap(expand)(candidates, frontier, tokens, log_probs)
    rerank = functools.partial(
        trees.rerank,
        num_nodes=config.num_nodes,
        rank_by=config.rank_by,
        use_rerank=config.rerank,
    )
    return jax.vmap(rerank)(candidates, root), state


def _grow_static(
    model: DraftModel,
    params: Any,
    state: Any,
    root: jax.Array,
    root_output: jax.Array,
    shape: Topology,
) -> tuple[DraftTree, Any]:
    """Fills a fixed shape: the child of rank `r` is the `r`-th likeliest (EAGLE-1)."""
    batch = root.shape[0]
    tokens = jnp.zeros((batch, shape.num_nodes), jnp.int32).at[:, 0].set(root)
    log_values = jnp.zeros((batch, shape.num_nodes), jnp.float32)
    outputs, earlier = root_output[:, None], None
    inner, run = np.zeros(1, np.int32), np.zeros(0, np.int32)
    for level in range(1, shape.depth + 1):
        children = np.flatnonzero(shape.depths == level)
        ranks, parents = shape.ranks[children], shape.parents[children]
        rows = np.searchsorted(inner, parents)
        best, log_probs = trees.top_children(
            model.logits(params, outputs), int(ranks.max()) + 1
        )
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
    tree = DraftTree(
        tokens=jnp.where(is_node, tokens, 0),
        parents=jnp.where(is_node, jnp.asarray(shape.parents), trees.NO_PARENT),
        log_values=log_values,
        is_node=is_node,
    )
    return tree, state
