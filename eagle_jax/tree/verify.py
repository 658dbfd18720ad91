"""Verification: which path of the tree the target's own text follows.

One walk serves every rule: at each node a *step* decides which child, if any, is
accepted; where none is, the step's token ends the round.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct

from eagle_jax.tree.structure import ROOT, DraftTree, ancestor_mask


@struct.dataclass(kw_only=True)
class Step:
    """The decision at one node of the walk.

    Attributes:
        is_accepted: `[]` bool, whether a child continues the path.
        child: `[]` int32, node index of that child; meaningless if there is none.
        token: `[]` int32, the token that follows the node in the text.
    """

    is_accepted: jax.Array
    child: jax.Array
    token: jax.Array


@struct.dataclass(kw_only=True)
class Acceptance:
    """The outcome of one verification.

    Attributes:
        path: `[P]` int32 node indices, root first; entries after `num_accepted`
            repeat the last accepted node.
        num_accepted: `[]` int32, accepted drafted tokens, 0 .. `D`.
        next_token: `[]` int32, the token the target adds after the path: the
            root of the next round.
    """

    path: jax.Array
    num_accepted: jax.Array
    next_token: jax.Array


def verify(
    tree: DraftTree, step: Callable[[jax.Array, jax.Array], Step], *, depth: int
) -> Acceptance:
    """Walks down from the root as long as `step` accepts a child.

    The walk looks at one node per level, so a rule that draws noise or filters a
    distribution does so for at most `P` nodes, not for all `N`.

    Args:
        tree: A tree of `N` nodes.
        step: The rule `(node, level) -> Step`, both `[]` int32; the depth of `node` is
            `level`. It must accept only children of `node`.
        depth: The depth of the deepest node, `D`. Static.

    Returns:
        The accepted path and the token after it.
    """

    def walk_on(walk: tuple[jax.Array, Acceptance]) -> tuple[jax.Array, Acceptance]:
        _, so_far = walk
        level = so_far.num_accepted
        node = so_far.path[level]
        decision = step(node, level)
        goes_on = decision.is_accepted & (level < depth)
        is_later = jnp.arange(depth + 1) > level
        return goes_on, Acceptance(
            path=jnp.where(goes_on & is_later, decision.child, so_far.path),
            num_accepted=level + goes_on.astype(jnp.int32),
            next_token=decision.token,
        )

    start = Acceptance(
        path=jnp.full(depth + 1, ROOT, jnp.int32),
        num_accepted=jnp.zeros((), jnp.int32),
        next_token=tree.tokens[ROOT],
    )

    # A GPU would have to wait for the host to learn whether the walk goes on. Where it
    # has ended, another step decides the same again.
    return jax.lax.platform_dependent(
        (jnp.array(True), start),
        cuda=lambda walk: jax.lax.fori_loop(
            0, depth + 1, lambda _, x: walk_on(x), walk
        ),
        default=lambda walk: jax.lax.while_loop(lambda x: x[0], walk_on, walk),
    )[1]


def match_child(tree: DraftTree, node: jax.Array, token: jax.Array) -> Step:
    """Accepts the child of `node` that equals the target's token.

    With the argmax this is greedy verification; with a draw from the target it is
    coupled sampling: drafts are deterministic, so following the child that equals
    an independent draw has exactly the target's distribution.

    Args:
        tree: A tree of `N` nodes.
        node: `[]` int32, the node's index.
        token: `[]` int32, the target's token after `node`.

    Returns:
        The step; its token is `token`.
    """
    is_match = tree.is_node & (tree.parents == node) & (tree.tokens == token)
    return Step(
        is_accepted=is_match.any(),
        child=jnp.argmax(is_match).astype(jnp.int32),
        token=token,
    )


def match_path(tree: DraftTree, tokens: jax.Array, *, depth: int) -> Acceptance:
    """Accepts what `verify` accepts by `match_child`, all levels at once.

    It takes the target's token after every node, and few operations: what a GPU is
    quick at. Of equal siblings it follows one that leads deepest.

    Args:
        tree: A tree of `N` nodes.
        tokens: `[N]` int32, the target's token after each node.
        depth: The depth of the deepest node, `D`. Static.
    """
    mask = ancestor_mask(tree.parents)
    depths = mask.sum(axis=1, dtype=jnp.int32) - 1
    is_match = tree.tokens == tokens[tree.parents]
    is_match = is_match.at[ROOT].set(True)
    is_on_path = (is_match | ~mask).all(axis=1)
    last = jnp.argmax(jnp.where(is_on_path & tree.is_node, depths, -1))
    levels = jnp.minimum(jnp.arange(depth + 1), depths[last])
    is_there = mask[last] & (depths == levels[:, None])
    return Acceptance(
        path=jnp.argmax(is_there, axis=1).astype(jnp.int32),
        num_accepted=depths[last],
        next_token=tokens[last],
    )


def reject_siblings(
    tree: DraftTree,
    node: jax.Array,
    probs: jax.Array,
    coins: jax.Array,
    noise: jax.Array,
) -> Step:
    """Tries the children of `node` in turn, then samples what remains.

    Child `x` is accepted with probability `p(x)`; if it is not, `p(x)` becomes
    zero, `p` is renormalised and the next sibling is tried; in the end the token
    is drawn from the remaining `p`. This is multi-round speculative sampling
    (EAGLE-1, appendix A.2) for drafts that are deterministic.

    Args:
        tree: A tree of `N` nodes; siblings are tried in node order.
        node: `[]` int32, the node's index.
        probs: `[V]` float32, the target's distribution after `node`; need not sum
            to 1.
        coins: `[N]` float32, uniform in `[0, 1)`, one per node.
        noise: `[V]` float32, standard Gumbel, for the distribution that remains.

    Returns:
        The step; its token is the accepted child's, or the drawn one.
    """
    (vocab_size,) = probs.shape
    is_child = tree.is_node & (tree.parents == node)
    # A repeated sibling has no probability left when its turn comes.
    is_repeat = (
        is_child[None, :]
        & (tree.tokens[:, None] == tree.tokens[None, :])
        & jnp.tri(tree.tokens.shape[0], k=-1, dtype=bool)
    ).any(axis=1)
    tried = jnp.where(is_child, tree.tokens, vocab_size)  # Out of range: dropped.
    rest = probs.at[tried].set(0.0, mode="drop")
    child_probs = jnp.where(is_child & ~is_repeat, probs[tree.tokens], 0.0)
    # The mass left when a sibling's turn comes, summed from the end: `1 - before`
    # would lose the last sibling's probability to rounding.
    left = rest.sum() + jnp.cumsum(child_probs[::-1])[::-1]
    is_accepted = coins * left < child_probs  # `<`: a coin of 0 accepts no zero.
    child = jnp.argmax(is_accepted).astype(jnp.int32)
    drawn = jnp.argmax(jnp.log(rest) + noise).astype(jnp.int32)
    return Step(
        is_accepted=is_accepted.any(),
        child=child,
        token=jnp.where(is_accepted.any(), tree.tokens[child], drawn),
    )


def reject_drawn(
    probs: jax.Array, draft_logits: jax.Array, token: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Tries one token that was drawn from the draft (Leviathan et al. 2022).

    >>> probs, draft = jnp.array([0.5, 0.5]), jnp.log(jnp.array([0.8, 0.2]))
    >>> chance, rest, _ = reject_drawn(probs, draft, jnp.array(0))
    >>> chance, rest
    (Array(0.625, dtype=float32), Array([0., 1.], dtype=float32))

    Args:
        probs: `[V]` float32, the target's distribution, or what the rejection of
            earlier siblings left of it.
        draft_logits: `[V]` float32, logits of the distribution that the token was
            drawn from.
        token: `[]` int32, the drawn token.

    Returns:
        The chance that the token is accepted, `[]` float32; what its rejection leaves
        of the target's distribution, `[V]`; and the logits of the distribution that the
        next sibling was drawn from, `[V]`.
    """
    draft_probs = jax.nn.softmax(draft_logits)
    chance = jnp.minimum(probs[token] / draft_probs[token], 1.0)
    rest = jnp.maximum(probs - draft_probs, 0.0)
    total = rest.sum()
    # Equal distributions never reject, but rounding may leave no mass.
    rest = jnp.where(total > 0, rest / jnp.where(total > 0, total, 1.0), probs)
    return chance, rest, draft_logits.at[token].set(-jnp.inf)


