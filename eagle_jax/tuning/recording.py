"""Recordings of a text, from which follows what any dynamic tree would have accepted.

A tree depends on the confirmed text alone, not on the rounds that led there. So a text
is decoded token by token, and at every token all candidates of a wide and deep tree are
drafted beside it. Smaller trees are cut from them: what each would have accepted,
round by round, follows without running it.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from eagle_jax.config import TreeConfig, require
from eagle_jax.decoding import speculative
from eagle_jax.decoding.decoder import Decoder
from eagle_jax.decoding.requests import Requests
from eagle_jax.interface import Drafter, Draws, Params, Verified
from eagle_jax.tree import NO_PARENT, ROOT, DraftTree, root_only

NEVER = np.iinfo(np.int32).max
"""The number of candidates ahead of a token that was not drafted."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recording:
    """The ranking of a text's tokens among the candidates of one width.

    There are `R` roots: all tokens of the text but the last.

    Attributes:
        places: `[R, D, D]` int32. Entry `[r, j - 1, l - 1]` counts the candidates of at
            most `l` levels that reranking prefers to the one which continues the text
            at level `j` after root `r`; `NEVER` where there is none.
        unknown: `[R, D]` int32. Entry `[r, l - 1]` is the smallest such count, among
            the candidates of at most `l` levels, of a node that trees of this width
            expand and the recorded tree did not, so that children which could matter
            are not known; `NEVER` where there is none.
    """

    places: np.ndarray
    unknown: np.ndarray

    def accepted(self, tree: TreeConfig) -> np.ndarray:
        """Returns the drafted tokens that a tree has accepted at each root.

        Args:
            tree: A tree of this width, ranked by value and reranked, at most `D` levels
                deep.

        Returns:
            The numbers of accepted tokens, `[R]` int64, cut where the text ends.
        """
        levels, deepest = tree.levels, self.places.shape[1]
        wanted = f"at most {deepest}, the recorded depth"
        require(levels <= deepest, "depth", tree.depth, wanted)
        if levels == 0:
            return np.zeros(len(self.places), np.int64)
        is_kept = self.places[:, :levels, levels - 1] < tree.num_nodes - 1
        return np.cumprod(is_kept, axis=1).sum(axis=1)

    def is_certain(self, tree: TreeConfig) -> np.ndarray:
        """Returns at which roots the tree is known exactly, `[R]` bool."""
        if tree.levels == 0:
            return np.ones(len(self.places), bool)
        # Children of a node that a tree does not keep are not kept either.
        return self.unknown[:, tree.levels - 1] >= tree.num_nodes - 1

    def accept_lengths(self, tree: TreeConfig) -> list[int]:
        """Returns how many drafts each round of the text accepts, first to last."""
        accepted = self.accepted(tree)
        lengths: list[int] = []
        root = 0
        while root < len(accepted):
            lengths.append(int(accepted[root]))
            root += lengths[-1] + 1
        return lengths


def all_candidates(depth: int, width: int) -> TreeConfig:
    """Returns the tree that keeps every candidate of its expansion."""
    count = width + (depth - 1) * width**2
    return TreeConfig(num_nodes=count + 1, depth=depth, width=width)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recorder:
    """A drafter that keeps the trees of others and proposes the root alone.

    Its state is that of its drafters, and the trees of the last round.

    Attributes:
        drafters: The drafters, of one draft model and depth, so that they share a
            state.
    """

    drafters: tuple[Drafter, ...]

    @property
    def depth(self) -> int:
        """The depth of the recorded trees, see `Drafter.depth`."""
        return self.drafters[0].depth

    def init_state(self, batch: int, capacity: int) -> Any:
        """Returns an empty state without trees, see `Drafter.init_state`."""
        return self.drafters[0].init_state(batch, capacity), ()

    def prefill(
        self,
        params: Any,
        state: Any,
        tokens: jax.Array,
        features: jax.Array,
        lengths: jax.Array,
    ) -> Any:
        """Reads the prompts once for all drafters, see `Drafter.prefill`."""
        drafted, trees = state
        drafter = self.drafters[0]
        return drafter.prefill(params, drafted, tokens, features, lengths), trees

    def propose(
        self, params: Any, state: Any, root: jax.Array, draws: Draws
    ) -> tuple[DraftTree, Any]:
        """Returns the root alone, and a state with all trees, see `Drafter.propose`."""
        before, _ = state
        proposals = [d.propose(params, before, root, draws) for d in self.drafters]
        trees = tuple(tree for tree, _ in proposals)
        _, after = proposals[-1]
        return jax.vmap(lambda token: root_only(token, 1))(root), (after, trees)

    def advance(self, params: Any, state: Any, verified: Verified) -> Any:
        """Takes in what the target said, see `Drafter.advance`."""
        drafted, trees = state
        return self.drafters[0].advance(params, drafted, verified), trees


