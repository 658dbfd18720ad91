"""Rounds without drafts, after which a drafter can go on."""

import dataclasses
from typing import Any

import jax

from eagle_jax.interface import Drafter, Draws, PromptChunk, Verified
from eagle_jax.tree import DraftTree, root_only


@dataclasses.dataclass(frozen=True, kw_only=True)
class RootOnly:
    """Drafts nothing, and hands the text on to a drafter whose state it shares.

    A round with it is a step of plain decoding. So a text may change between the two
    after any round, and stays what it is.

    Attributes:
        drafter: The drafter that goes on later; it is told of the token by `advance`.
    """

    drafter: Drafter

    @property
    def depth(self) -> int:
        """See `Drafter.depth`."""
        return 0

    def init_state(self, batch: int, capacity: int) -> Any:
        """See `Drafter.init_state`."""
        return self.drafter.init_state(batch, capacity)

    def prefill_chunk(self, params: Any, state: Any, chunk: PromptChunk) -> Any:
        """See `Drafter.prefill_chunk`."""
        return self.drafter.prefill_chunk(params, state, chunk)

    def propose(
        self, params: Any, state: Any, root: jax.Array, draws: Draws
    ) -> tuple[DraftTree, Any]:
        """See `Drafter.propose`; the tree is its root."""
        return root_only(root, 1), state

    def advance(self, params: Any, state: Any, verified: Verified) -> Any:
        """See `Drafter.advance`."""
        return self.drafter.advance(params, state, verified)
