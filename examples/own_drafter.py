"""Your own way to draft behind the `Drafter` protocol: Token Recycling.

A target's logits say more than its next token: they say what else it might have said,
also after the drafts that it rejected. Token Recycling (Luo et al. 2024, arXiv
2408.08696) keeps, for every token, the tokens that the target last held most likely
after it, and drafts a tree from this table. It has no weights and needs no training.

Run it with `python examples/own_drafter.py`; docs/your-own-drafter.md explains it. The
target is the embedded one, which writes Python.
"""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp

import eagle_jax
from eagle_jax import assets, speculative
from eagle_jax.interface import Draws, Verified
from eagle_jax.testing import assert_batch_first, assert_same_tokens, assert_valid_tree
from eagle_jax.tree import EAGLE1_TREE, NO_PARENT, DraftTree, Topology

UNKNOWN = -1
PROMPTS = assets.TARGET.parent / "prompts.json"


@dataclasses.dataclass(frozen=True)
class Recycler:
    """Drafts what the target held most likely after each token, the last time.

    The state is a table `[B, V, W]` int32: for each row and token, the most likely
    tokens after it, or `UNKNOWN`.

    Attributes:
        vocab_size: `V`.
        shape: The tree; `W` is the most children that a node of it has.
    """

    vocab_size: int
    shape: Topology = EAGLE1_TREE

    @property
    def depth(self) -> int:
        """The deepest node's level."""
        return self.shape.depth

    def init_state(self, batch: int, capacity: int) -> jax.Array:
        """Returns tables that know nothing."""
        width = int(self.shape.ranks.max()) + 1
        return jnp.full((batch, self.vocab_size, width), UNKNOWN, jnp.int32)

    def prefill(
        self,
        params: Any,
        state: jax.Array,
        tokens: jax.Array,
        features: jax.Array,
        lengths: jax.Array,
    ) -> jax.Array:
        """Learns what follows each token of the prompt."""
        is_inside = jnp.arange(1, tokens.shape[1]) < lengths[:, None]
        seen = jnp.where(is_inside, tokens[:, :-1], self.vocab_size)
        learn = jax.vmap(lambda table, at, then: table.at[at, 0].set(then, mode="drop"))
        return learn(state, seen, tokens[:, 1:])

    def propose(
        self, params: Any, state: jax.Array, root: jax.Array, draws: Draws
    ) -> tuple[DraftTree, jax.Array]:
        """Fills the tree: the child of rank `r` is the `r`-th of its parent's list."""

        def fill(table: jax.Array, root: jax.Array) -> DraftTree:
            tokens = jnp.full(self.shape.num_nodes, root)
            is_node = jnp.full(self.shape.num_nodes, True)
            for level in self.shape.levels:
                drafts = table[tokens[level.parents], level.ranks]
                is_known = is_node[level.parents] & (drafts != UNKNOWN)
                drafts = jnp.where(is_known, drafts, 0)
                tokens = tokens.at[level.nodes].set(drafts)
                is_node = is_node.at[level.nodes].set(is_known)
            return DraftTree(
                tokens=tokens,
                parents=jnp.where(is_node, self.shape.parents, NO_PARENT),
                log_values=jnp.where(is_node, 0.0, -jnp.inf),
                is_node=is_node,
            )

        return jax.vmap(fill)(state, root), state

    def advance(self, params: Any, state: jax.Array, verified: Verified) -> jax.Array:
        """Learns what the target said after every node, accepted or not."""
        _, likely = jax.lax.top_k(verified.logits, state.shape[-1])
        at = jnp.where(verified.tree.is_node, verified.tree.tokens, self.vocab_size)
        learn = jax.vmap(lambda table, at, then: table.at[at].set(then, mode="drop"))
        return learn(state, at, likely)


def main(max_new_tokens: int = 96) -> None:
    """Decodes round by round, shows what each pass wrote, and compares."""
    pair = eagle_jax.load_embedded_pair()
    tokenizer, target = pair.tokenizer, pair.loaded.target
    drafter = Recycler(vocab_size=target.config.vocab_size)
    assert_batch_first(drafter.init_state(batch=3, capacity=8), batch=3)
    decoder = eagle_jax.Decoder(target=target, drafter=drafter, acceptance="greedy")
    params = eagle_jax.Params(target=pair.loaded.params.target)
    prompt = json.loads(PROMPTS.read_text())[3]
    requests = eagle_jax.make_requests(
        [tokenizer.encode(prompt)], max_new_tokens=max_new_tokens
    )
    num_slots = eagle_jax.cache_slots(requests, decoder.depth)

    state = speculative.prefill(decoder, params, requests, num_slots=num_slots)
    written = [tokenizer.decode(state.root)]
    while state.is_running[0]:
        state, done = speculative.decode_round(decoder, params, state)
        assert_valid_tree(jax.tree.map(lambda leaf: leaf[0], done.tree))
        written.append(tokenizer.decode(done.tokens[0, : done.count[0]]))
    plain = eagle_jax.autoregressive.generate(
        decoder, params, requests, num_slots=num_slots
    )
    assert_same_tokens(state.tokens, plain.tokens)
    passes, tokens = int(state.num_rounds[0]), int(plain.num_rounds[0])
    print("|".join(written))
    print(f"identical tokens, {passes} passes instead of {tokens}: ", end="")
    print(f"{tokens / passes:.2f} tokens per round")


if __name__ == "__main__":
    main()
