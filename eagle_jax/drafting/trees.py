"""A draft model and the shape of a tree make a drafter (EAGLE-1, EAGLE-2, chains)."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax import tree as trees
from eagle_jax.config import TreeConfig, require
from eagle_jax.drafting.calibration import UNCALIBRATED, Calibration
from eagle_jax.drafting.model import DraftModel, postpone
from eagle_jax.interface import Draws, PromptChunk, Verified
from eagle_jax.prng import gumbel, own_keys
from eagle_jax.sampling import process_logits
from eagle_jax.tree import DraftTree, Topology


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreeDrafter:
    """Any draft model growing any tree, behind the `Drafter` protocol.

    An EAGLE head and a `TreeConfig` make EAGLE-2, the head and `EAGLE1_TREE` make
    EAGLE-1, a small model and `chain(4)` make standard speculative decoding.

    Attributes:
        model: The draft model.
        tree: The shape: a `TreeConfig` for a dynamic tree, a `Topology` for a static
            one.
        calibration: The calibration of a dynamic tree's confidences, applied before
            they rank anything; the default takes those of temperature 0 as they are, as
            the paper does.
        shares_noise: Whether children are chosen under the noise of the target's draws
            where it is known ("coupled" acceptance above temperature 0): the tokens
            with the largest `log q + g`. If false, the most likely ones are drafted all
            the same: the text is the same and fewer drafts are accepted.
        sampled: Whether, under the acceptance rule "rejection", a static tree's
            children are drawn from the model's distribution, as the published EAGLE-1
            and speculative sampling do, instead of taking the most likely.
        shared_depth: The depth of the deepest tree that shares this one's state; the
            own depth if that is larger.

    Raises:
        InputError: If a dynamic tree is to be sampled: its shape would depend on what
            was drawn, and the text would no longer be the target's. Or if a static tree
            without every rank is to be: each draw is tested given those before it. Or
            if a dynamic tree has settings of calibration or noise, which belong to the
            fields here. Or if the tree is deeper than what the model drafts.
    """

    model: DraftModel
    tree: TreeConfig | Topology
    calibration: Calibration = UNCALIBRATED
    shares_noise: bool = True
    sampled: bool = False
    shared_depth: int = 0

    def __post_init__(self) -> None:
        """Refuses too deep trees, dynamic ones of draws, and settings without use."""
        most = self.model.max_levels
        is_drafted = most is None or self.depth <= most
        wanted = f"at most {most}, all that is drafted; give a tree of fewer levels"
        require(is_drafted, "depth of the tree", self.depth, wanted)
        if isinstance(self.tree, Topology):
            holds = not self.sampled or self.tree.has_every_rank
            require(holds, "sampled", self.sampled, "false for a tree that lacks ranks")
            return
        require(not self.sampled, "sampled", self.sampled, "false for a dynamic tree")
        wanted = (
            "its shape alone (`tree.shape`): a drafter's calibration and noise are its "
            "own fields, which eagle_jax.methods fills from settings"
        )
        require(self.tree == self.tree.shape, "tree", self.tree, wanted)

    @property
    def depth(self) -> int:
        """See `Drafter.depth`; at 0 the model is never called."""
        return (
            self.tree.levels if isinstance(self.tree, TreeConfig) else self.tree.depth
        )

    @property
    def num_nodes(self) -> int:
        """The number of nodes of the tree, `N`."""
        return self.tree.num_nodes

    def init_state(self, batch: int, capacity: int) -> Any:
        """See `Drafter.init_state`; `()` where nothing is drafted."""
        if self.depth == 0:
            return ()
        return self.model.init_state(
            batch, capacity, max(self.depth, self.shared_depth)
        )

    def prefill_chunk(self, params: Any, state: Any, chunk: PromptChunk) -> Any:
        """See `Drafter.prefill_chunk`."""
        if self.depth == 0:
            return state
        return self.model.prefill_chunk(params, state, chunk)

    def truncate(self, state: Any, length: jax.Array) -> Any:
        """See `Truncating`, which its model must be, too."""
        model: Any = self.model
        return state if self.depth == 0 else model.truncate(state, length)

    def propose(
        self, params: Any, state: Any, root: jax.Array, draws: Draws
    ) -> tuple[DraftTree, Any]:
        """See `Drafter.propose`."""
        if self.depth == 0:
            return trees.root_only(root, self.num_nodes), state
        output, state = self.model.read(params, state, root)
        return self.grow(params, state, root, output, draws), state

    def grow(
        self, params: Any, state: Any, root: jax.Array, output: Any, draws: Draws
    ) -> DraftTree:
        """Returns the tree of a root that the model has read, `[B, N]` fields.

        Args:
            params: The draft model's weights.
            state: The state that `DraftModel.read` returned; it stays as it is.
            root: `[B]` int32, the last emitted tokens.
            output: `[B, X]`, the output of the root that `DraftModel.read` returned, or
                a pytree of such.
            draws: The settings, noise and keys of the round's draws.
        """
        if not self.shares_noise:
            draws = dataclasses.replace(draws, noise=None)
        draws = _of_known_tokens(self.model, params, output, draws)
        nodes = _Level(self, params, state, output, draws)
        grow = _grow_dynamic if isinstance(self.tree, TreeConfig) else _grow_static
        return grow(self, nodes, root, draws)

    def advance(self, params: Any, state: Any, verified: Verified) -> Any:
        """See `Drafter.advance`; a path of the root alone is a round of `RootOnly`."""
        if self.depth == 0:
            return state
        if verified.path.shape[1] == 1:
            return postpone(self.model, params, state, verified)
        more = max(self.shared_depth - self.depth, 0)
        tokens = jnp.pad(verified.path_tokens, ((0, 0), (0, more)))
        features = jnp.pad(verified.path_features, ((0, 0), (0, more), (0, 0)))
        return self.model.advance(state, tokens, features, verified.count)


class _Level:
    """The nodes whose children come next; after `descend`, those children."""

    def __init__(
        self, drafter: TreeDrafter, params: Any, state: Any, root: Any, draws: Draws
    ) -> None:
        self.model, self.number = drafter.model, 0
        self._params, self._state, self._draws = params, state, draws
        self._outputs, self._earlier = jax.tree.map(lambda x: x[:, None], root), None
        self._states = None if draws.guide is None else draws.guide.at_roots

    def logits(self) -> jax.Array:
        """Returns the logits of children, `[B, M, W]`, as the target's are processed.

        `M` is 1 where all nodes have the same. Where the model knows no allowed token
        they stay as they are: distributions need a token, and what is drafted there is
        dropped with all that is forbidden.
        """
        level, guide = self.number + 1, self._draws.guide
        logits = self.model.logits(self._params, self._outputs, level=level)
        if guide is None:
            return logits
        processed = guide.process(self._states, logits)
        is_alive = (processed > -jnp.inf).any(axis=-1, keepdims=True)
        return jnp.where(is_alive, processed, logits)

    def tokens(self, choices: jax.Array) -> jax.Array:
        """Returns the target's tokens for choices among those the model knows."""
        return self.model.tokens(self._params, choices).astype(jnp.int32)

    def descend(
        self, tokens: jax.Array, parents: jax.Array, visible: jax.Array
    ) -> None:
        """Runs the model over children `[B, M]`, of parents at places `[B, M]`."""
        self.number += 1
        self._outputs, self._earlier = self.model.step(
            self._params,
            self._state,
            tokens,
            _above(self._outputs, parents),
            visible,
            self._earlier,
            level=self.number,
        )
        if (guide := self._draws.guide) is not None:
            self._states = guide.children(self._states, parents, tokens)


