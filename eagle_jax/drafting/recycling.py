"""Token Recycling: what the target held likely after a token, it may want again.

A target's logits say more than its next token: they say what else it might have said,
also after drafts that it rejected. Token Recycling (Luo et al. 2024, arXiv 2408.08696)
keeps, for every token, the tokens that the target last held most likely after it, and
fills a static tree from this matrix, round by round. It has no weights.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from eagle_jax.interface import Draws, PromptChunk, Verified
from eagle_jax.parsing import check_types
from eagle_jax.tree import RECYCLING_TREE, ROOT, DraftTree, Topology, make_tree
from eagle_jax.tree.top_k import top_k

UNKNOWN = -1
"""The entry of a matrix that was never filled; it is read as no child."""


@struct.dataclass(kw_only=True)
class RecyclingState:
    """What the target last held likely after each token.

    Attributes:
        likely: `[B, V, W]` int32, for each row and token the tokens after it, the most
            likely first; `UNKNOWN` where the target was not asked yet.
    """

    likely: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecyclingConfig:
    """The tree that Token Recycling fills.

    Attributes:
        choices: Its shape, see `StaticConfig.choices`; `None` for the published one.
    """

    choices: str | None = None

    def __post_init__(self) -> None:
        """Refuses values of another type."""
        check_types(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecyclingDrafter:
    """Token Recycling behind the `Drafter` protocol; it has no parameters.

    The matrix begins empty and lasts as long as the text. The published code hands it
    on to the next text; here a text's rounds do not depend on those before it.

    Attributes:
        vocab_size: The number of tokens the target knows, `V`.
        tree: The shape of the tree. `W` is the most children that a node of it has, or
            `V` if that is less.
    """

    vocab_size: int
    tree: Topology = RECYCLING_TREE

    @property
    def depth(self) -> int:
        """See `Drafter.depth`."""
        return self.tree.depth

    @property
    def num_nodes(self) -> int:
        """The number of nodes of the tree, `N`."""
        return self.tree.num_nodes

    def init_state(self, batch: int, capacity: int) -> RecyclingState:
        """See `Drafter.init_state`; a longer text needs no larger matrix."""
        width = min(int(self.tree.ranks.max()) + 1, self.vocab_size)
        shape = (batch, self.vocab_size, width)
        return RecyclingState(likely=jnp.full(shape, UNKNOWN, jnp.int32))

    def prefill_chunk(
        self, params: Any, state: RecyclingState, chunk: PromptChunk
    ) -> RecyclingState:
        """See `Drafter.prefill_chunk`; nothing is learned, as in the published code."""
        return state

    def truncate(self, state: RecyclingState, length: jax.Array) -> RecyclingState:
        """See `Truncating`; what later tokens taught is forgotten with them."""
        return self.init_state(len(state.likely), 0)

    def propose(
        self, params: Any, state: RecyclingState, root: jax.Array, draws: Draws
    ) -> tuple[DraftTree, RecyclingState]:
        """See `Drafter.propose`; the child of rank `r` is the `r`-th of its parent's.

        The matrix holds an order and no probabilities, so noise cannot be shared.
        """
        batch, shape = root.shape[0], self.tree
        rows = jnp.arange(batch)[:, None]
        tokens = jnp.zeros((batch, shape.num_nodes), jnp.int32).at[:, ROOT].set(root)
        is_node = jnp.zeros(tokens.shape, bool).at[:, ROOT].set(True)
        for level in shape.levels:
            above = tokens[:, level.parents]
            # A vocabulary smaller than a rank has no such child.
            drafts = state.likely.at[rows, above, level.ranks].get(
                mode="fill", fill_value=UNKNOWN
            )
            exists = is_node[:, level.parents] & (drafts != UNKNOWN)
            tokens = tokens.at[:, level.nodes].set(jnp.where(exists, drafts, 0))
            is_node = is_node.at[:, level.nodes].set(exists)
        return make_tree(tokens, shape.parents, 0.0, is_node), state

    def advance(
        self, params: Any, state: RecyclingState, verified: Verified
    ) -> RecyclingState:
        """See `Drafter.advance`; every node teaches, rejected ones too.

        Of several nodes with one token the last, in level order, is kept.
        """
        tree, width = verified.tree, state.likely.shape[-1]
        _, likely = top_k(verified.logits, width)
        teaches = tree.is_node & (verified.count > 0)[:, None]
        nodes = jnp.arange(tree.tokens.shape[1])
        is_same = tree.tokens[:, :, None] == tree.tokens[:, None, :]
        is_later = nodes[:, None] < nodes
        is_last = ~(is_same & is_later & teaches[:, None, :]).any(axis=-1)
        # A scatter promises no order, so every place is written once at most; places
        # past the vocabulary, no two alike, are dropped.
        places = jnp.where(teaches & is_last, tree.tokens, self.vocab_size + nodes)
        rows = jnp.arange(places.shape[0])[:, None]
        return RecyclingState(
            likely=state.likely.at[rows, places].set(
                likely, mode="drop", unique_indices=True
            )
        )
