"""The switch: copy where the text repeats itself, draft with a model elsewhere.

Prompt lookup costs nothing and drafts far, but only where a text comes again; a draft
model's tree is good everywhere and reaches a few levels. SAM-Decoding (Hu et al. 2024)
chooses per round by the length of the match, and both sit here in one shape.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from eagle_jax.config import TreeConfig, require
from eagle_jax.drafting.lookup import LookupDrafter, LookupState
from eagle_jax.drafting.trees import TreeDrafter
from eagle_jax.interface import Drafter, Draws, PromptChunk, Verified
from eagle_jax.tree import DraftTree, make_tree


@struct.dataclass(kw_only=True)
class SwitchState:
    """The states of both drafters: either may draft in any round.

    Attributes:
        lookup: The text of each row.
        model: The draft model's state.
        is_running: `[B]` bool, false in rows that the last round found finished.
    """

    lookup: LookupState
    model: Any
    is_running: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class SwitchConfig(TreeConfig):
    """The dynamic tree, and when earlier text is copied instead.

    Attributes:
        min_match: Copy what followed the text's end before if at least so many tokens
            match.
    """

    min_match: int = 5

    def __post_init__(self) -> None:
        """Refuses sizes outside their range."""
        super().__post_init__()
        require(1 <= self.min_match <= 64, "min_match", self.min_match, "1 to 64")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SwitchDrafter:
    """Per row and round prompt lookup or a draft model's tree, in one padded shape.

    Its parameters are the draft model's.

    Attributes:
        first: What drafts where its longest match is long enough.
        second: What drafts elsewhere. It reads the text in every round; its levels are
            grown only where a running row needs them.
        min_match: The number of tokens, root included, that a match must have in common
            with the text's end.

    Raises:
        InputError: If no match is ever long enough, or if the second drafts nothing or
            draws what it drafts, which is tested with its distribution.
    """

    first: LookupDrafter
    second: TreeDrafter
    min_match: int = 5

    def __post_init__(self) -> None:
        """Refuses settings under which there is nothing to choose between."""
        limit = self.first.max_ngram
        wanted = f"1 to {limit}, the longest match that is looked for (max_ngram)"
        require(1 <= self.min_match <= limit, "min_match", self.min_match, wanted)
        depth, sampled = self.second.depth, self.second.sampled
        require(depth >= 1, "depth of the tree", depth, "at least 1")
        require(not sampled, "sampled", sampled, "false for what is switched to")

    @property
    def depth(self) -> int:
        """See `Drafter.depth`; the deeper one's."""
        return max(self.first.depth, self.second.depth)

    @property
    def num_nodes(self) -> int:
        """The number of nodes of either tree with its padding, `N`."""
        return max(self.first.num_nodes, self.second.num_nodes)

    def init_state(self, batch: int, capacity: int) -> SwitchState:
        """See `Drafter.init_state`; paths of either depth can wait for the model."""
        return SwitchState(
            lookup=self.first.init_state(batch, capacity),
            model=self.second.model.init_state(batch, capacity, self.depth),
            is_running=jnp.full(batch, True),
        )

    def prefill_chunk(
        self, params: Any, state: SwitchState, chunk: PromptChunk
    ) -> SwitchState:
        """See `Drafter.prefill_chunk`."""
        return dataclasses.replace(
            state,
            lookup=self.first.prefill_chunk((), state.lookup, chunk),
            model=self.second.prefill_chunk(params, state.model, chunk),
        )

    def truncate(self, state: SwitchState, length: jax.Array) -> SwitchState:
        """See `Truncating`."""
        return dataclasses.replace(
            state,
            lookup=self.first.truncate(state.lookup, length),
            model=self.second.truncate(state.model, length),
        )

    def propose(
        self, params: Any, state: SwitchState, root: jax.Array, draws: Draws
    ) -> tuple[DraftTree, SwitchState]:
        """See `Drafter.propose`."""
        copied, matched = self.first.draft(state.lookup, root)
        copied = _pad_nodes(copied, self.num_nodes)
        is_match = matched >= self.min_match
        # Also where nothing is drafted with it, the model reads what was accepted.
        output, model = self.second.model.read(params, state.model, root)

        def grow() -> DraftTree:
            tree = self.second.grow(params, model, root, output, draws)
            return _pad_nodes(tree, self.num_nodes)

        needs_tree = (state.is_running & ~is_match).any()
        grown = jax.lax.cond(needs_tree, grow, lambda: copied)
        tree = jax.tree.map(
            lambda a, b: jnp.where(is_match[:, None], a, b), copied, grown
        )
        return tree, dataclasses.replace(state, model=model)

    def advance(
        self, params: Any, state: SwitchState, verified: Verified
    ) -> SwitchState:
        """See `Drafter.advance`; both take in the accepted path, whoever drafted it."""
        return SwitchState(
            lookup=self.first.advance((), state.lookup, verified),
            model=self.second.advance(params, state.model, verified),
            is_running=verified.count > 0,
        )


def find_tree_drafter(drafter: Drafter | None) -> TreeDrafter | None:
    """Returns the part of a drafter that drafts with a model, `None` if there is none.

    Args:
        drafter: Any drafter; `None` for plain decoding.
    """
    if isinstance(drafter, SwitchDrafter):
        return drafter.second
    return drafter if isinstance(drafter, TreeDrafter) else None


def _pad_nodes(tree: DraftTree, num_nodes: int) -> DraftTree:
    """Returns trees of `[B, N]` fields with padding up to so many nodes."""
    missing = ((0, 0), (0, num_nodes - tree.tokens.shape[1]))
    padded = jax.tree.map(lambda x: jnp.pad(x, missing), tree)
    return make_tree(padded.tokens, padded.parents, padded.log_values, padded.is_node)