def _grow_dynamic(
    drafter: TreeDrafter, nodes: _Level, root: jax.Array, draws: Draws
) -> DraftTree:
    """Expands level by level, then reranks (EAGLE-2, section 4)."""
    config, calibration = drafter.tree, drafter.calibration
    assert isinstance(config, TreeConfig)

    def children() -> tuple[jax.Array, jax.Array]:
        level = nodes.number + 1
        scores = _scores(nodes.logits(), draws, calibration, level=level)
        choices, log_probs = trees.top_children(scores, config.width)
        tokens = nodes.tokens(choices)
        factors = calibration.exponents(draws, config.width, level=level)
        if factors is None:
            return tokens, log_probs
        # Exponents by rank may change the order, and `expand` takes the best first.
        honest = log_probs * factors[..., None, :]
        log_probs, order = jax.lax.top_k(honest, config.width)
        return jnp.take_along_axis(tokens, order, axis=-1), log_probs

    tokens, log_probs = children()
    candidates, frontier = jax.vmap(trees.first_level)(tokens[:, 0], log_probs[:, 0])
    expand = functools.partial(trees.expand, rank_by=config.rank_by)
    for _ in range(2, config.levels + 1):
        nodes.descend(frontier.tokens, frontier.parents, frontier.visible)
        tokens, log_probs = (_each(x, config.width) for x in children())
        candidates, frontier = jax.vmap(expand)(candidates, frontier, tokens, log_probs)
    rerank = functools.partial(
        trees.rerank,
        num_nodes=config.num_nodes,
        rank_by=config.rank_by,
        use_rerank=config.rerank,
    )
    return jax.vmap(rerank)(candidates, root)