@struct.dataclass(kw_only=True)
class _Siblings:
    """The state of a walk along the children of one node.

    Attributes:
        untried: `[N]` bool, children whose turn is still to come.
        probs: `[V]` float32, what rejections left of the target's distribution.
        draft_logits: `[V]` float32, logits of the distribution that the next sibling
            was drawn from.
        is_accepted: `[]` bool, whether the last child was accepted.
        child: `[]` int32, the last child that was tried.
    """

    untried: jax.Array
    probs: jax.Array
    draft_logits: jax.Array
    is_accepted: jax.Array
    child: jax.Array


def reject_drawn_siblings(
    tree: DraftTree,
    node: jax.Array,
    probs: jax.Array,
    coins: jax.Array,
    noise: jax.Array,
) -> Step:
    """Tries drawn children of `node` in turn, then samples what remains.

    This is multi-round speculative sampling (EAGLE-1, algorithm 1) where siblings are
    drawn without replacement: each is tried against the distribution without its elder
    siblings. Arguments and result are those of `reject_siblings`; the tree has
    `draft_logits`.
    """
    assert tree.draft_logits is not None, "chosen children are for reject_siblings"

    def cond(siblings: _Siblings) -> jax.Array:
        return siblings.untried.any() & ~siblings.is_accepted

    def body(siblings: _Siblings) -> _Siblings:
        child = jnp.argmax(siblings.untried).astype(jnp.int32)
        chance, rest, draft_logits = reject_drawn(
            siblings.probs, siblings.draft_logits, tree.tokens[child]
        )
        return _Siblings(
            untried=siblings.untried.at[child].set(False),
            probs=rest,
            draft_logits=draft_logits,
            is_accepted=coins[child] < chance,  # `<`: a coin of 0 accepts no zero.
            child=child,
        )

    start = _Siblings(
        untried=tree.is_node & (tree.parents == node),
        probs=probs / probs.sum(),
        draft_logits=tree.draft_logits[node],
        is_accepted=jnp.array(False),
        child=jnp.zeros((), jnp.int32),
    )
    end = jax.lax.while_loop(cond, body, start)
    drawn = jnp.argmax(jnp.log(end.probs) + noise).astype(jnp.int32)
    return Step(
        is_accepted=end.is_accepted,
        child=end.child,
        token=jnp.where(end.is_accepted, tree.tokens[end.child], drawn),
    )