def record(
    decoder: Decoder,
    drafters: Mapping[int, Drafter],
    params: Params,
    requests: Requests,
    *,
    widths: Sequence[int],
    num_slots: int,
) -> list[dict[int, Recording]]:
    """Decodes texts and records how their tokens rank among the candidates.

    Args:
        decoder: The decoder, whose rule says how the text is drawn, "greedy" or
            "coupled"; the text does not depend on a drafter, and the decoder's own is
            not used. Static.
        drafters: The drafters by width, of one draft model, each with the tree
            `all_candidates` of the same depth; static. A width is read from its own
            tree or else from the next wider one.
        params: The parameters of target and draft model.
        requests: The requests, `B` rows.
        widths: The widths of the trees in question.
        num_slots: The number of cache slots, `S`, see `cache_slots`. Static.

    Returns:
        Each row's recordings by width.
    """
    recorder = Recorder(drafters=tuple(drafters.values()))
    decoder = dataclasses.replace(decoder, drafter=recorder)
    state = speculative.prefill(decoder, params, requests, num_slots=num_slots)
    rounds: list[tuple[DraftTree, ...]] = []
    while bool(state.is_running.any()):
        state, _ = speculative.decode_round(decoder, params, state)
        drafted, trees = state.drafter_state
        rounds.append(jax.device_get(trees))
        # Without them the state has the same structure in every round: one trace.
        state = dataclasses.replace(state, drafter_state=(drafted, ()))
    tokens, lengths, starts = jax.device_get(
        (state.tokens, state.lengths, state.rows.prompt_lengths)
    )
    depth, result = recorder.depth, []
    for row in range(len(tokens)):
        text = tokens[row, starts[row] : lengths[row]]
        result.append({})
        for width in widths:
            number = _next_wider(list(drafters), width)
            trees = [
                jax.tree.map(lambda x, row=row: x[row], trees[number])
                for trees in rounds
            ]
            result[-1][width] = read_trees(trees, text, depth, width)
    return result


def read_trees(
    trees: Sequence[DraftTree], text: np.ndarray, depth: int, width: int
) -> Recording:
    """Returns the ranking of a text's tokens among the candidates of a width.

    Args:
        trees: The trees of all candidates at each root, `[N]` fields on the host, in
            level order.
        text: `[R + 1]` int32, the roots and the last token.
        depth: The depth of the trees, `D`.
        width: The width in question, at most the recorded one.
    """
    num_roots = len(text) - 1
    found = [
        read_tree(trees[root], text[root + 1 :], depth, width)
        for root in range(num_roots)
    ]
    places = np.array([places for places, _ in found], np.int32)
    unknown = np.array([unknown for _, unknown in found], np.int32)
    return Recording(
        places=places.reshape(num_roots, depth, depth),
        unknown=unknown.reshape(num_roots, depth),
    )


def read_tree(
    tree: DraftTree, text: np.ndarray, depth: int, width: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ranking of the tokens after one root among the candidates of a width.

    Args:
        tree: The tree of all candidates, `[N]` fields on the host, in level order.
        text: `[...]` int32, the target's tokens after the root.
        depth: The depth of the tree, `D`.
        width: The width in question, at most the recorded one.

    Returns:
        An entry of `Recording.places`, `[D, D]` int32, and one of `unknown`, `[D]`
        int32.
    """
    parents, values = np.asarray(tree.parents), np.asarray(tree.log_values)
    tokens = np.asarray(tree.tokens)
    levels, is_candidate, is_expanded = _expand(parents, values, depth, width)
    nodes = np.arange(len(parents))

    def count_ahead(node: int) -> np.ndarray:
        """Returns how many candidates reranking prefers, `[D]`, by number of levels."""
        # Ties go to the lower index, as in `rerank`.
        is_tied = (values == values[node]) & (nodes < node)
        is_ahead = is_candidate & ((values > values[node]) | is_tied)
        return np.cumsum(np.bincount(levels[is_ahead], minlength=depth + 1))[1:]

    places = np.full((depth, depth), NEVER, np.int32)
    node = ROOT
    for level, token in enumerate(text[:depth], 1):
        follows = is_candidate & (parents == node) & (tokens == token)
        if not follows.any():
            break
        node = int(follows.argmax())
        places[level - 1, level - 1 :] = count_ahead(node)[level - 1 :]
    unknown = np.full(depth, NEVER, np.int32)
    # Unknown children are worth less than their parent, and nodes worth less than the
    # text's own path do not change whether it is kept.
    is_unknown = is_expanded & (levels < depth) & ~np.isin(nodes, parents)
    for other in np.flatnonzero(is_unknown & (values >= values[node])).tolist():
        below = slice(levels[other], None)
        ahead = count_ahead(other)[below]
        unknown[below] = np.minimum(unknown[below], ahead)
    return places, unknown


def _next_wider(recorded: list[int], width: int) -> int:
    """Returns the number of the narrowest recorded tree that is wide enough."""
    return recorded.index(min(known for known in recorded if known >= width))


def _expand(
    parents: np.ndarray, values: np.ndarray, depth: int, width: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Expands the recorded candidates again, with a smaller width.

    Returns:
        Three arrays `[N]`: the node's level below the root, whether it is a candidate,
        and whether it is among the `width` best of its level.
    """
    nodes = np.arange(len(parents))
    # Siblings stand side by side, the most likely first.
    starts = np.r_[True, parents[1:] != parents[:-1]]
    ranks = nodes - np.maximum.accumulate(np.where(starts, nodes, 0))
    levels = np.zeros(len(parents), np.int32)
    is_candidate = np.zeros(len(parents), bool)
    is_expanded = nodes == ROOT
    above = is_expanded
    for level in range(1, depth + 1):
        children = (parents != NO_PARENT) & above[parents] & (ranks < width)
        levels[children] = level
        is_candidate |= children
        (found,) = np.nonzero(children)
        best = found[np.argsort(-values[found], kind="stable")[:width]]
        above = np.zeros(len(parents), bool)
        above[best] = True
        is_expanded = is_expanded | above
    return levels, is_candidate, is_expanded