def _grow_static(
    drafter: TreeDrafter, nodes: _Level, root: jax.Array, draws: Draws
) -> DraftTree:
    """Fills a fixed shape: the child of rank `r` has the `r`-th score or draw."""
    shape, calibration = drafter.tree, drafter.calibration
    assert isinstance(shape, Topology)
    is_drawn = drafter.sampled and draws.noise is None
    batch, num_nodes = root.shape[0], shape.num_nodes
    tokens = jnp.zeros((batch, num_nodes), jnp.int32).at[:, 0].set(root)
    log_values = jnp.zeros((batch, num_nodes), jnp.float32)
    draft_logits: list[jax.Array] = []
    inner = np.zeros(1, np.int32)
    for depth, level in enumerate(shape.levels, 1):
        logits = nodes.logits()
        if not is_drawn:
            scores = _scores(logits, draws, calibration, level=depth)
            best, log_probs = trees.top_children(scores, level.width)
        else:
            logits, noise = _draft_and_noise(_each(logits, len(inner)), inner, draws)
            draft_logits.append(_over_vocabulary(nodes, logits))
            best, log_probs = trees.draw_children(logits, noise, level.width)
        best = _each(nodes.tokens(best), len(inner))
        log_probs = _each(log_probs, len(inner))
        values = log_values[:, level.parents] + log_probs[:, level.rows, level.ranks]
        log_values = log_values.at[:, level.nodes].set(values)
        tokens = tokens.at[:, level.nodes].set(best[:, level.rows, level.ranks])
        if depth == shape.depth:
            break
        inner = level.inner
        rows = jnp.broadcast_to(level.inner_rows, (batch, len(inner)))
        visible = jnp.broadcast_to(level.visible, (batch, *level.visible.shape))
        nodes.descend(tokens[:, inner], rows, visible)
    by_node = None
    if draft_logits:
        joined = jnp.concatenate(draft_logits, axis=1)
        by_node = jnp.zeros((batch, num_nodes, joined.shape[2]), jnp.float32)
        by_node = by_node.at[:, shape.inner].set(joined)
    # A vocabulary smaller than a rank has no such child.
    is_node = log_values > -jnp.inf
    tree = trees.make_tree(tokens, shape.parents, log_values, is_node)
    return dataclasses.replace(tree, draft_logits=by_node)


def _each(x: jax.Array, num_nodes: int) -> jax.Array:
    """Returns `[B, M, ...]`, one for each node, of `[B, 1, ...]` or of itself."""
    return jnp.broadcast_to(x, (x.shape[0], num_nodes, *x.shape[2:]))


def _above(outputs: Any, parents: jax.Array) -> Any:
    """Returns the outputs of nodes' parents, every leaf `[B, M, ...]`.

    The parents' places in their level are `[B, M]` int32; a leaf of the level's outputs
    may stand for all of its nodes.
    """

    def take(x: jax.Array) -> jax.Array:
        if x.shape[1] == 1:
            return _each(x, parents.shape[1])
        places = parents.reshape(*parents.shape, *(1,) * (x.ndim - 2))
        return jnp.take_along_axis(x, places, axis=1)

    return jax.tree.map(take, outputs)


def _of_known_tokens(
    model: DraftModel, params: Any, output: Any, draws: Draws
) -> Draws:
    """Returns draws for logits `[..., W]`: once per round, not once per level."""
    logits = functools.partial(model.logits, level=1)
    known = jax.eval_shape(logits, params, output).shape[-1]
    noise, guide = draws.noise, draws.guide
    if known == model.vocab_size or (noise is None and guide is None):
        return draws
    tokens = model.tokens(params, jnp.arange(known))
    return dataclasses.replace(
        draws,
        noise=None if noise is None else noise[:, :, tokens],
        guide=None if guide is None else guide.of_known(tokens, model.vocab_size),
    )


def _scores(
    logits: jax.Array,
    draws: Draws,
    calibration: Calibration,
    *,
    level: int,
) -> jax.Array:
    """Returns scores that rank the children of nodes; their softmax is a confidence.

    They are `kappa * t * s` at temperature `t`, where `s` is the log probability, up to
    a constant, plus the noise, if there is any, that the target will draw with at the
    children's position; see `drafting.calibration`. Like the model's logits at the
    parents they are `[B, M, W]` float32, `-inf` for tokens that the row's filters
    exclude.
    """
    greedy = calibration.greedy.kappa * calibration.greedy.sharpness
    if draws.noise is None:
        return logits if greedy == 1 else logits * greedy
    noise, sampled = draws.noise[:, level - 1], calibration.sampled
    temperature = draws.sampling.temperature
    divisor = draws.sampling.divisor
    kappa = jnp.where(temperature > 0, sampled.kappa * divisor, greedy)
    if sampled.sharpness != 1:
        sharpness = jnp.where(temperature > 0, sampled.sharpness, 1.0)
        logits = logits * sharpness[:, None, None]
    scores = process_logits(logits, draws.sampling) + noise[:, None]
    return kappa[:, None, None] * scores


def _over_vocabulary(nodes: _Level, logits: jax.Array) -> jax.Array:
    """Returns logits `[..., W]` as `[..., V]`, `-inf` where the model has no token."""
    num_known, vocab_size = logits.shape[-1], nodes.model.vocab_size
    if num_known == vocab_size:
        return logits
    shape = (*logits.shape[:-1], vocab_size)
    tokens = nodes.tokens(jnp.arange(num_known))
    return jnp.full(shape, -jnp.inf, logits.dtype).at[..., tokens].set(logits)


def _draft_and_noise(
    logits: jax.Array, nodes: np.ndarray, draws: Draws
) -> tuple[jax.Array, jax.Array]:
    """Returns the logits that nodes' children are drawn from, and Gumbel noise.

    Of nodes `[M]` int32 and the model's logits `[B, M, W]` there. Both results are
    `[B, M, W]` float32; the noise is 0 in rows of temperature 0.
    """
    logits = process_logits(logits, draws.sampling)

    def noise_of(key: jax.Array, temperature: jax.Array) -> jax.Array:
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, nodes)
        draw = functools.partial(gumbel, size=logits.shape[-1])
        return jnp.where(temperature > 0, jax.vmap(draw)(keys), 0.0)

    return logits, jax.vmap(noise_of)(own_keys(draws.keys), draws.sampling.temperature)
